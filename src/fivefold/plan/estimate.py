"""One layout in full: step time, memory of every stage, ledger, and where the step goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.cluster import Cluster
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.model.counts import flops_per_token
from fivefold.parallel.workload import ROLES
from fivefold.plan.engines import Job
from fivefold.plan.intervals import memory_interval, step_interval
from fivefold.plan.memory.states import KINDS, stage_memory, verdict
from fivefold.plan.time.breakdown import Row
from fivefold.plan.time.placement import members
from fivefold.plan.time.stages import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Simulated,
    scalar,
    simulate,
)


@dataclass(frozen=True)
class LedgerRow:
    """Equal transfers of one rank of the busiest pipeline stage in a step."""

    split: str
    phase: str
    op: str
    group_size: int
    payload_bytes: float  # of one call
    calls: float
    wire_bytes: float  # that leave the rank in all calls
    tier: str  # the outermost that the group spans
    time_s: float  # of all calls
    exposed_s: float  # the part that no compute hides
    stage: int  # pipeline rank


@dataclass(frozen=True)
class StageEstimate:
    """One pipeline rank."""

    layers: list[int]  # of each chunk
    memory_bytes: dict[str, float]  # by kind
    in_flight: float  # micro-batches whose activations it holds at most
    forward_s: float  # of one micro-batch on all chunks
    backward_s: float


@dataclass(frozen=True)
class Estimate:
    """One layout. Bytes are of one device; MFU is of the peak at the job's precision."""

    layout: Layout
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    tokens_per_s_per_device: float
    model_flops_per_s_per_device: float  # causal attention, no recomputation
    mfu: float
    mfu_full_attention: float  # counting the full square of attention
    bubble_fraction: float  # idle share of the step on the busiest pipeline rank
    peak_memory_bytes: float  # of the worst stage
    peak_memory_low_bytes: float
    peak_memory_high_bytes: float
    worst_stage: int
    verdict: str  # "fits", "tight" or "no"
    memory_bytes: dict[str, float]  # at the worst stage, by kind
    stages: list[StageEstimate]  # of each pipeline rank
    seconds: dict[str, float]  # where the step of the busiest pipeline rank goes; their sum
    ledger: list[LedgerRow]
    placement: dict[str, str]  # split -> the tiers it crosses


def estimate(job: Job, layout: Layout, simulated: Simulated | None = None) -> Estimate:
    """The layout in full, whether it fits or not. It must be legal (see `layout.legality`).
    `simulated`: its time, where it is known already."""
    simulated = simulated or simulate(job, [layout])[0]
    step = simulated.step_s
    ranks = stage_memory(job, layout)
    memory = [{kind: rank[kind] for kind in KINDS} for rank in ranks]
    totals = [sum(kinds.values()) for kinds in memory]
    worst = int(np.argmax(totals))
    tokens = job.global_batch * job.sequence_length / (step * layout.world_size)
    causal, full = (
        flops_per_token(job.config, job.sequence_length, causal=causal, mtp=job.mtp)
        for causal in (True, False)
    )
    peak_flops = job.cluster.device.peak_flops(job.precision)
    busiest = _Busiest(simulated)
    seconds, ledger = busiest.seconds(), busiest.ledger()
    step_low, step_high = step_interval(job, layout, step)
    memory_low, memory_high = memory_interval(job, layout, totals[worst])
    return Estimate(
        layout=layout,
        step_time_s=step,
        step_time_low_s=step_low,
        step_time_high_s=step_high,
        tokens_per_s_per_device=tokens,
        model_flops_per_s_per_device=causal * tokens,
        mfu=causal * tokens / peak_flops,
        mfu_full_attention=full * tokens / peak_flops,
        bubble_fraction=max(0.0, seconds["bubble"]) / step,
        peak_memory_bytes=totals[worst],
        peak_memory_low_bytes=memory_low,
        peak_memory_high_bytes=memory_high,
        worst_stage=worst,
        verdict=str(verdict(totals[worst], job.cluster.device.memory_bytes)),
        memory_bytes=memory[worst],
        stages=[
            StageEstimate(
                simulated.stages.layers_of(rank),
                memory[rank],
                ranks[rank]["in_flight"],
                *simulated.stages.passes_s(rank).tolist(),
            )
            for rank in range(layout.pp)
        ],
        seconds=seconds,
        ledger=ledger,
        placement=_placement(job.cluster, ledger),
    )


class _Busiest:
    """The pipeline rank that works longest: where its step goes, and what it sends."""

    def __init__(self, simulated: Simulated) -> None:
        self.simulated, stages = simulated, simulated.stages
        ranks = stages.time.ranks
        works = {name: scalar(r.micro_batches * r.busy + r.once) for name, r in ranks.items()}
        role = max(ROLES, key=lambda name: works[name])
        self.rank, self.number, self.works_s = ranks[role], stages.rank_of(role), works[role]
        self.slowdown = simulated.slowdowns[self.number]
        # Between the first forward and the end of the optimizer, for other ranks or for messages.
        self.idle_s = simulated.pipeline_s + simulated.once_s - self.works_s
        self.sent = [
            (row, exposed)
            for row, exposed in zip(self.rank.rows, self._exposed_s(), strict=True)
            if scalar(row.transfer.calls) > 0 and scalar(row.transfer.group_size) > 1
        ]

    def _exposed_s(self) -> list[float]:
        """The exposed seconds of each of the rank's rows. Work takes longer where cores are shared;
        waiting does not. Messages between stages expose at most the time that the rank is idle:
        the pipeline decides which of them it waits for."""
        rows = self.rank.rows
        sends = sum(scalar(row.exposed) for row in rows if row.transfer.is_between_stages)
        share = min(1.0, max(0.0, self.idle_s) / sends) if sends else 0.0
        exposed = []
        for row in rows:
            busy, waits = _busy_and_waits(row)
            once = row.transfer.phase == "optimizer"
            slower = self.simulated.stages.cores_share if once else self.slowdown
            part = share if row.transfer.is_between_stages else 1.0
            exposed.append(part * (slower * busy + waits))
        return exposed

    def seconds(self) -> dict[str, float]:
        """The step, in parts that add up to it."""
        simulated, rank = self.simulated, self.rank
        stages, m = simulated.stages, scalar(rank.micro_batches)
        compute = self.slowdown * m * stages.compute_s(self.number)
        seconds = {
            "compute": float(compute[FORWARD] + compute[BACKWARD] - compute[ATTENTION]),
            "attention": float(compute[ATTENTION]),
            "recompute": float(compute[RECOMPUTE]),
            "slowed": 0.0,  # compute that overlaps with messages is slower
        }
        for row, exposed in self.sent:
            key = f"exposed_{row.transfer.split}"
            seconds[key] = seconds.get(key, 0.0) + exposed
            hidden = scalar(row.seconds - row.waits) - _busy_and_waits(row)[0]
            seconds["slowed"] += self.slowdown * stages.machine.slows_compute(row.transfer) * hidden
        waits = m * scalar(rank.for_experts.forward + rank.for_experts.backward)
        if waits:
            seconds["exposed_ep"] = seconds.get("exposed_ep", 0.0) + waits
        seconds["optimizer"] = stages.cores_share * scalar(rank.optimizer)
        seconds["other"] = simulated.step_s - simulated.pipeline_s - simulated.once_s
        return seconds | {"bubble": simulated.step_s - sum(seconds.values())}

    def ledger(self) -> list[LedgerRow]:
        """The transfers that happen; equal ones are one row."""
        stages = self.simulated.stages
        cluster = stages.job.cluster
        places = members(cluster, LayoutBatch.of([stages.layout]))
        rows: dict[tuple[str, str, str, int, float, str], NDArray[np.float64]] = {}
        for row, exposed in self.sent:
            transfer = row.transfer
            size, payload = int(scalar(transfer.group_size)), scalar(transfer.payload_bytes)
            tier = _tier(cluster, places[transfer.axis])
            key = (transfer.split, transfer.phase, transfer.op, size, payload, tier)
            numbers = map(scalar, (transfer.calls, transfer.wire_bytes, row.seconds, exposed))
            rows[key] = rows.get(key, np.zeros(4)) + list(numbers)
        return [
            LedgerRow(*key[:5], calls, wire_bytes, key[5], seconds, exposed, self.number)
            for key, (calls, wire_bytes, seconds, exposed) in (
                (key, numbers.tolist()) for key, numbers in rows.items()
            )
        ]


def _busy_and_waits(row: Row) -> tuple[float, float]:
    """The exposed seconds in which the rank works on a message, and in which it waits for it."""
    exposed = scalar(row.exposed)
    waits = min(scalar(row.waits), exposed)
    return exposed - waits, waits


def _tier(cluster: Cluster, together: NDArray[np.int64]) -> str:
    """The outermost tier that a group crosses; `together` [tiers, 1] as in `placement.members`."""
    counts = together[:, 0]
    outermost = int(np.argmax(counts == counts[-1]))
    return cluster.tiers[outermost].name


def _placement(cluster: Cluster, ledger: list[LedgerRow]) -> dict[str, str]:
    names = [tier.name for tier in cluster.tiers]
    used: dict[str, set[str]] = {}
    for row in ledger:
        used.setdefault(row.split, set()).add(row.tier)
    return {split: ", ".join(sorted(tiers, key=names.index)) for split, tiers in used.items()}
