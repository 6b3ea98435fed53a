"""Seconds of a job's computation and messages: one interface for accelerators and for processes
on the cores of a CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.cluster.constants import Constants
from fivefold.layout.batch import LayoutBatch
from fivefold.ledger import Transfer
from fivefold.model.config import LayerKind
from fivefold.parallel.pipeline.table import Schedule
from fivefold.parallel.workload import RankWorkload
from fivefold.plan.engines import Job
from fivefold.plan.time import accelerator as compute
from fivefold.plan.time.breakdown import (
    Message,
    Passes,
    PipelineRun,
    Rank,
    StageSeconds,
    Time,
    Traffic,
)
from fivefold.plan.time.operations import (
    Operations,
    embedding_operations,
    head_operations,
    layer_operations,
)

Layers: TypeAlias = Mapping[LayerKind | str, compute.Seconds]
"""Compute of one layer of each kind, of the `embedding` and of the `head`."""


@dataclass(frozen=True)
class Places:
    """Where the groups of a batch of layouts sit."""

    members: Mapping[str, NDArray[np.int64]]  # by axis [tiers, n], as in `placement.members`
    known: dict[tuple[str, str, bytes], Elementwise] = field(default_factory=dict)
    """Seconds of messages by operation, axis and payload: ranks of all roles send much the same."""


@dataclass(frozen=True)
class Machine(ABC):
    """The devices of a job. Seconds are arrays [n] over layouts."""

    job: Job
    constants: Constants

    @abstractmethod
    def compute_seconds(self, operations: Operations) -> compute.Seconds:
        """Seconds of one layer and one micro-batch, without messages."""

    @abstractmethod
    def message_seconds(self, transfer: Transfer, places: Places) -> Message:
        """Seconds of all calls of a transfer in a step, overlapped or not."""

    @abstractmethod
    def slows_compute(self, transfer: Transfer) -> float:
        """Seconds that compute takes longer per busy second of a transfer that overlaps with it."""

    def cores_share(self, world_size: int) -> float:
        """Processes per core, where they share cores and all are busy; else 1."""
        return 1.0

    @abstractmethod
    def step_seconds(self, layouts: LayoutBatch, ranks: Mapping[str, Rank]) -> Elementwise:
        """Seconds of a step of these ranks, its pipeline by formula."""

    @abstractmethod
    def time(self, layouts: LayoutBatch, traffic: Mapping[str, Traffic]) -> Time:
        """The step time of layouts whose traffic is known."""

    @abstractmethod
    def whole_step_seconds(self, layouts: LayoutBatch, inside: Elementwise) -> Elementwise:
        """Seconds of a step, of which `inside` lie between first forward and optimizer end."""

    @abstractmethod
    def run(self, schedule: Schedule, stages: StageSeconds, processes: float) -> PipelineRun:
        """The schedule's actions, simulated; each pipeline rank is so many processes."""

    def layer_seconds(self, layouts: LayoutBatch) -> Layers:
        """Seconds of one layer of each kind, of the embedding and of the head."""
        job = self.job
        kinds = [*dict.fromkeys(job.config.layer_kinds)]
        if job.mtp:
            kinds.append(job.config.mtp_kind)
        operations: dict[LayerKind | str, Operations] = {
            kind: layer_operations(job, layouts, kind) for kind in kinds
        }
        operations["embedding"] = embedding_operations(job, layouts)
        operations["head"] = head_operations(job, layouts)
        return {name: self.compute_seconds(ops) for name, ops in operations.items()}


def outside_of(layers: Layers, work: RankWorkload) -> Passes:
    """Seconds of embedding, head and loss, and of those of multi-token prediction."""
    modules = work.mtp_layers
    parts = [
        (layers["embedding"], work.first + modules),
        (layers["head"], work.last + modules),
    ]
    return Passes(
        sum(s.forward * count for s, count in parts),
        sum(s.input_gradient * count for s, count in parts),
        sum(s.weight_gradient * count for s, count in parts),
    )


def compute_of(
    job: Job, layouts: LayoutBatch, layers: Layers, work: RankWorkload
) -> compute.Seconds:
    """Seconds of one micro-batch on one pipeline rank, with recomputation."""
    of_layers = [(layers[kind], count) for kind, count in work.layers]
    modules = work.mtp_layers
    parts = [
        *of_layers,
        (layers["embedding"], work.first + modules),
        (layers["head"], work.last + modules),
    ]

    def total(name: str) -> Elementwise:
        return sum((getattr(s, name) * count for s, count in parts), 0.0)

    selective = layouts.recompute == "selective"
    again: Elementwise = 0.0
    for (layer, count), recomputed in zip(of_layers, work.recomputed, strict=True):
        again = again + recomputed * layer.forward
        again = again + selective * count * compute.selected_s(job, layer)
    return compute.Seconds(
        forward=total("forward"),
        input_gradient=total("input_gradient") + again,
        weight_gradient=total("weight_gradient"),
        attention_forward=total("attention_forward"),
        attention_backward=total("attention_backward"),
        split_products=total("split_products"),
        products=total("products"),
        elementwise=total("elementwise"),
    )
