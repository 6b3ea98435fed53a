"""What one rank holds and does in a step, as arithmetic: the input of every `cost`.

No torch. All of it is elementwise: degrees and counts are integers (one layout, one chunk:
`rank_work`) or arrays [n] (one pipeline rank of n layouts: `stage_work`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.degrees import Degrees
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import coordinates, group
from fivefold.layout.stages import chunks_a_rank, rank_stages
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.weights import (
    Weight,
    embedding_weight,
    embedding_weights,
    head_weights,
    layer_weights,
)
from fivefold.parallel.layer_counts import (
    StageCounts,
    held_counts,
    pipelines,
    role_rank,
    stage_counts,
)

FP32 = 4
"""Bytes of an element of gradients (accumulated and reduced in fp32), loss and optimizer state."""
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of an element of activations and of gathered weights."""

ROLES = ("first", "middle", "last")
"""The pipeline ranks that `stage_work` knows: rank 0, rank 1 (or the only one), rank pp - 1."""


@dataclass(frozen=True)
class RankCoordinates:
    """Where a rank stands, as far as sizes depend on it: the last part of an uneven split is
    smaller."""

    tp: int = 0
    dp_shard: int = 0  # along what ZeRO shards dense weights over
    edp_shard: int = 0
    kv: int = 0  # which kv head, when tp ranks hold copies


NO_REMAINDER = RankCoordinates()
"""The rank that has the largest part of every uneven split."""


@dataclass(frozen=True)
class Sizes:
    """Elements of one weight on one rank, numbers or arrays [n]."""

    local: Elementwise  # without ZeRO
    padded: Elementwise  # of all ZeRO shards, each as large as the largest, as FSDP2 sends them
    shard: Elementwise  # of this rank's ZeRO shard: dimension 0 of what it holds, split once more
    sharded: Elementwise  # does ZeRO shard it?
    gradient: Elementwise  # of its gradient, once data parallelism has reduced it


@dataclass(frozen=True)
class Unit:
    """Weights that data parallelism treats together, such as those of one layer."""

    weights: tuple[tuple[Weight, int], ...]  # each with how often it is in the unit
    count: Elementwise  # of such units here


@dataclass(frozen=True)
class RankWorkload:
    """Chunks of layers on one rank, in one optimizer step. Counts are numbers or arrays [n]."""

    config: ModelConfig
    layout: Degrees  # Layout or LayoutBatch
    sequence_length: int  # tokens of a whole sequence
    element_bytes: int
    layers: tuple[tuple[LayerKind, Elementwise], ...]  # how many of each kind
    recomputed: tuple[Elementwise, ...]  # how many of each kind run forward again as a whole
    chunks: Elementwise  # how many chunks these are
    sends_on: Elementwise  # of the chunks, those whose next stage is on another rank
    sends_back: Elementwise  # those whose previous stage is on another rank
    first: Elementwise  # has the embedding
    last: Elementwise  # has the head
    place: RankCoordinates
    mtp: bool = False  # are the multi-token-prediction modules trained?
    flat: bool = False  # ZeRO shards one flat buffer, as other programs do, not each weight's rows

    def count_layers(self, which: Callable[[LayerKind], bool] = lambda kind: True) -> Elementwise:
        """Layers of the kinds that `which` chooses."""
        return sum(count for kind, count in self.layers if which(kind))

    def count_recomputed(
        self, which: Callable[[LayerKind], bool] = lambda kind: True
    ) -> Elementwise:
        """Those of them that are recomputed in the backward pass."""
        pairs = zip(self.layers, self.recomputed, strict=True)
        return sum(count for (kind, _), count in pairs if which(kind))

    @property
    def micro_batches(self) -> Elementwise:
        """Micro-batches that go through each chunk: all, or half of them come from either end."""
        return self.layout.accumulation // (1 + self.layout.is_bidirectional)

    @property
    def tokens(self) -> Elementwise:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.layout.micro_batch * self.sequence_length // self.layout.cp

    @property
    def hidden_bytes(self) -> Elementwise:
        """B: bytes of one micro-batch's hidden states on one context-parallel rank."""
        return self.tokens * self.config.hidden_size * self.element_bytes

    @property
    def mtp_layers(self) -> Elementwise:
        """Multi-token-prediction modules, each with an embedding lookup and a head of its own."""
        return self.count_layers(lambda kind: kind.mtp)

    @property
    def shares_embedding(self) -> bool:
        """Do the first and the last stage use one embedding, as lookup and as head?"""
        return self.config.tied_embeddings or (self.mtp and self.config.mtp_layers > 0)

    @property
    def has_tied_embedding_copy(self) -> Elementwise:
        """Is here the last stage's copy of an embedding that the first stage has too?

        On a rank that has both stages of a V, multi-token prediction shares the embedding
        (arXiv:2412.19437, section 2.2); a tied head, of another stage, has its own copy.
        """
        apart = np.logical_not(self.layout.first_and_last_share_rank) & self.shares_embedding
        return self.last & (apart | (self.layout.is_v_shaped & self.config.tied_embeddings))

    @property
    def reduces_tied_embedding(self) -> Elementwise:
        """Is the embedding's gradient summed over the first and the last pipeline rank?"""
        apart = np.logical_not(self.layout.first_and_last_share_rank) & self.shares_embedding
        return (self.first | self.last) & apart

    @cached_property
    def units(self) -> tuple[list[Unit], list[Unit], list[Unit]]:
        """The weights: of the layers, of the layers' experts, and of what is outside the layers."""
        alike: dict[tuple[tuple[Weight, int], ...], Elementwise] = {}
        for kind, count in self.layers:
            weights = _weights_of_layer(self.config, LayerKind(kind.moe, mtp=kind.mtp))
            alike[weights] = alike.get(weights, 0) + count
        dense, experts = [], []
        for weights, count in alike.items():
            dense.append(Unit(tuple(w for w in weights if not w[0].is_routed), count))
            experts.append(Unit(tuple(w for w in weights if w[0].is_routed), count))
        outside = [
            Unit(_grouped(embedding_weights(self.config)), self.first),
            Unit(_grouped([embedding_weight(self.config)]), self.has_tied_embedding_copy),
            Unit(_grouped(head_weights(self.config)), self.last),
        ]
        return dense, [unit for unit in experts if unit.weights], outside

    @cached_property
    def _sizes(self) -> dict[Weight, Sizes]:
        return {}

    def sizes(self, weight: Weight) -> Sizes:
        """What this rank holds of a weight; computed once for each."""
        if weight not in self._sizes:
            self._sizes[weight] = _sizes_of(self, weight)
        return self._sizes[weight]

    def total(
        self,
        units: Iterable[Unit],
        elements: Callable[[Sizes], Elementwise],
        which: Callable[[Weight], bool] = lambda weight: True,
    ) -> Elementwise:
        """The sum of `elements` of all weights of the units that `which` chooses."""
        return sum(unit.count * self.unit_total(unit, elements, which) for unit in units)

    def unit_total(
        self,
        unit: Unit,
        elements: Callable[[Sizes], Elementwise],
        which: Callable[[Weight], bool] = lambda weight: True,
    ) -> Elementwise:
        """The sum of `elements` of the weights of one unit."""
        return sum(
            times * elements(self.sizes(weight)) for weight, times in unit.weights if which(weight)
        )


# The work of one rank


def rank_work(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    rank: int,
    precision: str,
    mtp: bool = False,
) -> list[RankWorkload]:
    """The chunks of one rank: one, or vpp of them. `precision`: "fp32" or "bf16"."""
    here = coordinates(layout, rank)
    place = RankCoordinates(
        tp=here["tp"],
        dp_shard=group(layout, "dp_shard_cp", rank).index(rank),
        edp_shard=group(layout, "edp_shard", rank).index(rank),
        kv=here["tp"] // kv_copies(layout, config),
    )
    return [
        _work_of(
            config,
            layout,
            sequence_length,
            precision,
            stage_counts(config, layout, stage, mtp),
            place=place,
            mtp=mtp,
        )
        for stage in rank_stages(layout, here["pp"])
    ]


def stage_work(
    config: ModelConfig,
    layouts: LayoutBatch,
    sequence_length: int,
    precision: str,
    role: str,
    mtp: bool = False,
    flat: bool = False,
) -> RankWorkload:
    """All chunks of one pipeline rank of each layout together; of uneven parts, the largest.

    `role` is one of `ROLES`. `mtp` adds the multi-token-prediction modules to the last stage.
    DualPipe's two chunks have half of the micro-batches each (`Work.micro_batches`).
    """
    # Few pipelines differ, however many layouts there are: what the chunks hold is counted once
    # for each of them.
    different, number = pipelines(layouts)
    held = held_counts(config, different, role_rank(config, different, role), mtp)
    held = held.combine(lambda count: np.asarray(count)[number])
    return _work_of(config, layouts, sequence_length, precision, held, mtp=mtp, flat=flat)


def pipeline_work(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    precision: str,
    mtp: bool = False,
    flat: bool = False,
) -> RankWorkload:
    """All chunks of each pipeline rank of one layout together: arrays [pp], from rank 0 on."""
    ranks = LayoutBatch.of([layout]).take(np.zeros(layout.pp, np.int64))
    held = held_counts(config, ranks, np.arange(layout.pp), mtp)
    return _work_of(config, ranks, sequence_length, precision, held, mtp=mtp, flat=flat)


def _work_of(
    config: ModelConfig,
    layout: Degrees,
    sequence_length: int,
    precision: str,
    held: StageCounts,
    place: RankCoordinates = NO_REMAINDER,
    **flags: bool,
) -> RankWorkload:
    return RankWorkload(
        config=config,
        layout=layout,
        sequence_length=sequence_length,
        element_bytes=ELEMENT_BYTES[precision],
        layers=tuple(held.layers.items()),
        recomputed=tuple(held.recomputed.values()),
        chunks=1 if isinstance(layout, Layout) else chunks_a_rank(layout),
        sends_on=held.sends_on * 1,
        sends_back=held.sends_back * 1,
        first=held.first > 0,
        last=held.last > 0,
        place=place,
        **flags,
    )


# Sizes of weights


def kv_copies(layout: Degrees, config: ModelConfig) -> Elementwise:
    """How many tp ranks hold a copy of one kv head: more than one where heads are too few."""
    return np.maximum(1, layout.tp // config.num_kv_heads)


def shard_degree(layout: Degrees, expert: bool) -> Elementwise:
    """Over how many ranks ZeRO shards a weight."""
    return layout.edp_shard if expert else layout.dp_shard * layout.cp


def part(size: Elementwise, parts: Elementwise, index: Elementwise) -> Elementwise:
    """Rows in part `index` of torch.chunk's split: ceil(size / parts), the last ones fewer."""
    rows = -(-size // parts)
    return np.clip(size - rows * index, 0, rows)


def local_shape(weight: Weight, work: RankWorkload) -> tuple[Elementwise, ...]:
    """The shape of a weight that one rank holds (without ZeRO)."""
    layout, config, shape = work.layout, work.config, list[Elementwise](weight.shape)
    if weight.split == "rows":
        shape[0] = part(shape[0], layout.tp, work.place.tp)
    elif weight.split == "columns":
        shape[1] = part(shape[1], layout.tp, work.place.tp)
    elif weight.split == "kv":
        shape[0] = part(shape[0], np.minimum(layout.tp, config.num_kv_heads), work.place.kv)
    elif weight.split == "expert":
        shape[0] = shape[0] // layout.ep
        if weight.width_dim:
            shape[weight.width_dim] = shape[weight.width_dim] // layout.etp
    return tuple(shape)


def _sizes_of(work: RankWorkload, weight: Weight) -> Sizes:
    layout, place, expert = work.layout, work.place, weight.is_routed
    rows, *rest = local_shape(weight, work)
    row = math.prod(rest)
    if work.flat:
        rows, row = rows * row, 1
    shards = shard_degree(layout, expert)
    index = place.edp_shard if expert else place.dp_shard
    local, shard = rows * row, part(rows, shards, index) * row
    # Expert weights are sharded only where there are several copies of them.
    sharded = (layout.zero > 0) & (shards > 1)
    return Sizes(
        local=local,
        padded=-(-rows // shards) * shards * row,
        shard=shard,
        sharded=sharded,
        gradient=choose(sharded, shard, local),
    )


def choose(condition: Elementwise, yes: Elementwise, no: Elementwise) -> Elementwise:
    """`yes` where the condition holds, else `no`: elementwise, and a number for numbers."""
    return np.where(condition, yes, no)[()]


@lru_cache(maxsize=256)
def _weights_of_layer(config: ModelConfig, kind: LayerKind) -> tuple[tuple[Weight, int], ...]:
    return _grouped(layer_weights(config, kind))


def _grouped(weights: Iterable[Weight]) -> tuple[tuple[Weight, int], ...]:
    """Weights with the same shape and split are one entry, counted; their names are left out."""
    return tuple(
        Counter(Weight("", w.shape, w.split, w.width_dim, w.partial) for w in weights).items()
    )
