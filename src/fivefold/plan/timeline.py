"""A planned step action by action: what a timeline shows of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.layout.notation import Layout
from fivefold.parallel.pipeline import schedules, simulation
from fivefold.plan.engines import Job
from fivefold.plan.time.stages import Stages, scalar, simulate


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

    simulation: simulation.Simulation  # its actions, exposed messages within layers included
    send_s: float  # of a message between stages
    afterwards: list[list[Afterwards]]
    optimizer_s: list[float]


def planned_step(job: Job, layout: Layout) -> PlannedStep:
    """All actions of a legal layout's step, with the seconds that its estimate is made of."""
    stages = simulate(job, [layout])[0].stages
    forward_s, backward_s, weight_s = (
        seconds.tolist() for seconds in (stages.forward_s, stages.backward_s, stages.weight_s)
    )
    table = schedules.build(layout.schedule, layout.pp, layout.vpp, layout.accumulation)
    ranks = range(layout.pp)
    return PlannedStep(
        simulation.simulate(table, forward_s, backward_s, stages.send_s, weight_s=weight_s),
        stages.send_s,
        [_afterwards(stages, rank) for rank in ranks],
        [scalar(stages.rank(rank).optimizer) for rank in ranks],
    )


def _afterwards(stages: Stages, rank: int) -> list[Afterwards]:
    """What a rank waits for besides actions: sums of gradients, and whatever the optimizer sends.
    (When in the step a gather of weights is waited for, the plan does not say.)"""
    made = []
    for row in stages.rank(rank).rows:
        transfer = row.transfer
        exposed_s = scalar(row.exposed)
        if exposed_s > 0 and (transfer.split == "dp" or transfer.phase == "optimizer"):
            payload = scalar(transfer.total_bytes)
            made.append(Afterwards(transfer.split, transfer.phase, transfer.op, payload, exposed_s))
    return made
