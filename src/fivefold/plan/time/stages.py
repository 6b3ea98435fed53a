"""The virtual stages of one layout in seconds, and its pipeline simulated with them.

The seconds of a stage come from the same arithmetic as in a search (`step`), spread over the layers
that each virtual stage really has. Then the schedule's table of actions is run with them
(`pipeline.simulation`), where the search has a formula.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.cluster.constants import Constants
from fivefold.layout.actions import is_table_file
from fivefold.layout.batch import LayoutBatch, alike
from fivefold.layout.notation import Layout
from fivefold.layout.stages import rank_stages, split_layers
from fivefold.model.config import LayerKind
from fivefold.parallel.layer_counts import all_stage_counts, role_rank
from fivefold.parallel.pipeline import schedules
from fivefold.plan.engines import Job
from fivefold.plan.time import accelerator
from fivefold.plan.time.breakdown import PipelineRun, Rank, StageSeconds, Time
from fivefold.plan.time.operations import layer_operations
from fivefold.plan.time.step import estimate_time, machine_of

SIMULATED_ROUNDS = 3
"""Rounds of pp micro-batches that are simulated; a longer step continues at the last one's pace.
Schedules that pass the ranks in both directions need one more round to settle."""

FORWARD, BACKWARD, RECOMPUTE, ATTENTION = range(4)
"""Columns of compute seconds [stage, 4]. Backward is without recomputation; attention is the part
of forward and backward that attention takes."""


@dataclass(frozen=True)
class Simulated:
    """The time of one layout, its pipeline simulated. Seconds."""

    stages: Stages
    pipeline_s: float  # from the first forward to the last backward
    once_s: float  # before and after
    step_s: float
    slowdowns: tuple[float, ...]  # by pipeline rank, 1 where ranks share no cores


def simulate(job: Job, layouts: list[Layout]) -> list[Simulated]:
    """The times of legal layouts, in their order: much cheaper than estimates."""
    constants = job.cluster.device.constants
    result: dict[int, Simulated] = {}
    for indices in alike(layouts):
        time = estimate_time(job, LayoutBatch.of([layouts[i] for i in indices]), constants)
        for place, index in enumerate(indices):
            one = cast(Time, _one_of(time, place)) if len(indices) > 1 else time
            result[index] = Stages(job, layouts[index], constants, one).simulated()
    return [result[index] for index in range(len(layouts))]


def scalar(value: ArrayLike) -> float:
    """The one element of an array over one layout."""
    return float(np.ravel(value)[0])


def _one_of(value: object, index: int) -> object:
    """The part of one layout of what holds arrays [n] over layouts."""
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


class Stages:
    """What the virtual stages of one layout hold, and how long they take."""

    def __init__(self, job: Job, layout: Layout, constants: Constants, time: Time) -> None:
        """`time` is that of this layout alone, as in a search."""
        self.machine = machine_of(job, constants)
        if job.cluster.cpu:  # what the busiest experts compute more is in `time`'s waits
            job = replace(job, imbalance=1.0)
        self.job, self.layout, self.time, self.constants = job, layout, time, constants
        self.counts = layout.layers or split_layers(job.config.num_layers, layout.stages)
        self.of_rank = [rank_stages(layout, rank) for rank in range(layout.pp)]
        self._compute = self._stage_compute()  # [stage, 4]
        self.forward_s, self.backward_s, self.weight_s = self._with_messages()  # [stage]

    @property
    def cores_share(self) -> float:
        """Processes per core, where they share cores and all are busy; else 1."""
        return self.machine.cores_share(self.layout.world_size)

    def role_of(self, rank: int) -> str:
        """first, middle or last."""
        if rank == 0:
            return "first"
        return "last" if rank == self.layout.pp - 1 else "middle"

    def rank_of(self, role: str) -> int:
        """The pipeline rank that stands for a role."""
        return int(role_rank(self.job.config, self.layout, role))

    def rank(self, rank: int) -> Rank:
        """The messages and passes of a pipeline rank's role."""
        return self.time.ranks[self.role_of(rank)]

    def layers_of(self, rank: int) -> list[int]:
        """The layers of each chunk of a pipeline rank."""
        return [self.counts[stage] for stage in self.of_rank[rank]]

    def outside_s(self, rank: int) -> NDArray[np.float64]:
        """Forward and backward seconds [2] of embedding, head and loss for one micro-batch."""
        outside = self.rank(rank).outside
        return np.array([scalar(outside.forward), scalar(outside.backward)])

    def passes_s(self, rank: int) -> NDArray[np.float64]:
        """Forward and backward seconds [2] of one micro-batch on all chunks of a rank."""
        stages = self.of_rank[rank]
        return np.array([self.forward_s[stages].sum(), self.backward_s[stages].sum()])

    def compute_s(self, rank: int) -> NDArray[np.float64]:
        """Compute seconds [4] of one micro-batch on all that a pipeline rank has."""
        total = self._compute[self.of_rank[rank]].sum(axis=0)
        total[[FORWARD, BACKWARD]] += self.outside_s(rank)
        return total

    def _stage_compute(self) -> NDArray[np.float64]:
        """Compute seconds [stage, 4] of the layers, those of multi-token prediction included."""
        counts = all_stage_counts(self.job.config, self.layout, self.job.mtp)
        seconds = np.zeros((self.layout.stages, 4))
        for kind in counts.layers:
            layer = self._layer_compute(kind)
            seconds += np.outer(counts.layers[kind], layer)
            seconds[:, RECOMPUTE] += counts.recomputed[kind] * layer[FORWARD]
        return seconds

    def _layer_compute(self, kind: LayerKind) -> NDArray[np.float64]:
        """Compute seconds [4] of a layer that is not recomputed as a whole."""
        operations = layer_operations(self.job, LayoutBatch.of([self.layout]), kind)
        s = self.machine.compute_seconds(operations)
        selective = self.layout.recompute == "selective"
        recompute = accelerator.selected_s(self.job, s) if selective else 0.0
        attention = s.attention_forward + s.attention_backward
        return np.array([scalar(x) for x in (s.forward, s.backward, recompute, attention)])

    def _with_messages(self) -> NDArray[np.float64]:
        """Seconds [3, stage] of forward, backward and the backward's part for weights.

        The exposed messages of a role's rank are shared out to its chunks, and to other ranks of
        the role, in proportion to their compute.
        """
        seconds, last = np.zeros((3, self.layout.stages)), self.layout.stages - 1
        for rank, stages in enumerate(self.of_rank):
            layers = self.rank(rank).layers
            backward_s = scalar(layers.backward)
            like = self._compute[self.of_rank[self.rank_of(self.role_of(rank))]].sum(axis=0)
            here = self._compute[stages]
            forward = here[:, FORWARD] * (scalar(layers.forward) / like[FORWARD])
            recomputing = backward_s / (like[BACKWARD] + like[RECOMPUTE])
            backward = (here[:, BACKWARD] + here[:, RECOMPUTE]) * recomputing
            # On rank 0 of a V both ends are here; half of what is outside belongs to each.
            ends = [chunk for chunk, stage in enumerate(stages) if stage in (0, last)]
            outside = self.outside_s(rank) / max(1, len(ends))
            forward[ends] += outside[0]
            backward[ends] += outside[1]
            weight = backward * (scalar(layers.weight_gradient) / backward_s)
            seconds[:, stages] = forward, backward, weight
        return seconds

    # The pipeline

    @property
    def send_s(self) -> float:
        """Seconds of a message between two stages."""
        return scalar(self.time.ranks["middle"].send)

    def seconds(self) -> StageSeconds:
        """What the schedule is simulated with."""
        forward, backward = np.zeros((2, self.layout.stages))
        for rank, stages in enumerate(self.of_rank):
            waits = self.rank(rank).waits
            forward[stages] = scalar(waits.forward) / len(stages)
            backward[stages] = scalar(waits.backward) / len(stages)
        return StageSeconds(
            self.forward_s, self.backward_s, self.weight_s, forward, backward, self.send_s
        )

    def simulated(self) -> Simulated:
        """The layout's step, its pipeline simulated. What is once a step all ranks do at the same
        time."""
        share, ranks = self.cores_share, self.time.ranks.values()
        once = max(scalar(rank.once) * share + scalar(rank.waits.once) for rank in ranks)
        pipeline = self._pipeline()
        inside = np.array([pipeline.seconds + once])
        step = self.machine.whole_step_seconds(LayoutBatch.of([self.layout]), inside)
        return Simulated(self, pipeline.seconds, once, scalar(step), pipeline.slowdowns)

    def _pipeline(self) -> PipelineRun:
        layout, stages = self.layout, self.seconds()

        def run(micro_batches: int) -> PipelineRun:
            table = schedules.build(layout.schedule, layout.pp, layout.vpp, micro_batches)
            return self.machine.run(table, stages, layout.world_size / layout.pp)

        left_out = self._left_out()
        ran = run(layout.accumulation - left_out)
        if not left_out:
            return ran
        # The slowest rank's pace, or less where it waits for messages every time. With two copies
        # of the stages each is there for half of the micro-batches.
        copies = 1 + layout.is_bidirectional
        ranks_s = [self.passes_s(rank).sum() / copies for rank in range(layout.pp)]
        before = run(layout.accumulation - left_out - layout.pp)
        pace = max((ran.seconds - before.seconds) / layout.pp, *ranks_s)
        return replace(ran, seconds=ran.seconds + left_out * pace)

    def _left_out(self) -> int:
        """Micro-batches that need not be simulated, because the pace stays the same."""
        layout = self.layout
        if is_table_file(layout.schedule):  # it has all micro-batches, or none
            return 0
        rounds = -(-layout.accumulation // layout.pp)
        kept = SIMULATED_ROUNDS + (layout.is_v_shaped or layout.is_bidirectional)
        return max(0, rounds - kept) * layout.pp
