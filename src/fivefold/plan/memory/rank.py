"""What one pipeline rank of this program holds: its chunks of layers, ZeRO's units, and the state
between passes, for many layouts at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.stages import chunk_stage, chunks_a_rank
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.weights import (
    Weight,
    embedding_weight,
    embedding_weights,
    head_weights,
    layer_weights,
)
from fivefold.parallel.data.memory import after_step
from fivefold.parallel.layer_counts import layer_range
from fivefold.parallel.workload import FP32, RankWorkload
from fivefold.plan.engines import Job
from fivefold.plan.memory.layers import Gradients, LayerMemory, Passes, map_records
from fivefold.plan.memory.schedule import ScheduleEvent
from fivefold.plan.memory.zero import ZeroUnit, unit_of
from fivefold.plan.operations.operation import Bytes
from fivefold.plan.operations.sizes import INT64
from fivefold.plan.time.operations import tokens

Kinds = dict[str, Bytes]
Mask = NDArray[np.bool_] | bool

MADE_NOW = Gradients()
KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")


class PeakMemory:
    """The highest peak so far of each layout, by kind."""

    def __init__(self, count: int) -> None:
        self.kinds: Kinds = {kind: np.zeros(count) for kind in KINDS}
        self._total = np.zeros(count)

    def update(self, here: Mask, kinds: Kinds) -> None:
        """These bytes are alive together in the layouts that `here` chooses."""
        total = sum(kinds.values())
        higher = here & (total > self._total)
        if np.any(higher):
            self._total = np.where(higher, total, self._total)
            for kind, size in kinds.items():
                self.kinds[kind] = np.where(higher, size, self.kinds[kind])


@dataclass(frozen=True)
class Run:
    """Layers of a chunk that are alike and follow each other."""

    count: NDArray[np.int64]
    kind: LayerKind
    recomputed: bool
    passes: Passes
    dense: ZeroUnit
    experts: ZeroUnit

    @cached_property
    def units(self) -> ZeroUnit:
        return self.dense + self.experts


class Rank:
    """One pipeline rank of each of n layouts, which go through the same events of a schedule."""

    def __init__(
        self,
        job: Job,
        layouts: LayoutBatch,
        rank: NDArray[np.int64],
        work: RankWorkload,
        layers: LayerMemory,
        members: NDArray[np.int64],
        splits: bool,
    ) -> None:
        """`members` of the layouts of `layers` are these. `splits`: are there backward passes in
        two parts?"""
        self.job, self.layouts, self.rank, self.work = job, layouts, rank, work
        self.gathers = layouts.zero == 3  # for each pass
        self.reduces = layouts.zero >= 2  # after each backward pass
        self.short = job.element_bytes < FP32
        # Does autograd add to the gradients of earlier micro-batches?
        self.joins = (layouts.zero == 1) & (not self.short)
        self.layers, self.members = layers, members
        self._known: dict[tuple[LayerKind, bool, Gradients], Passes] = {}
        chunks = range(int(chunks_a_rank(layouts).max(initial=1)))
        self.stages = [chunk_stage(layouts, rank, chunk) for chunk in chunks]
        self.lookups = [self._lookup_unit(chunk) for chunk in chunks]
        self.heads = [self._head_unit(chunk) for chunk in chunks]
        self.chunks = [self._runs(chunk) for chunk in chunks]
        self.wholes = [self._whole(chunk) for chunk in chunks]
        self.keeps = [self._kept(chunk) for chunk in chunks]
        self.defers = [self._deferred(chunk) if splits else 0.0 for chunk in chunks]

    # Sizes

    @cached_property
    def tokens(self) -> Bytes:
        """Tokens of one micro-batch on one context-parallel rank."""
        return tokens(self.job, self.layouts)

    @cached_property
    def held(self) -> Bytes:
        """Tokens between layers."""
        return self.tokens / self.layouts.sp_degree

    @cached_property
    def wide(self) -> Bytes:
        """Bytes of the hidden states of all tokens here."""
        return self.job.element_bytes * self.job.config.hidden_size * self.tokens

    @cached_property
    def hidden(self) -> Bytes:
        """Bytes of hidden states between layers."""
        return self.wide / self.layouts.sp_degree

    @cached_property
    def gathered(self) -> Bytes:
        """Bytes of hidden states as megatron sequence parallelism gathers them, else 0."""
        return self.wide * (self.layouts.sp_degree > 1)

    @cached_property
    def columns(self) -> Bytes:
        """Rows of the vocabulary here."""
        config = self.job.config
        return self.work.sizes(embedding_weight(config)).local / config.hidden_size

    @cached_property
    def matrix(self) -> Bytes:
        """Bytes of the embedding or the head, or of its gradient, in the compute precision."""
        return self.job.element_bytes * self.columns * self.job.config.hidden_size

    @cached_property
    def logits(self) -> Bytes:
        return self.job.element_bytes * self.tokens * self.columns

    def fp32(self, size: Bytes) -> Bytes:
        """The same elements in fp32."""
        return size * (FP32 / self.job.element_bytes)

    @property
    def head_kept(self) -> Bytes:
        """The final norm's input and output; the numerators of the softmax in fp32, their sums and
        the labels' (two numbers), and labels with which of them are here and count."""
        norm = 2 * self.hidden + FP32 * self.held
        return norm + self.fp32(self.logits) + (2 * FP32 + INT64 + 2) * self.tokens

    @property
    def head_deferred(self) -> Bytes:
        """The head's input and the gradient of logits."""
        return self.hidden + self.logits

    @property
    def lookup_kept(self) -> Bytes:
        """The rows that a part of the vocabulary is asked for, and whether it has them."""
        return (INT64 + 1) * self.tokens * (self.layouts.tp > 1)

    @property
    def lookup_deferred(self) -> Bytes:
        """The gradient of the embedding's rows."""
        return np.maximum(self.hidden, self.gathered) + self.lookup_kept

    @cached_property
    def inputs(self) -> Bytes:
        """All micro-batches, three numbers per token; and the angles of positions."""
        length = self.job.sequence_length / self.layouts.cp
        angles = FP32 * length * self.job.config.head_dim
        return 3 * INT64 * self.tokens * self.layouts.accumulation + angles

    # Layers and units

    def _runs(self, chunk: int) -> list[Run]:
        config, layouts = self.job.config, self.layouts
        stage = np.minimum(self.stages[chunk], layouts.stages - 1)
        begin, end = layer_range(config, layouts, stage)
        again = np.where(layouts.recompute_layers > 0, begin + layouts.recompute_layers, end)
        again = np.where(layouts.recompute == "full", np.minimum(again, end), begin)
        runs = []
        for kind, start, stop in _segments(config):
            parts = (begin, again, True), (again, end, False)
            for first, last, recomputed in parts:
                count = np.clip(np.minimum(last, stop) - np.maximum(first, start), 0, None)
                if np.any(count):
                    passes = self.passes(kind, recomputed)
                    runs.append(Run(count, kind, recomputed, passes, *self._units(kind)))
        return runs

    def passes(self, kind: LayerKind, recomputed: bool, gradients: Gradients = MADE_NOW) -> Passes:
        """The passes of one layer of a kind."""
        joined = gradients.accumulated and bool(np.any(self.joins))
        key = kind, recomputed, gradients._replace(accumulated=joined)
        if key not in self._known:
            passes = self.layers.passes(*key)
            self._known[key] = map_records(
                lambda each: each[self.members] if np.ndim(each) else each, passes
            )
        return self._known[key]

    def _unit(self, weights: Iterable[Weight]) -> ZeroUnit:
        return unit_of(weights, self.work)

    def _units(self, kind: LayerKind) -> tuple[ZeroUnit, ZeroUnit]:
        weights = layer_weights(self.job.config, kind)
        return (
            self._unit(weight for weight in weights if not weight.is_routed),
            self._unit(weight for weight in weights if weight.is_routed),
        )

    def _lookup_unit(self, chunk: int) -> ZeroUnit:
        return self._unit(embedding_weights(self.job.config)).times(self.first(chunk))

    def _head_unit(self, chunk: int) -> ZeroUnit:
        weights = head_weights(self.job.config)
        unit = self._unit(weights)
        if self.job.config.tied_embeddings:
            table = self._unit([embedding_weight(self.job.config)])
            unit = table.times(self.layouts.stages > 1) + unit
        return unit.times(self.last(chunk))

    def root(self, chunk: int) -> ZeroUnit:
        """What is outside the layers."""
        return self.lookups[chunk] + self.heads[chunk]

    def _whole(self, chunk: int) -> ZeroUnit:
        total = self.root(chunk)
        for run in self.chunks[chunk]:
            total += run.units.times(run.count)
        return total

    def first(self, chunk: int) -> Bytes:
        return (self.stages[chunk] == 0) * 1.0

    def last(self, chunk: int) -> Bytes:
        return (self.stages[chunk] == self.layouts.stages - 1) * 1.0

    def input_is_local(self, chunk: int) -> Bytes:
        """Is its input the output of another chunk here?"""
        before = self.stages[chunk] - 1
        local = [(stage == before) & (before >= 0) for stage in self.stages]
        return np.sum(local, axis=0)

    # Between passes

    def _kept(self, chunk: int) -> Bytes:
        """What one micro-batch leaves between its passes through a chunk."""
        total = self.first(chunk) * self.lookup_kept - self.input_is_local(chunk) * self.hidden
        total = total + np.where(self.last(chunk), self.head_kept, self.hidden)
        return total + sum(run.count * run.passes.kept for run in self.chunks[chunk])

    def _deferred(self, chunk: int) -> Bytes:
        """Between its backward pass for the input and that for the weights."""
        head, lookup = self.head_deferred, self.lookup_deferred
        total = self.last(chunk) * head + self.first(chunk) * lookup
        for run in self.chunks[chunk]:
            passes = self.passes(run.kind, run.recomputed, Gradients(deferred=True))
            total = total + run.count * passes.deferred_weight_grads
        return total

    @cached_property
    def base(self) -> Kinds:
        """Weights, gradients and moments, without the gradients of weights that ZeRO shards."""
        state = after_step(self.work)
        sharded = sum(unit.shard for unit in self.wholes)
        return {
            "weights": state.weights,
            "gradients": state.gradients - sharded,
            "optimizer": state.optimizer,
        }

    def state(self, event: ScheduleEvent) -> Kinds:
        """As a pass begins, with what ZeRO has gathered and accumulated in all chunks."""
        state = dict(self.base)
        for chunk, unit in enumerate(self.wholes[: len(event.in_flight)]):
            if event.is_gathered(chunk):
                state["weights"] = state["weights"] + unit.gathered * ~self.gathers
            if event.accumulated[chunk]:
                reduced = self.reduces | event.finished[chunk]
                whole = np.where(reduced, unit.shard, unit.gradients)
                state["gradients"] = state["gradients"] + whole
        resident = self.inputs + self.hidden * event.messages
        for chunk, held in enumerate(event.in_flight):
            passing = chunk == event.chunk
            others = held - (passing and event.kind != "W")
            left = event.deferred_weight_grads[chunk] - (passing and event.kind == "W")
            resident = resident + others * self.keeps[chunk] + left * self.defers[chunk]
        return {**state, "activations": resident, "temporary": np.zeros(1)}


@lru_cache(maxsize=64)
def _segments(config: ModelConfig) -> list[tuple[LayerKind, int, int]]:
    """Layers that follow each other and are of one kind: the first of them, and after the last."""
    segments: list[tuple[LayerKind, int, int]] = []
    for layer in range(config.num_layers):
        kind = LayerKind(config.is_moe(layer))
        if segments and segments[-1][0] == kind:
            segments[-1] = (kind, segments[-1][1], layer + 1)
        else:
            segments.append((kind, layer, layer + 1))
    return segments


def choose(here: Mask, yes: Any, no: Any) -> Any:
    """`yes` where that holds, else `no`, of two records of arrays [layout]."""

    def one(yes: Any, no: Any) -> Any:
        return yes if isinstance(yes, bool) else np.where(here, yes, no)

    return map_records(one, yes, no)
