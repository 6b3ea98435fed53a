"""Bytes of device memory that a training step takes, by arithmetic, for many layouts at once.

A pipeline rank's peak is the worst of three moments:

- loss: on the rank of the head, all activations are there and the logits with their gradient;
- backward: all activations are there, and the temporaries of one layer's backward pass (with
  full recomputation, that layer's activations once more);
- step: no activations, but what the optimizer needs beside its state.

`allocated` is what torch.cuda.max_memory_allocated() shows. `overhead` is what the caching
allocator holds beside it (max_memory_reserved() shows both), and `reserve` is outside the
allocator: the device context and communicators (nvidia-smi shows all three). Of a process on a CPU,
`overhead` is what lies idle between tensors, and `reserve` libraries and buffers of messages.

What a layer keeps for its backward pass is in `activations`. What this program itself allocates is
known exactly: `peak` has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters
from fivefold.parallel.data.memory import after_step
from fivefold.parallel.workload import (
    ELEMENT_BYTES,
    ROLES,
    RankWorkload,
    pipeline_work,
    role_rank,
    stage_work,
)
from fivefold.plan.engines import Job
from fivefold.plan.memory.engine_rank import EngineRank, is_own, layers_of, unit_elements
from fivefold.plan.memory.layers import LayerMemory

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "overhead",
    "reserve",
)

FITS = 0.92
"""Share of the device's memory up to which a plan fits; above it is tight, above 1 it does not."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at its peak; arrays [n] over layouts, by kind (see `KINDS`)."""

    worst: Any  # [n] of str: the role (first, middle or last pipeline rank) that needs most
    kinds: dict[str, Elementwise]  # of that role

    @property
    def peak_bytes(self) -> Elementwise:
        """All of it: what the device must have, and what nvidia-smi shows."""
        return sum(self.kinds.values())

    @property
    def reserved_bytes(self) -> Elementwise:
        """What torch.cuda.max_memory_reserved() shows."""
        return self.peak_bytes - self.kinds["reserve"]

    @property
    def allocated_bytes(self) -> Elementwise:
        """What torch.cuda.max_memory_allocated() shows."""
        return self.reserved_bytes - self.kinds["overhead"]


def verdict(peak_bytes: Elementwise, device_bytes: float) -> Any:
    """ "fits" with a margin of 8 % (1 - FITS), "tight" with less, or "no"; elementwise."""
    peak = np.asarray(peak_bytes)
    return np.select([peak <= FITS * device_bytes, peak <= device_bytes], ["fits", "tight"], "no")


def estimate_memory(job: Job, layouts: LayoutBatch) -> Memory:
    """The peak of every layout, on its worst pipeline rank.

    The first, a middle and the last rank are looked at (see `role_rank`): the others hold no more
    layers, and no more micro-batches. Of experts, the busiest rank
    (`job.imbalance` times the mean number of tokens, at most all of them).
    """
    numbers = {role: role_rank(job.config, layouts, role) for role in ROLES}
    works = {role: _work(job, layouts, role) for role in ROLES}
    elements = unit_elements(works["first"], layouts)
    layer = layers_of(job, layouts)
    native = LayerMemory(job, layouts, works["first"])
    roles = {
        role: EngineRank(
            job, layouts, numbers[role], works[role], elements, layer, native
        ).bytes_by_kind()
        for role in ROLES
    }
    # Where ranks are the same one, it is named the first or the last.
    names = ("first", "last", "middle")
    index = np.stack([sum(roles[name].values()) for name in names]).argmax(axis=0)
    kinds = {kind: np.choose(index, [roles[name][kind] for name in names]) for kind in KINDS}
    return Memory(np.array(names)[index], kinds)


def find_fitting(job: Job, layouts: LayoutBatch, limit: float) -> NDArray[np.bool_]:
    """Which layouts take at most `limit` bytes on the ranks that `estimate_memory` looks at, [n].

    The ranks come one after the other, and each for the layouts that have fit so far.
    """
    fit = np.ones(len(layouts), bool)
    for role in ("first", "last", "middle"):
        # With two ranks, the one in the middle is one of the others.
        there = (layouts.pp > 2) | (role != "middle")
        for check in (_least_bytes, _peak_bytes):
            here = np.flatnonzero(fit & there)
            if len(here):
                part = layouts.take(here)
                fit[here] = check(job, part, _work(job, part, role), role) <= limit
    return fit


def _work(job: Job, layouts: LayoutBatch, role: str) -> RankWorkload:
    flat = job.engine.flat_shards
    return stage_work(
        job.config, layouts, job.sequence_length, job.activations, role, job.mtp, flat
    )


def _least_bytes(job: Job, layouts: LayoutBatch, work: RankWorkload, role: str) -> Elementwise:
    """No rank of this program takes less than its states as a step ends."""
    if not is_own(job):
        return np.zeros(len(layouts))
    state = after_step(work)
    return state.weights + state.gradients + state.optimizer + np.zeros(len(layouts))


def _peak_bytes(job: Job, layouts: LayoutBatch, work: RankWorkload, role: str) -> Elementwise:
    rank = EngineRank(
        job,
        layouts,
        role_rank(job.config, layouts, role),
        work,
        unit_elements(work, layouts),
        layers_of(job, layouts),
        LayerMemory(job, layouts, work),
    )
    kinds = rank.bytes_by_kind()
    return sum(kinds[kind] for kind in KINDS) + np.zeros(len(layouts))


def stage_memory(job: Job, layout: Layout) -> list[dict[str, float]]:
    """Bytes by kind of each pipeline rank of one layout, from rank 0 on; with its `layers` and the
    most micro-batches it holds activations of (`in_flight`, in those of all its layers)."""
    flat = job.engine.flat_shards
    work = pipeline_work(job.config, layout, job.sequence_length, job.activations, job.mtp, flat)
    layouts = work.layout
    assert isinstance(layouts, LayoutBatch)
    elements = unit_elements(work, layouts)
    layer = layers_of(job, layouts)
    native = LayerMemory(job, layouts, work)
    rank = EngineRank(job, layouts, np.arange(layout.pp), work, elements, layer, native)
    figures = {
        **rank.bytes_by_kind(),
        "layers": work.count_layers(),
        "in_flight": rank.in_flight(),
    }
    columns = {name: np.broadcast_to(figure, layout.pp) for name, figure in figures.items()}
    return [
        {name: float(column[number]) for name, column in columns.items()}
        for number in range(layout.pp)
    ]


# Sizes that need no layout


def checkpoint_bytes(job: Job) -> int:
    """A full checkpoint: 16-bit weights and the optimizer's state, without gradients."""
    weights = job.element_bytes if job.precision != "fp32" else 0  # the optimizer's own, in fp32
    return count_parameters(job.config, mtp=job.mtp).total * (weights + job.engine.optimizer_bytes)


def loading_bytes(config: ModelConfig, ranks: int, file_bytes: float = 5e9) -> float:
    """Host memory of a node while its ranks read 16-bit weights, each one file at a time; never
    the whole model on every rank. Public checkpoints come in files of 5 GB."""
    return ranks * min(file_bytes, ELEMENT_BYTES["bf16"] * count_parameters(config).total)


def fewest_devices(
    config: ModelConfig, device_bytes: float, bytes_per_parameter: float, *, mtp: bool = False
) -> int:
    """Devices below which the state alone does not fit, however it is sharded."""
    total = count_parameters(config, mtp=mtp).total
    return math.ceil(total * bytes_per_parameter / device_bytes)
