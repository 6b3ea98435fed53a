"""The likely reason of a row's error: from what its prediction rests on, not from the error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.scores import Scored
from fivefold.layout.batch import LayoutBatch
from fivefold.model.counts import flops_per_token
from fivefold.plan.time.breakdown import Rank, Time
from fivefold.plan.time.step import estimate_time

MUCH = 0.10
"""Shares of the step, or of a time, from which on they are named."""
MUCH_HIDDEN = 0.3
"""The same for what runs beside compute."""
SHORT_S = 0.3
"""Steps shorter than this are mostly what no operation explains."""
AT_MOST = 3
"""Reasons that are given."""


def step_reasons(row: Scored, all_rows: Sequence[Scored]) -> str:
    """Why the step may take another time than predicted, the likeliest first."""
    found = [*_of_the_figure(row, all_rows), *_of_the_row(row), *_of_the_estimate(row)]
    return "; ".join(found[:AT_MOST]) or "not known"


def memory_reasons(row: Scored) -> str:
    """Why the peak may be another."""
    found = _of_the_row(row)
    if row.case.source == "INTERN" or "not stated" in row.case.notes:
        found.append("which memory it is is not stated")
    if row.layout.recompute == "none" and row.layout.pp > 1:
        found.append(f"activations of {row.layout.pp} micro-batches")
    return "; ".join(found[:AT_MOST]) or "not known"


def _of_the_figure(row: Scored, all_rows: Sequence[Scored]) -> list[str]:
    """What is odd about the published figure itself."""
    case, measured, found = row.case, row.case.step_s, []
    assert measured is not None
    same = [
        other.case.step_s
        for other in all_rows
        if other.case.step_s is not None
        and (other.case.cluster, other.case.job) == (case.cluster, case.job)
        and other.layout == row.layout
    ]
    if max(same) > (1 + MUCH) * min(same):
        found.append(f"runs of this layout took {min(same):.3g} to {max(same):.3g} s")
    job = case.job
    flops = flops_per_token(job.config, job.sequence_length, causal=True, mtp=job.mtp)
    flops *= job.global_batch * job.sequence_length / job.cluster.num_devices
    share = flops / measured / _products(row)
    if share > 1 - MUCH:
        found.append(f"the figure needs {share:.0%} of what products reach, with no time for else")
    elif share < 0.25:
        found.append(f"the run reached {share:.0%} of what products can: not tuned, or held up")
    return found


def _products(row: Scored) -> float:
    device = row.case.job.cluster.device
    precision = row.case.job.precision
    precision = device.half if precision in ("bf16", "fp16") else precision
    return device.matmul_flops(precision, device.constants)


def _of_the_row(row: Scored) -> list[str]:
    """What the row leaves open."""
    found, choices = [], row.case.choices
    if len({choice.micro_batch for choice in choices}) > 1:
        found.append(f"micro-batch not given ({row.layout.micro_batch} taken)")
    if len({choice.recompute for choice in choices}) > 1:
        found.append(f"recompute not given ({row.layout.recompute} taken)")
    if len({choice.vpp for choice in choices}) > 1:
        found.append(f"chunks not given ({row.layout.vpp} taken)")
    if "single iteration" in row.case.notes:
        found.append("one iteration's reading")
    if row.case.trust in ("C", "B-"):
        found.append(f"source of trust {row.case.trust}")
    return found


def _of_the_estimate(row: Scored) -> list[str]:
    """What takes a large part of the predicted step beside arithmetic, the largest first."""
    job = row.case.job
    time = estimate_time(job, LayoutBatch.of([row.layout]), job.cluster.device.constants)
    rank = max(time.ranks.values(), key=lambda each: _one(each.busy * each.micro_batches))
    parts = _parts(time, rank)
    step = _one(time.step)
    found = [
        f"{name} are {seconds / step:.0%} of the predicted step"
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
        if seconds > MUCH * step
    ]
    for name, seconds in _hidden(rank).items():
        if seconds > MUCH_HIDDEN * step:
            found.append(f"{name} messages of {seconds / step:.0%} of the step are taken as hidden")
    if step < SHORT_S:
        found.append("a short step: launches and fixed costs")
    return found


def _parts(time: Time, rank: Rank) -> dict[str, float]:
    parts: dict[str, float] = {}
    for each in rank.rows:
        name = f"exposed {each.transfer.split.upper()} messages"
        parts[name] = parts.get(name, 0.0) + _one(each.exposed)
    works = _one(rank.micro_batches * rank.busy) + _one(rank.once)
    parts["waits for other stages and nodes"] = _one(time.step) - works
    parts["optimizer steps"] = _one(rank.optimizer)
    return parts


def _hidden(rank: Rank) -> dict[str, float]:
    hidden: dict[str, float] = {}
    for each in rank.rows:
        name = each.transfer.split.upper()
        hidden[name] = hidden.get(name, 0.0) + _one(each.seconds) - _one(each.exposed)
    return hidden


def _one(value: object) -> float:
    return float(np.ravel(np.asarray(value, dtype=float))[0])
