"""A run compared with its plan: where the seconds, the bytes and the memory went."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cluster.cluster import Cluster
from fivefold.cluster.host import here_path
from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.files import atomic_write
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import groups
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.step_trace import PARTS
from fivefold.train.loop import train
from fivefold.train.outcome import RankOutcome, RunOutcome
from fivefold.train.prepare import Plan, plan_run
from fivefold.train.runfile import Run
from fivefold.verify.ledgers import Row, compare_ledgers

if TYPE_CHECKING:
    from fivefold.train.timeline import WriteTimeline

VERSION = 1
"""Of the report's keys."""

ALLOCATED = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Kinds of planned memory that a GPU's allocator shows: what tensors take. What is resident of a
process on a CPU has `overhead` and `reserve` in it, too."""


def train_and_compare(run: Run, write_timeline: WriteTimeline | None = None) -> Row | None:
    """Train (see `train.loop.train`) and compare the run with its plan; None where there is nothing
    to compare. Writes the report into `out`. UserError where the run cannot be planned, before it
    starts."""
    job = planned_job(plan_run(run))
    outcome = train(run, write_timeline)
    if outcome is None:
        return None
    report = compare_with_plan(outcome, job)
    if run.out is not None:
        atomic_write(Path(run.out, "report.json"), json.dumps(report, indent=2) + "\n")
    return report


# --- the plan's side ---------------------------------------------------------------------------


def planned_job(plan: Plan) -> Job | None:
    """What is predicted: the run on its cluster, or if it names none on this machine as `fivefold
    calibrate` measured it; None if it was not measured. UserError where the cluster is not known or
    the run cannot be planned for it, for example in its precision."""
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
    estimate(job, plan.layout)  # raises what should be known before the run
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
        if os.environ.get("RANK", "0") == "0":
            print(f"note: no prediction for this run: {error}; `fivefold calibrate` measures again")
        return None
    on_cpu = plan.device == "cpu"
    measured = (cluster.cores is not None) == on_cpu  # a machine with GPUs may run on its CPU
    return cluster if measured and not (on_cpu and plan.run.precision != "fp32") else None


def predicted_seconds(estimate: Estimate) -> dict[str, float]:
    """The predicted seconds by the parts in which a run is measured, without data, which is not
    predicted, and with `other`. Waiting for a message between stages is bubble, as in a run."""
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


# --- the comparison --------------------------------------------------------------------------


def measured_imbalance(layout: Layout, outcomes: Sequence[RankOutcome]) -> float | None:
    """Rows of the busiest expert rank over the mean, in the last micro-batch, averaged over layers;
    None without expert parallelism."""
    ratios = []
    for ranks in groups(layout, "ep").tolist() if layout.ep > 1 else ():
        for rows in zip(*(outcomes[rank].expert_rows for rank in ranks), strict=True):
            ratios.append(max(rows) * len(rows) / sum(rows) if any(rows) else 1.0)
    return statistics.fmean(ratios) if ratios else None


def compare_with_plan(outcome: RunOutcome, job: Job | None) -> Row:
    """The run and its prediction as plain data; None where nothing is predicted. The prediction
    uses the measured imbalance of experts, which depends on the router.

    The planner predicts the slowest pipeline rank; where it does, the measured seconds are means
    over that pipeline rank's ranks, else over all ranks.
    """
    plan, ranks = outcome.plan, outcome.ranks
    layout, run = plan.layout, plan.run
    imbalance = measured_imbalance(layout, ranks)
    planned = job and estimate(replace(job, imbalance=imbalance or 1.0), layout)
    rows, differences = compare_ledgers(
        plan.config,
        layout,
        run.data.sequence_length,
        run.precision,
        [rank.ledger for rank in ranks],
    )
    pp_rank = planned.ledger[0].stage if planned and planned.ledger and layout.pp > 1 else None
    members = ranks
    if pp_rank is not None:
        members = [ranks[rank] for rank in groups(layout, "stage")[pp_rank].tolist()]
    measured = {part: statistics.fmean(rank.seconds[part] for rank in members) for part in PARTS}
    predicted = predicted_seconds(planned) if planned else {}
    return {
        "version": VERSION,
        "layout": str(layout),
        "precision": run.precision,
        "device": plan.device,
        "cluster": run.cluster or (job and "here"),
        "pp_rank": pp_rank,
        "steps": outcome.steps,
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
            "predicted_bytes": planned and _predicted_memory(planned, plan.device),
            "measured_bytes": max(rank.memory_bytes for rank in ranks),
        },
        "ledger": rows,
        "ledger_differences": differences,
        "ranks": [
            {"rank": number, "seconds": rank.seconds, "memory_bytes": rank.memory_bytes}
            for number, rank in enumerate(ranks)
        ],
    }


def _predicted_memory(planned: Estimate, device: str) -> float:
    shown = ALLOCATED if device == "cuda" else (*ALLOCATED, "overhead", "reserve")
    return sum(planned.memory_bytes[kind] for kind in shown)
