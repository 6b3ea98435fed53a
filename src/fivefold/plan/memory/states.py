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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fivefold.cluster.cpu import ProcessOverhead
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.model.config import TRAINED_FAMILIES, LayerKind, ModelConfig
from fivefold.model.counts import count_parameters
from fivefold.model.weights import embedding_weight
from fivefold.parallel.workload import (
    ELEMENT_BYTES,
    FP32,
    ROLES,
    RankWorkload,
    Sizes,
    Unit,
    choose,
    pipeline_work,
    role_rank,
    shard_degree,
    stage_work,
)
from fivefold.plan.engines import Job
from fivefold.plan.memory.activations import LayerBytes, layer_activations
from fivefold.plan.memory.layers import LayerMemory
from fivefold.plan.memory.peak import native_memory
from fivefold.plan.time.operations import Numbers, tokens
from fivefold.plan.time.pipeline import in_flight

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

FRAGMENTATION = 0.08
"""Memory that the caching allocator holds beyond what is allocated at the peak, as a share: blocks
too small for the next tensor. Fitted: rounded, to torchtitan's and BLOOM's published peaks."""

CONTEXT_BYTES = 0.5e9
"""CUDA context, kernels and libraries of one process."""

COMMUNICATOR_BYTES = 0.55e9
"""NCCL's buffers of one group of ranks: 544 to 688 MB were reported on 4 A100s (NVIDIA/nccl issues
964, 864, 986, 1685 and 2363 are on this)."""

ALL_TO_ALL_BYTES = 2.7e9
"""Channels between all pairs for expert all-to-alls, beside the group itself: 8 H100s went from
1.06 to 4.34 GB with the first one (same issues)."""

WORKSPACE_BYTES = 2 * 32 * 2**20
"""Workspaces of cuBLAS and of Transformer Engine's products, 32 MiB each."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at its peak; arrays [n] over layouts, by kind (see `KINDS`)."""

    worst: Any  # [n] of str: the role (first, middle or last pipeline rank) that needs most
    kinds: dict[str, Numbers]  # of that role

    @property
    def peak_bytes(self) -> Numbers:
        """All of it: what the device must have, and what nvidia-smi shows."""
        return sum(self.kinds.values())

    @property
    def reserved_bytes(self) -> Numbers:
        """What torch.cuda.max_memory_reserved() shows."""
        return self.peak_bytes - self.kinds["reserve"]

    @property
    def allocated_bytes(self) -> Numbers:
        """What torch.cuda.max_memory_allocated() shows."""
        return self.reserved_bytes - self.kinds["overhead"]


def verdict(peak_bytes: Numbers, device_bytes: float) -> Any:
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
    flat = job.engine.flat_shards
    works = {
        role: stage_work(
            job.config, layouts, job.sequence_length, job.activations, role, job.mtp, flat
        )
        for role in ROLES
    }
    elements = _elements(works["first"], layouts)
    layer = _layers_of(job, layouts)
    native = LayerMemory(job, layouts, works["first"])
    roles = {
        role: _Rank(
            job, layouts, numbers[role], works[role], elements, layer, native
        ).bytes_by_kind()
        for role in ROLES
    }
    # Where ranks are the same one, it is named the first or the last.
    names = ("first", "last", "middle")
    index = np.stack([sum(roles[name].values()) for name in names]).argmax(axis=0)
    kinds = {kind: np.choose(index, [roles[name][kind] for name in names]) for kind in KINDS}
    return Memory(np.array(names)[index], kinds)


def stage_memory(job: Job, layout: Layout) -> list[dict[str, float]]:
    """Bytes by kind of each pipeline rank of one layout, from rank 0 on; with its `layers` and the
    most micro-batches it holds activations of (`in_flight`, in those of all its layers)."""
    flat = job.engine.flat_shards
    work = pipeline_work(job.config, layout, job.sequence_length, job.activations, job.mtp, flat)
    layouts = work.layout
    assert isinstance(layouts, LayoutBatch)
    elements = _elements(work, layouts)
    layer = _layers_of(job, layouts)
    native = LayerMemory(job, layouts, work)
    rank = _Rank(job, layouts, np.arange(layout.pp), work, elements, layer, native)
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


def is_own(job: Job) -> bool:
    """Is it this program that trains, and a model that it can train?"""
    return job.engine.name == "fivefold" and job.config.family in TRAINED_FAMILIES


# One pipeline rank


@dataclass(frozen=True)
class _Elements:
    """Of the weights of one unit on one rank: before ZeRO, and in the optimizer's part of them."""

    local: Numbers
    shard: Numbers


Units = tuple[list[_Elements], list[_Elements], list[_Elements]]
"""Of one of each of the units in `Work.units`: dense, experts, outside the layers."""


def _elements(work: RankWorkload, layouts: LayoutBatch) -> Units:
    """The same on all pipeline ranks, but for how many of the units there are."""

    def of(unit: Unit, shards: Numbers) -> _Elements:
        local = work.unit_total(unit, lambda sizes: sizes.local)
        return _Elements(local, work.unit_total(unit, _padded) / shards)

    dense, experts, outside = work.units
    sharded = layouts.zero > 0
    dense_shards = np.where(sharded, shard_degree(layouts, expert=False), 1)
    expert_shards = np.where(sharded, shard_degree(layouts, expert=True), 1)
    return (
        [of(unit, dense_shards) for unit in dense],
        [of(unit, expert_shards) for unit in experts],
        [of(unit, dense_shards) for unit in outside],
    )


def _padded(sizes: Sizes) -> Numbers:
    return choose(sizes.sharded, sizes.padded, sizes.local)


def _layers_of(job: Job, layouts: LayoutBatch) -> Callable[[LayerKind], LayerBytes]:
    """Of a layer by its kind, computed once for kinds that keep the same."""
    known: dict[LayerKind, LayerBytes] = {}

    def of(kind: LayerKind) -> LayerBytes:
        kind = replace(kind, window=0)  # what is kept does not depend on the keys in sight
        if kind not in known:
            known[kind] = layer_activations(job, layouts, kind)
        return known[kind]

    return of


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank of n layouts."""

    job: Job
    layouts: LayoutBatch
    rank: Numbers  # its number, from 0 to pp - 1
    work: RankWorkload
    elements: Units
    layer: Callable[[LayerKind], LayerBytes]
    native: LayerMemory  # of this program's own layers

    def bytes_by_kind(self) -> dict[str, Numbers]:
        kinds = self.own_program() if is_own(self.job) else self.worst_moment()
        tensors = sum(kinds.values())
        if self.job.cluster.cores:
            kinds["overhead"], kinds["reserve"] = self.non_tensor_bytes(tensors)
        else:
            kinds["overhead"] = FRAGMENTATION * tensors
            kinds["reserve"] = reserve_bytes(self.layouts)
        return kinds

    def non_tensor_bytes(self, tensors: Numbers) -> tuple[Numbers, Numbers]:
        """What a process on a CPU holds beside its tensors (`cluster.cpu`): what lies idle
        between them, and the rest."""
        layouts, overhead = self.layouts, self.job.cluster.core.overhead
        alone, messages, zero, recompute = (
            overhead.get(kind, ProcessOverhead(bytes=0.0, share=0.0))
            for kind in ("alone", "messages", "zero", "recompute")
        )
        single = layouts.world_size == 1
        idle = np.where(single, alone.share, messages.share) * tensors
        # ZeRO's layers come and go as a whole; recomputation's, from what was kept of each.
        layer_bytes = self.job.element_bytes * self.largest_layer()
        idle = idle + zero.share * layer_bytes * (layouts.zero > 0)
        idle = idle + recompute.share * self.hidden() * (layouts.recompute == "full")
        return idle, np.where(single, alone.bytes, messages.bytes)

    def own_program(self) -> dict[str, Numbers]:
        own = native_memory(self.rank, self.work, self.native)
        buffers = own.pop("temporary")
        return {**own, "logits": 0.0, "buffers": buffers}

    def worst_moment(self) -> dict[str, Numbers]:
        """At the worst of the three moments."""
        activations, (logits, loss_buffers) = self.activations(), self.loss()
        moments = [
            (activations, logits, loss_buffers),
            (activations, 0.0, self.backward_buffers()),
            (0.0, 0.0, self.job.engine.step_bytes * self.total(lambda each: each.shard)),
        ]
        loss, backward, step = (sum(moment) for moment in moments)
        at_loss, at_backward = (loss >= backward) & (loss >= step), backward >= step
        kept, alive, buffers = (
            np.where(at_loss, in_loss, np.where(at_backward, in_backward, in_step))
            for in_loss, in_backward, in_step in zip(*moments, strict=True)
        )
        return {
            **self.states(),
            "activations": kept,
            "logits": alive,
            "buffers": buffers + self.lasting_buffers(),
        }

    def states(self) -> dict[str, Numbers]:
        """Weights, gradients and optimizer (Rajbhandari et al., arXiv:1910.02054, section 3).

        ZeRO 3 keeps no weights but the optimizer's own, from which they are gathered; with a
        pipeline, some programs keep them gathered, and their gradients whole, between
        micro-batches. Weights of 8-bit products are kept quantized along both dimensions: as much
        as in 16 bits.
        """
        engine, zero = self.job.engine, self.layouts.zero
        local, shard = self.total(lambda each: each.local), self.total(lambda each: each.shard)
        # In fp32 the weights are their own master copy.
        optimizer_bytes = engine.optimizer_bytes - FP32 * (self.job.precision == "fp32")
        stays = (zero == 3) & (self.layouts.pp > 1) & engine.keeps_gathered
        return {
            "weights": self.job.element_bytes * local * ((zero < 3) | stays),
            "gradients": (engine.gradient_bytes + engine.gradient_copy_bytes)
            * np.where((zero < 2) | stays, local, shard),
            "optimizer": (0 if engine.host_optimizer else optimizer_bytes) * shard,
        }

    def total(self, of: Callable[[_Elements], Numbers]) -> Numbers:
        """Of all weights here."""
        return sum(
            unit.count * of(each)
            for units, elements in zip(self.work.units, self.elements, strict=True)
            for unit, each in zip(units, elements, strict=True)
        )

    def in_flight(self) -> Numbers:
        """Most micro-batches whose activations are held, in those of all layers here."""
        layouts = self.layouts
        chunks = in_flight(
            layouts.schedule, layouts.pp, layouts.vpp, layouts.accumulation, self.rank
        )
        return chunks / self.work.chunks

    def activations(self) -> Numbers:
        work, selective = self.work, self.layouts.recompute == "selective"
        total: Numbers = 0.0
        for (kind, count), recomputed in zip(work.layers, work.recomputed, strict=True):
            layer = self.layer(kind)
            kept = np.where(selective, layer.selective, layer.whole)
            total = total + (count - recomputed) * kept + recomputed * layer.input
        if self.job.engine.keeps_stage_outputs:
            total = total + self.hidden() * work.chunks * (self.layouts.pp > 1)
        # The final norm's input and the head's.
        return self.in_flight() * total + 2 * self.hidden() * work.last

    def hidden(self) -> Numbers:
        """One micro-batch's hidden states between layers."""
        t = tokens(self.job, self.layouts)
        return self.job.element_bytes * self.job.config.hidden_size * t / self.layouts.sp_degree

    def gathered(self) -> Numbers:
        """Them as sequence parallelism gathers them, where there is such."""
        t = tokens(self.job, self.layouts)
        return (
            self.job.element_bytes * self.job.config.hidden_size * t * (self.layouts.sp_degree > 1)
        )

    def loss(self) -> tuple[Numbers, Numbers]:
        """Logits with their copies, and buffers, where the head is."""
        config, engine, layouts = self.job.config, self.job.engine, self.layouts
        t = tokens(self.job, layouts)
        local = t * config.vocab_size / layouts.tp
        alive = (engine.loss_bytes + engine.split_loss_bytes * (layouts.tp > 1)) * local
        # What one loss keeps for its backward pass: a 16-bit gradient, or fp32 softmax.
        saved = min(engine.loss_bytes, FP32) * local
        if engine.loss_chunk:
            alive, saved = alive * np.minimum(1.0, engine.loss_chunk / t), 0.0 * local
        waiting = np.where(
            (layouts.schedule == "gpipe") | (layouts.schedule == "bfs"), layouts.accumulation, 1
        )
        modules = config.mtp_layers if self.job.mtp else 0
        logits = alive + saved * (waiting * (1 + modules) - 1)
        # A 16-bit gradient of the head's matrix before it is added to the others; under sequence
        # parallelism the gathered input, its gradient, and the part being scattered.
        head = self.job.element_bytes * self.work.sizes(embedding_weight(config)).local
        buffers = (head + 3 * self.gathered() + self.hidden()) * self.work.last
        # ZeRO 3: what is outside the layers, and the layer that is first to go back.
        outside = sum(
            unit.count * each.local
            for unit, each in zip(self.work.units[2], self.elements[2], strict=True)
        )
        units = self.job.element_bytes * (outside + self.largest_layer()) * (layouts.zero == 3)
        return logits * self.work.last, buffers + units

    def largest_layer(self) -> Numbers:
        """Elements of the largest layer's weights."""
        dense, experts, _ = self.work.units
        dense_elements, expert_elements, _ = self.elements
        largest: Numbers = 0.0
        for unit, each in zip(dense, dense_elements, strict=True):
            largest = np.maximum(largest, each.local * (unit.count > 0))
        beside = dense_elements[-1].local  # the last kind has experts where any has
        for unit, each in zip(experts, expert_elements, strict=True):
            largest = np.maximum(largest, (each.local + beside) * (unit.count > 0))
        return largest

    def backward_buffers(self) -> Numbers:
        """Temporaries of the backward pass of the layer that needs most."""
        work, selective = self.work, self.layouts.recompute == "selective"
        most: Numbers = 0.0
        for (kind, count), recomputed in zip(work.layers, work.recomputed, strict=True):
            layer = self.layer(kind)
            again = np.where(recomputed > 0, layer.whole - layer.input, 0.0)
            again = np.where(selective, layer.whole - layer.selective, again)
            most = np.maximum(most, (layer.backward + again) * (count > 0))
        # ZeRO 3: weights of this layer and the next to come, and gradients in 16 bits and, on
        # their way, in fp32. ZeRO 2: gradients on their way.
        zero = self.layouts.zero
        on_the_way = self.job.engine.gradient_bytes * (zero == 2)
        unit_bytes = np.where(zero == 3, 3 * self.job.element_bytes + FP32, on_the_way)
        return most + unit_bytes * self.largest_layer()

    def lasting_buffers(self) -> Numbers:
        """Buffers that stay, whatever the moment."""
        config, engine, layouts = self.job.config, self.job.engine, self.layouts
        receive = 2 * self.hidden() * (layouts.pp > 1)
        width = config.num_kv_heads / layouts.tp * (config.qk_head_dim + config.v_head_dim)
        ring = 2 * self.job.element_bytes * width * tokens(self.job, layouts) * (layouts.ring > 1)
        total = WORKSPACE_BYTES + engine.bucket_bytes + receive + ring
        if engine.placeholder_gradients:
            total = total + self.job.element_bytes * self.placeholders()
        return total

    def placeholders(self) -> Numbers:
        """Elements of the empty gradients that products return which add to the main gradient
        themselves: Transformer Engine keeps one for each shape of weight."""
        largest: Numbers = 0.0
        for unit, each in zip(self.work.units[0], self.elements[0], strict=True):
            largest = np.maximum(largest, each.local * (unit.count > 0))
        moe = self.job.config.moe
        if moe is None:
            return largest
        expert: Numbers = 0.0  # one has the shapes of all
        for unit, each in zip(self.work.units[1], self.elements[1], strict=True):
            expert = np.maximum(expert, each.local * (unit.count > 0))
        return largest + expert / (moe.num_experts / self.layouts.ep)


def reserve_bytes(layouts: LayoutBatch) -> Numbers:
    """Outside the allocator: the device context, a communicator for each group of ranks that
    talks, and what expert all-to-alls add."""
    degrees = (layouts.tp, layouts.cp, layouts.pp, layouts.dp, layouts.ep, layouts.edp)
    # The norm of gradients is summed over tp and pp together, and losses over all ranks.
    degrees = (*degrees, layouts.tp * layouts.pp, layouts.world_size)
    groups = sum((degree > 1) * 1 for degree in degrees) - (layouts.ep == 1) * (layouts.edp > 1)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * groups + ALL_TO_ALL_BYTES * (layouts.ep > 1)
