"""A planned step action by action: what a timeline shows of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.layout.notation import Layout
from fivefold.layout.stages import rank_stages
from fivefold.parallel.pipeline import schedules
from fivefold.plan.estimate import Stages, simulate
from fivefold.plan.job import Job


@dataclass(frozen=True)
class Afterwards:
    """A message once a step, as far as nothing hides it."""

    split: str
    phase: str
    op: str
    payload_bytes: float  # of all its calls
    exposed_s: float


@dataclass(frozen=True)
class PlannedStep:
    """One step by pipeline rank."""

    simulation: schedules.Simulation  # its actions, exposed messages within layers included
    send_s: float  # of a message between stages
    afterwards: list[list[Afterwards]]
    optimizer_s: list[float]


def planned_step(job: Job, layout: Layout) -> PlannedStep:
    """All actions of a legal layout's step, with the seconds that its estimate is made of."""
    stages = simulate(job, [layout])[0].stages
    forward_s, backward_s = [0.0] * layout.stages, [0.0] * layout.stages
    for rank in range(layout.pp):
        for stage, seconds in zip(rank_stages(layout, rank), stages.chunk_s(rank), strict=True):
            forward_s[stage], backward_s[stage] = seconds
    send_s = _only(stages.time.ranks["middle"].send)
    table = schedules.build(layout.schedule, layout.pp, layout.vpp, layout.accumulation)
    ranks = range(layout.pp)
    return PlannedStep(
        schedules.simulate(table, forward_s, backward_s, send_s),
        send_s,
        [_afterwards(stages, rank) for rank in ranks],
        [_only(stages.time.ranks[stages.role_of(rank)].optimizer) for rank in ranks],
    )


def _afterwards(stages: Stages, rank: int) -> list[Afterwards]:
    """What a rank waits for besides actions: sums of gradients, and whatever the optimizer sends.
    (When in the step a gather of weights is waited for, the plan does not say.)"""
    made = []
    for row in stages.time.ranks[stages.role_of(rank)].rows:
        transfer = row.transfer
        exposed_s = _only(row.exposed)
        if exposed_s > 0 and (transfer.split == "dp" or transfer.phase == "optimizer"):
            payload = _only(transfer.total_bytes)
            made.append(Afterwards(transfer.split, transfer.phase, transfer.op, payload, exposed_s))
    return made


def _only(value: Any) -> float:
    """The one element of an array over one layout."""
    return float(np.ravel(value)[0])
