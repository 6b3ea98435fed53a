"""One layout in full: step time, memory of every stage, ledger, and where the step goes.

The seconds of a stage come from the same arithmetic as in a search (`time`), spread over the layers
each virtual stage really has; the pipeline's table of actions is then run with them
(`pipeline.simulation`), where the search has a formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.cluster import Cluster
from fivefold.layout.actions import is_table_file
from fivefold.layout.batch import LayoutBatch, alike
from fivefold.layout.notation import Layout
from fivefold.layout.stages import rank_stages, split_layers
from fivefold.model.config import LayerKind
from fivefold.model.counts import flops_per_token
from fivefold.parallel.pipeline import schedules, simulation
from fivefold.parallel.workload import ROLES, role_rank, stage_counts
from fivefold.plan.engines import Job
from fivefold.plan.intervals import memory_interval, step_interval
from fivefold.plan.memory.states import KINDS, stage_memory, verdict
from fivefold.plan.time import accelerator as compute
from fivefold.plan.time import shared_cores as sharing
from fivefold.plan.time.breakdown import Rank, Row, Time
from fivefold.plan.time.constants import Constants
from fivefold.plan.time.operations import layer_operations
from fivefold.plan.time.placement import members
from fivefold.plan.time.step import estimate_time, operation_s, whole_step_s

SIMULATED_ROUNDS = 3
"""Rounds of pp micro-batches that are simulated; a longer step goes on at the pace of the last.
Schedules that go through the ranks both ways take a round more to settle."""


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
    stages: list[dict[str, Any]]  # of each pipeline rank
    seconds: dict[str, float]  # where the step of the busiest pipeline rank goes; their sum
    ledger: list[LedgerRow]
    placement: dict[str, str]  # split -> the tiers it crosses


@dataclass(frozen=True)
class Simulated:
    """The time of one layout, its pipeline simulated. Seconds."""

    stages: Stages
    pipeline_s: float  # from the first forward to the last backward
    once_s: float  # before and after
    step_s: float
    slowdowns: tuple[float, ...] = ()  # by pipeline rank, where ranks share cores (`sharing`)


def simulate(job: Job, layouts: list[Layout]) -> list[Simulated]:
    """The times alone of legal layouts, in their order: much cheaper than estimates."""
    constants = Constants.of(job.cluster.device)
    result: dict[int, Simulated] = {}
    for indices in alike(layouts):
        time = estimate_time(job, LayoutBatch.of([layouts[i] for i in indices]), constants)
        for place, index in enumerate(indices):
            own = _one_of(time, place) if len(indices) > 1 else time
            result[index] = _simulate(job, layouts[index], constants, own)
    return [result[index] for index in range(len(layouts))]


def _simulate(job: Job, layout: Layout, constants: Constants, time: Time) -> Simulated:
    stages = Stages(job, layout, constants, time)
    if job.cluster.cores:
        return _simulate_shared(job, layout, stages, job.cluster.cores)
    once = max(number(rank.once) for rank in time.ranks.values())
    pipeline = stages.pipeline_s(once)
    inside = np.array([pipeline + once])
    step = number(whole_step_s(job, LayoutBatch.of([layout]), constants, inside))
    return Simulated(stages, pipeline, once, step)


def _simulate_shared(job: Job, layout: Layout, stages: Stages, cores: int) -> Simulated:
    """On cores that the ranks share. What is once a step all ranks do at the same time."""
    share, ranks = stages.cores_share, stages.time.ranks.values()
    once = max(number(rank.once) * share + number(rank.waits.once) for rank in ranks)
    shared = stages.on_shared_cores(cores)
    step = shared.pipeline_s + once + job.cluster.core.step * share
    return Simulated(stages, shared.pipeline_s, once, step, shared.slowdowns)


def _one_of(value: Any, index: int) -> Any:
    """One layout's part of what holds arrays [n] over layouts."""
    if isinstance(value, np.ndarray):
        return value[index : index + 1] if value.ndim and len(value) > 1 else value
    if isinstance(value, list):
        return [_one_of(each, index) for each in value]
    if isinstance(value, dict):
        return {name: _one_of(each, index) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **{name: _one_of(part, index) for name, part in parts.items()})
    return value


def estimate(job: Job, layout: Layout, simulated: Simulated | None = None) -> Estimate:
    """The layout in full, whether it fits or not. It must be legal (see `layout.legality`).
    `simulated`: its time, where it is known already."""
    simulated = simulated or simulate(job, [layout])[0]
    stages, step = simulated.stages, simulated.step_s
    role = _busiest(stages.time)
    memory = stage_memory(job, layout)
    totals = [sum(stage[kind] for kind in KINDS) for stage in memory]
    worst = int(np.argmax(totals))
    tokens = job.global_batch * job.sequence_length / (step * layout.world_size)
    causal, full = (
        flops_per_token(job.config, job.sequence_length, causal=causal, mtp=job.mtp)
        for causal in (True, False)
    )
    peak_flops = job.cluster.device.peak_flops(job.precision)
    seconds = _seconds(simulated, role)
    ledger = list(_ledger(job, layout, simulated, role))
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
        memory_bytes={kind: memory[worst][kind] for kind in KINDS},
        stages=[stages.described(rank, memory[rank]) for rank in range(layout.pp)],
        seconds=seconds,
        ledger=ledger,
        placement=_placement(job.cluster, ledger),
    )


def number(value: Any) -> float:
    """The one element of an array over one layout."""
    return float(np.ravel(value)[0])


def _busiest(time: Time) -> str:
    """The role of the pipeline rank that works longest."""
    works = {role: number(r.micro_batches * r.busy + r.once) for role, r in time.ranks.items()}
    return max(ROLES, key=lambda role: works[role])


# Stages


@dataclass(frozen=True)
class _Compute:
    """Seconds of arithmetic of one micro-batch on some layers."""

    forward: float = 0.0
    backward: float = 0.0  # without recomputation
    recompute: float = 0.0
    attention: float = 0.0  # part of forward and backward

    def plus(self, other: _Compute, count: float = 1) -> _Compute:
        return _Compute(
            self.forward + count * other.forward,
            self.backward + count * other.backward,
            self.recompute + count * other.recompute,
            self.attention + count * other.attention,
        )


class Stages:
    """What the virtual stages of one layout hold, and how long they take."""

    def __init__(self, job: Job, layout: Layout, constants: Constants, time: Time) -> None:
        if job.cluster.cores:  # what the busiest experts compute more is in `time`'s waits
            job = replace(job, imbalance=1.0)
        self.job, self.layout, self.time, self.constants = job, layout, time, constants
        self.counts = layout.layers or split_layers(job.config.num_layers, layout.stages)
        compute = self._stage_compute()
        ranks = range(layout.pp)
        self.compute = {rank: [compute[s] for s in rank_stages(layout, rank)] for rank in ranks}

    @property
    def cores_share(self) -> float:
        """Processes for each core, where they share cores and all are busy."""
        return max(1.0, self.layout.world_size / (self.job.cluster.cores or math.inf))

    def rank_of(self, role: str) -> int:
        """The pipeline rank that stands for a role."""
        return int(role_rank(self.job.config, self.layout, role))

    def rank_counts(self, rank: int) -> list[int]:
        """The layers of each chunk of a pipeline rank."""
        return [self.counts[stage] for stage in rank_stages(self.layout, rank)]

    def role_of(self, rank: int) -> str:
        """first, middle or last."""
        if rank == 0:
            return "first"
        return "last" if rank == self.layout.pp - 1 else "middle"

    def _layer_compute(self, kind: LayerKind) -> _Compute:
        """Of a layer of a kind that is not recomputed as a whole."""
        operations = layer_operations(self.job, LayoutBatch.of([self.layout]), kind)
        s = operation_s(self.job, self.constants, operations)
        selective = self.layout.recompute == "selective"
        return _Compute(
            number(s.forward),
            number(s.backward),
            number(compute.selected_s(self.job, s)) if selective else 0.0,
            number(s.attention_forward + s.attention_backward),
        )

    def _stage_compute(self) -> list[_Compute]:
        """Of the layers of each virtual stage, those of multi-token prediction included."""
        counts = stage_counts(self.job.config, self.layout, self.job.mtp)
        stages = [_Compute()] * self.layout.stages
        for kind in (name[1] for name in counts if name[0] == "layers"):
            layer = self._layer_compute(kind)
            again = _Compute(recompute=layer.forward)
            layers, recomputed = counts["layers", kind], counts["recomputed", kind]
            stages = [
                stage.plus(layer, layers[number]).plus(again, recomputed[number])
                for number, stage in enumerate(stages)
            ]
        return stages

    def outside(self, role: str) -> _Compute:
        """Of embedding, head and loss."""
        passes = self.time.ranks[role].outside
        return _Compute(number(passes.forward), number(passes.backward))

    def rank_compute(self, rank: int) -> _Compute:
        """Of all that a pipeline rank has."""
        total = self.outside(self.role_of(rank))
        for chunk in self.compute[rank]:
            total = total.plus(chunk)
        return total

    def chunk_s(self, rank: int) -> list[tuple[float, float]]:
        """Forward and backward seconds of each chunk with its messages: a rank's exposed messages
        are shared out to its chunks, and to other ranks of its role, like the arithmetic."""
        role = self.role_of(rank)
        layers = self.time.ranks[role].layers
        own = _Compute()
        for chunk in self.compute[self.rank_of(role)]:
            own = own.plus(chunk)
        forward = number(layers.forward) / own.forward
        backward = number(layers.backward) / (own.backward + own.recompute)
        seconds = [
            (c.forward * forward, (c.backward + c.recompute) * backward) for c in self.compute[rank]
        ]
        outside, stages = self.outside(role), rank_stages(self.layout, rank)
        for chunk, stage in enumerate(stages):
            # On rank 0 of a V both ends are here; half of what is outside belongs to each.
            ends = [s for s in stages if s in (0, self.layout.stages - 1)]
            if stage in ends:
                f, b = seconds[chunk]
                share = 1 / len(ends)
                seconds[chunk] = f + share * outside.forward, b + share * outside.backward
        return seconds

    def weight_s(self, rank: int) -> list[float]:
        """Of each chunk's backward seconds the part for the weights' gradients."""
        passes = self.time.ranks[self.role_of(rank)]
        share = number(passes.layers.weight_gradient) / number(passes.layers.backward)
        return [backward * share for _, backward in self.chunk_s(rank)]

    def rank_s(self, rank: int) -> float:
        """Seconds of one micro-batch on all chunks of a rank, both passes."""
        return sum(map(sum, self.chunk_s(rank)))

    def pipeline_s(self, once: float) -> float:
        """Seconds from the first forward to the last backward."""
        layout = self.layout
        if layout.pp == 1:
            return self._by_formula() - once
        forward, backward, weight = self.by_stage()
        # With two copies of the stages each is there for half of the micro-batches.
        copies = 1 + layout.is_bidirectional
        ranks_s = [self.rank_s(rank) / copies for rank in range(layout.pp)]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        send = number(self.time.ranks["middle"].send)

        def simulated(micro_batches: int) -> float:
            table = schedules.build(layout.schedule, layout.pp, layout.vpp, micro_batches)
            return simulation.simulate(
                table, forward, backward, send, weight_s=weight, overlapped_s=both
            ).step_s

        left_out = self._left_out()
        step = simulated(layout.accumulation - left_out)
        if not left_out:
            return step
        # The slowest rank's pace, or less where it waits for messages every time.
        pace = (step - simulated(layout.accumulation - left_out - layout.pp)) / layout.pp
        return step + left_out * max(pace, *ranks_s)

    def on_shared_cores(self, cores: int) -> sharing.Shared:
        """The pipeline, run by ranks that share cores."""
        layout, roles = self.layout, self.time.ranks
        forward, backward, weight = self.by_stage()
        busy = {
            "F": forward,
            "B": backward,
            "I": [b - w for b, w in zip(backward, weight, strict=True)],
            "W": weight,
        }
        waits = {kind: [0.0] * layout.stages for kind in busy}
        for rank in range(layout.pp):
            mine, stages = roles[self.role_of(rank)].waits, rank_stages(layout, rank)
            for stage in stages:
                waits["F"][stage] = number(mine.forward) / len(stages)
                waits["B"][stage] = waits["I"][stage] = number(mine.backward) / len(stages)
        processes, send = layout.world_size / layout.pp, number(roles["middle"].send)

        def simulated(micro_batches: int) -> sharing.Shared:
            table = schedules.build(layout.schedule, layout.pp, layout.vpp, micro_batches)
            return sharing.simulate(table, busy, waits, send, processes, cores)

        left_out = self._left_out()
        shared = simulated(layout.accumulation - left_out)
        if not left_out:
            return shared
        before = simulated(layout.accumulation - left_out - layout.pp)
        pace = (shared.pipeline_s - before.pipeline_s) / layout.pp
        return replace(shared, pipeline_s=shared.pipeline_s + left_out * pace)

    def _left_out(self) -> int:
        """Micro-batches that need not be simulated, for the step goes on at the same pace."""
        layout = self.layout
        if is_table_file(layout.schedule):  # it has all micro-batches, or none
            return 0
        rounds = -(-layout.accumulation // layout.pp)
        kept = SIMULATED_ROUNDS + (layout.is_v_shaped or layout.is_bidirectional)
        return max(0, rounds - kept) * layout.pp

    def by_stage(self) -> tuple[list[float], list[float], list[float]]:
        """Forward, backward and, of that, weight-gradient seconds of each virtual stage."""
        forward, backward, weight = ([0.0] * self.layout.stages for _ in range(3))
        for rank in range(self.layout.pp):
            chunks, stages = self.chunk_s(rank), rank_stages(self.layout, rank)
            for stage, times, of_weights in zip(stages, chunks, self.weight_s(rank), strict=True):
                forward[stage], backward[stage] = times
                weight[stage] = of_weights
        return forward, backward, weight

    def _by_formula(self) -> float:
        """Pipeline and what is once a step, from the step by formula."""
        layouts = LayoutBatch.of([self.layout])
        steps = [whole_step_s(self.job, layouts, self.constants, np.array([s])) for s in (0.0, 1.0)]
        none, one = map(number, steps)
        return (number(self.time.step) - none) / (one - none)

    def described(self, rank: int, memory: dict[str, float]) -> dict[str, Any]:
        """What the answer says of a pipeline rank; `memory` as in `stage_memory`."""
        chunks = self.chunk_s(rank)
        return {
            "layers": self.rank_counts(rank),
            "memory_bytes": {kind: memory[kind] for kind in KINDS},
            "in_flight": memory["in_flight"],
            "forward_s": sum(forward for forward, _ in chunks),
            "backward_s": sum(backward for _, backward in chunks),
        }


# Where the step goes


def _waits_s(simulated: Simulated, rank: Rank) -> float:
    """Seconds between the first forward and the end of the optimizer in which a rank does nothing,
    for other ranks or for messages between stages."""
    works = number(rank.micro_batches * rank.busy + rank.once)
    return simulated.pipeline_s + simulated.once_s - works


def _exposed_s(simulated: Simulated, role: str) -> list[float]:
    """The exposed seconds of each of the rank's rows. Those of messages between stages are no more
    than it waits at all: the pipeline decides which of them it waits for."""
    rank = simulated.stages.time.ranks[role]
    if simulated.stages.job.cluster.cores:
        return [_exposed_on_cores(simulated, role, row) for row in rank.rows]
    sends = sum(number(row.exposed) for row in rank.rows if row.transfer.is_between_stages)
    share = min(1.0, max(0.0, _waits_s(simulated, rank)) / sends) if sends else 0.0
    return [
        number(row.exposed) * (share if row.transfer.is_between_stages else 1.0)
        for row in rank.rows
    ]


def _exposed_on_cores(simulated: Simulated, role: str, row: Row) -> float:
    """What is busy takes longer where cores are shared; waiting does not."""
    if sharing.overlaps_compute(row.transfer):
        return 0.0
    slower = _slowdown(simulated, role)
    if row.transfer.phase == "optimizer":
        slower = simulated.stages.cores_share
    return slower * number(row.seconds - row.waits) + number(row.waits)


def _slowdown(simulated: Simulated, role: str) -> float:
    return simulated.slowdowns[simulated.stages.rank_of(role)]


def _happens(row: Row) -> bool:
    return number(row.transfer.calls) > 0 and number(row.transfer.group_size) > 1


def _seconds(simulated: Simulated, role: str) -> dict[str, float]:
    """The step of one pipeline rank, in parts that add up to it."""
    if simulated.stages.job.cluster.cores:
        return _seconds_on_cores(simulated, role)
    stages = simulated.stages
    rank = stages.time.ranks[role]
    m = number(rank.micro_batches)
    arithmetic = stages.rank_compute(stages.rank_of(role))
    computes = m * (arithmetic.forward + arithmetic.backward + arithmetic.recompute)
    exposed: dict[str, float] = {}
    sends = 0.0
    for row, seconds in zip(rank.rows, _exposed_s(simulated, role), strict=True):
        if not _happens(row):
            continue
        key = f"exposed_{row.transfer.split}"
        exposed[key] = exposed.get(key, 0.0) + seconds
        sends += seconds * row.transfer.is_between_stages
    optimizer = number(rank.optimizer)
    works = m * number(rank.busy) + number(rank.once)
    return {
        "compute": m * (arithmetic.forward + arithmetic.backward - arithmetic.attention),
        "attention": m * arithmetic.attention,
        "recompute": m * arithmetic.recompute,
        # Compute runs slower beside messages.
        "slowed": works - computes - (sum(exposed.values()) - sends) - optimizer,
        **exposed,
        "bubble": _waits_s(simulated, rank) - sends,
        "optimizer": optimizer,
        "other": simulated.step_s - simulated.pipeline_s - simulated.once_s,
    }


def _seconds_on_cores(simulated: Simulated, role: str) -> dict[str, float]:
    """The same where ranks share cores: all that is busy takes as much longer."""
    stages, slowdown = simulated.stages, _slowdown(simulated, role)
    rank, share = stages.time.ranks[role], stages.cores_share
    m = number(rank.micro_batches)
    slowed = slowdown * m
    arithmetic = stages.rank_compute(stages.rank_of(role))
    seconds = {
        "compute": slowed * (arithmetic.forward + arithmetic.backward - arithmetic.attention),
        "attention": slowed * arithmetic.attention,
        "recompute": slowed * arithmetic.recompute,
        "slowed": 0.0,  # by messages beside compute, which take their part of the core
        "optimizer": share * number(rank.optimizer),
        "other": share * stages.job.cluster.core.step,
    }
    for row, exposed in zip(rank.rows, _exposed_s(simulated, role), strict=True):
        key = f"exposed_{row.transfer.split}"
        if _happens(row) and not sharing.overlaps_compute(row.transfer):
            seconds[key] = seconds.get(key, 0.0) + exposed
        elif _happens(row):
            seconds["slowed"] += slowdown * number(row.seconds - row.waits)
    waits = number(rank.for_experts.forward + rank.for_experts.backward)
    if waits:
        seconds["exposed_ep"] = seconds.get("exposed_ep", 0.0) + m * waits
    return {**seconds, "bubble": simulated.step_s - sum(seconds.values())}


# The ledger


def _ledger(job: Job, layout: Layout, simulated: Simulated, role: str) -> Iterator[LedgerRow]:
    """The transfers that happen; equal ones are one row."""
    cluster, rank = job.cluster, simulated.stages.time.ranks[role]
    places = members(cluster, LayoutBatch.of([layout]))
    stage = simulated.stages.rank_of(role)
    rows: dict[tuple[Any, ...], list[float]] = {}
    for row, exposed in zip(rank.rows, _exposed_s(simulated, role), strict=True):
        transfer = row.transfer
        calls, size = number(transfer.calls), int(number(transfer.group_size))
        if not _happens(row):
            continue
        tier = _tier(cluster, places[transfer.axis])
        payload = number(transfer.payload_bytes)
        key = (transfer.split, transfer.phase, transfer.op, size, payload, tier)
        numbers = [calls, number(transfer.wire_bytes), number(row.seconds), exposed]
        rows[key] = [a + b for a, b in zip(rows.get(key, [0.0] * 4), numbers, strict=True)]
    for (split, phase, op, size, payload, tier), (calls, wire, seconds, exposed) in rows.items():
        yield LedgerRow(split, phase, op, size, payload, calls, wire, tier, seconds, exposed, stage)


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
