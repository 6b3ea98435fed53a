"""What one pipeline rank takes with any training engine: the worst of its moments.

What this program itself allocates is known exactly: `peak` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.cluster.cpu import ProcessOverhead
from fivefold.layout.batch import LayoutBatch
from fivefold.model.config import TRAINED_FAMILIES, LayerKind
from fivefold.model.weights import embedding_weight
from fivefold.parallel.workload import (
    FP32,
    RankWorkload,
    Sizes,
    Unit,
    choose,
    shard_degree,
)
from fivefold.plan.engines import Job
from fivefold.plan.memory.activations import LayerBytes, layer_activations
from fivefold.plan.memory.layers import LayerMemory
from fivefold.plan.memory.peak import native_memory
from fivefold.plan.time.operations import tokens
from fivefold.plan.time.pipeline import in_flight

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
class UnitElements:
    """Of the weights of one unit on one rank: before ZeRO, and in the optimizer's part of them."""

    local: Elementwise
    shard: Elementwise


Units = tuple[list[UnitElements], list[UnitElements], list[UnitElements]]
"""Of one of each of the units in `Work.units`: dense, experts, outside the layers."""


def unit_elements(work: RankWorkload, layouts: LayoutBatch) -> Units:
    """The same on all pipeline ranks, but for how many of the units there are."""

    def of(unit: Unit, shards: Elementwise) -> UnitElements:
        local = work.unit_total(unit, lambda sizes: sizes.local)
        return UnitElements(local, work.unit_total(unit, _padded) / shards)

    dense, experts, outside = work.units
    sharded = layouts.zero > 0
    dense_shards = np.where(sharded, shard_degree(layouts, expert=False), 1)
    expert_shards = np.where(sharded, shard_degree(layouts, expert=True), 1)
    return (
        [of(unit, dense_shards) for unit in dense],
        [of(unit, expert_shards) for unit in experts],
        [of(unit, dense_shards) for unit in outside],
    )


def _padded(sizes: Sizes) -> Elementwise:
    return choose(sizes.sharded, sizes.padded, sizes.local)


def layers_of(job: Job, layouts: LayoutBatch) -> Callable[[LayerKind], LayerBytes]:
    """Of a layer by its kind, computed once for kinds that keep the same."""
    known: dict[LayerKind, LayerBytes] = {}

    def of(kind: LayerKind) -> LayerBytes:
        kind = replace(kind, window=0)  # what is kept does not depend on the keys in sight
        if kind not in known:
            known[kind] = layer_activations(job, layouts, kind)
        return known[kind]

    return of


@dataclass(frozen=True)
class EngineRank:
    """One pipeline rank of n layouts."""

    job: Job
    layouts: LayoutBatch
    rank: Elementwise  # its number, from 0 to pp - 1
    work: RankWorkload
    elements: Units
    layer: Callable[[LayerKind], LayerBytes]
    native: LayerMemory  # of this program's own layers

    def bytes_by_kind(self) -> dict[str, Elementwise]:
        kinds = self.own_program() if is_own(self.job) else self.worst_moment()
        tensors = sum(kinds.values())
        if self.job.cluster.cores:
            kinds["overhead"], kinds["reserve"] = self.non_tensor_bytes(tensors)
        else:
            kinds["overhead"] = FRAGMENTATION * tensors
            kinds["reserve"] = reserve_bytes(self.layouts)
        return kinds

    def non_tensor_bytes(self, tensors: Elementwise) -> tuple[Elementwise, Elementwise]:
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

    def own_program(self) -> dict[str, Elementwise]:
        own = native_memory(self.rank, self.work, self.native)
        buffers = own.pop("temporary")
        return {**own, "logits": 0.0, "buffers": buffers}

    def worst_moment(self) -> dict[str, Elementwise]:
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

    def states(self) -> dict[str, Elementwise]:
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

    def total(self, of: Callable[[UnitElements], Elementwise]) -> Elementwise:
        """Of all weights here."""
        return sum(
            unit.count * of(each)
            for units, elements in zip(self.work.units, self.elements, strict=True)
            for unit, each in zip(units, elements, strict=True)
        )

    def in_flight(self) -> Elementwise:
        """Most micro-batches whose activations are held, in those of all layers here."""
        layouts = self.layouts
        chunks = in_flight(
            layouts.schedule, layouts.pp, layouts.vpp, layouts.accumulation, self.rank
        )
        return chunks / self.work.chunks

    def activations(self) -> Elementwise:
        work, selective = self.work, self.layouts.recompute == "selective"
        total: Elementwise = 0.0
        for (kind, count), recomputed in zip(work.layers, work.recomputed, strict=True):
            layer = self.layer(kind)
            kept = np.where(selective, layer.selective, layer.whole)
            total = total + (count - recomputed) * kept + recomputed * layer.input
        if self.job.engine.keeps_stage_outputs:
            total = total + self.hidden() * work.chunks * (self.layouts.pp > 1)
        # The final norm's input and the head's.
        return self.in_flight() * total + 2 * self.hidden() * work.last

    def hidden(self) -> Elementwise:
        """One micro-batch's hidden states between layers."""
        t = tokens(self.job, self.layouts)
        return self.job.element_bytes * self.job.config.hidden_size * t / self.layouts.sp_degree

    def gathered(self) -> Elementwise:
        """Them as sequence parallelism gathers them, where there is such."""
        t = tokens(self.job, self.layouts)
        return (
            self.job.element_bytes * self.job.config.hidden_size * t * (self.layouts.sp_degree > 1)
        )

    def loss(self) -> tuple[Elementwise, Elementwise]:
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

    def largest_layer(self) -> Elementwise:
        """Elements of the largest layer's weights."""
        dense, experts, _ = self.work.units
        dense_elements, expert_elements, _ = self.elements
        largest: Elementwise = 0.0
        for unit, each in zip(dense, dense_elements, strict=True):
            largest = np.maximum(largest, each.local * (unit.count > 0))
        beside = dense_elements[-1].local  # the last kind has experts where any has
        for unit, each in zip(experts, expert_elements, strict=True):
            largest = np.maximum(largest, (each.local + beside) * (unit.count > 0))
        return largest

    def backward_buffers(self) -> Elementwise:
        """Temporaries of the backward pass of the layer that needs most."""
        work, selective = self.work, self.layouts.recompute == "selective"
        most: Elementwise = 0.0
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

    def lasting_buffers(self) -> Elementwise:
        """Buffers that stay, whatever the moment."""
        config, engine, layouts = self.job.config, self.job.engine, self.layouts
        receive = 2 * self.hidden() * (layouts.pp > 1)
        width = config.num_kv_heads / layouts.tp * (config.qk_head_dim + config.v_head_dim)
        ring = 2 * self.job.element_bytes * width * tokens(self.job, layouts) * (layouts.ring > 1)
        total = WORKSPACE_BYTES + engine.bucket_bytes + receive + ring
        if engine.placeholder_gradients:
            total = total + self.job.element_bytes * self.placeholders()
        return total

    def placeholders(self) -> Elementwise:
        """Elements of the empty gradients that products return which add to the main gradient
        themselves: Transformer Engine keeps one for each shape of weight."""
        largest: Elementwise = 0.0
        for unit, each in zip(self.work.units[0], self.elements[0], strict=True):
            largest = np.maximum(largest, each.local * (unit.count > 0))
        moe = self.job.config.moe
        if moe is None:
            return largest
        expert: Elementwise = 0.0  # one has the shapes of all
        for unit, each in zip(self.work.units[1], self.elements[1], strict=True):
            expert = np.maximum(expert, each.local * (unit.count > 0))
        return largest + expert / (moe.num_experts / self.layouts.ep)


def reserve_bytes(layouts: LayoutBatch) -> Elementwise:
    """Outside the allocator: the device context, a communicator for each group of ranks that
    talks, and what expert all-to-alls add."""
    degrees = (layouts.tp, layouts.cp, layouts.pp, layouts.dp, layouts.ep, layouts.edp)
    # The norm of gradients is summed over tp and pp together, and losses over all ranks.
    degrees = (*degrees, layouts.tp * layouts.pp, layouts.world_size)
    groups = sum((degree > 1) * 1 for degree in degrees) - (layouts.ep == 1) * (layouts.edp > 1)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * groups + ALL_TO_ALL_BYTES * (layouts.ep > 1)


def is_own(job: Job) -> bool:
    """Is it this program that trains, and a model that it can train?"""
    return job.engine.name == "fivefold" and job.config.family in TRAINED_FAMILIES
