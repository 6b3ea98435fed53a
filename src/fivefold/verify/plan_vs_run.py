"""The plan beside the run, when a run is over: where the seconds, the bytes and the memory went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fivefold.cluster.cluster import Cluster, load_cluster
from fivefold.cluster.host import here_path
from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import groups
from fivefold.ledger import Ledger
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.step_trace import PARTS, Spans, seconds
from fivefold.train.prepare import Plan

Report = dict[str, Any]

ALLOCATED = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Kinds of planned memory that a GPU's allocator shows: what tensors take. What is resident of a
process on a CPU has `overhead` and `reserve` in it, too."""


class StepAverages:
    """Where the seconds of this rank's steps went. The first step, which warms up, is left out
    if there is another one."""

    def __init__(self) -> None:
        self._first: dict[str, float] | None = None
        self._sums = dict.fromkeys(PARTS, 0.0)
        self.steps = 0

    def add(self, spans: Spans) -> None:
        parts = seconds(spans)
        if self._first is None:
            self._first = parts
            return
        self.steps += 1
        for part, value in parts.items():
            self._sums[part] += value

    def mean(self) -> dict[str, float]:
        """Seconds of a step, by part."""
        if self.steps == 0:
            return self._first or self._sums
        return {part: value / self.steps for part, value in self._sums.items()}


@dataclass(frozen=True)
class RankOutcome:
    """What one rank has to tell of a run."""

    seconds: dict[str, float]  # of a step, by part
    ledger: Ledger  # of the last step
    memory_bytes: int  # at most, beyond what the process had before the model was built
    peak_bytes: int  # at most, with that
    expert_rows: list[int]  # by its MoE layers: that its experts worked on in the last micro-batch


# --- the plan's side ---------------------------------------------------------------------------


def job_of(plan: Plan) -> Job | None:
    """What the planner is asked about this very run: on the run's cluster, or where it names none
    on this machine as `fivefold calibrate` has measured it; None where it has not. UserError where
    the cluster is not known or the run cannot be planned for it, in its precision say."""
    run = plan.run
    cluster = _cluster_of(plan)
    if cluster is None:
        return None
    job = Job(
        plan.config,
        cluster,
        run.data.sequence_length,
        run.global_batch,
        run.precision,
        ENGINES["fivefold"],
    )
    estimate(job, plan.layout)  # what it refuses is better known before the run
    return job


def _cluster_of(plan: Plan) -> Cluster | None:
    world_size = plan.layout.world_size
    if plan.run.cluster is not None:
        return load_cluster(plan.run.cluster, world_size)
    if not here_path().is_file():
        return None
    try:
        cluster = load_cluster(str(here_path()), world_size)
    except UserError as error:  # the run did not ask for it
        print(f"note: no plan beside this run: {error}; `fivefold calibrate` makes the file anew")
        return None
    on_cpu = plan.device == "cpu"
    measured = (cluster.cores is not None) == on_cpu  # a machine with GPUs may run on its CPU
    return cluster if measured and not (on_cpu and plan.run.precision != "fp32") else None


def predicted_seconds(estimate: Estimate) -> dict[str, float]:
    """The planned seconds by the parts in which a run is measured (but for data, which no plan
    speaks of) and `other`. Waiting for a message between stages is bubble, as in a run."""
    parts = dict.fromkeys((*PARTS, "other"), 0.0)
    del parts["data"]
    for name, value in estimate.seconds.items():
        if name.startswith("exposed_"):
            parts[name.removeprefix("exposed_")] += value
        elif name in ("bubble", "optimizer"):
            parts[name] += value
        elif name in ("compute", "attention", "recompute", "slowed"):
            parts["compute"] += value
        else:
            parts["other"] += value
    between_stages = sum(
        row.exposed_s for row in estimate.ledger if row.split == "pp" and row.op == "send"
    )
    parts["pp"] -= between_stages
    parts["bubble"] += between_stages
    return parts


# --- both --------------------------------------------------------------------------------------


def gather(outcome: RankOutcome) -> list[RankOutcome] | None:
    """The outcomes of all ranks, on rank 0. All ranks call this."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(outcome, everyone)
    return cast("list[RankOutcome] | None", everyone)


def measured_imbalance(layout: Layout, outcomes: Sequence[RankOutcome]) -> float | None:
    """Rows of the busiest expert rank over the mean, in the last micro-batch: the mean of layers.
    None without expert parallelism."""
    ratios = []
    for ranks in groups(layout, "ep").tolist() if layout.ep > 1 else ():
        for rows in zip(*(outcomes[rank].expert_rows for rank in ranks), strict=True):
            ratios.append(max(rows) * len(rows) / sum(rows) if any(rows) else 1.0)
    return statistics.fmean(ratios) if ratios else None


def beside(plan: Plan, job: Job | None, outcomes: Sequence[RankOutcome], steps: int) -> Report:
    """The plan beside the run, as plain data; None where the plan says nothing. What the router
    chose no planner can know: it is told how far the run's was from even.

    The planner speaks of the pipeline rank that works longest; where it speaks, the measured
    seconds are those of that pipeline rank's ranks, else of all ranks. `steps` were measured.
    """
    from fivefold.verify.check import compare_ledgers

    layout, run = plan.layout, plan.run
    imbalance = measured_imbalance(layout, outcomes)
    planned = job and estimate(replace(job, imbalance=imbalance or 1.0), layout)
    rows, differences = compare_ledgers(
        plan.config,
        layout,
        run.data.sequence_length,
        run.precision,
        [outcome.ledger for outcome in outcomes],
    )
    pp_rank = None
    if planned and planned.ledger and layout.pp > 1:
        pp_rank = planned.ledger[0].stage
    members = range(layout.world_size)
    if pp_rank is not None:
        members = groups(layout, "stage")[pp_rank].tolist()
    measured = {
        part: sum(outcomes[rank].seconds[part] for rank in members) / len(members) for part in PARTS
    }
    predicted = predicted_seconds(planned) if planned else {}
    shown = ALLOCATED if plan.device == "cuda" else (*ALLOCATED, "overhead", "reserve")
    return {
        "layout": str(layout),
        "precision": run.precision,
        "device": plan.device,
        "cluster": run.cluster or (job and "here"),
        "pp_rank": pp_rank,
        "steps": steps,
        "imbalance": imbalance,
        "step_s": {
            "predicted": planned and planned.step_time_s,
            "predicted_low": planned and planned.step_time_low_s,
            "predicted_high": planned and planned.step_time_high_s,
            "measured": sum(measured.values()),
        },
        "seconds": [
            {"part": part, "predicted_s": predicted.get(part), "measured_s": measured.get(part)}
            for part in (*PARTS, "other")
        ],
        "memory": {
            "predicted_bytes": planned and sum(planned.memory_bytes[kind] for kind in shown),
            "measured_bytes": max(outcome.memory_bytes for outcome in outcomes),
        },
        "ledger": rows,
        "ledger_differences": differences,
        "ranks": [
            {"rank": rank, "seconds": outcome.seconds, "memory_bytes": outcome.memory_bytes}
            for rank, outcome in enumerate(outcomes)
        ],
    }
