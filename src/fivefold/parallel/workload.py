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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Degrees, Layout
from fivefold.layout.ranks import coordinates, group
from fivefold.layout.stages import (
    chunk_stage,
    chunks_a_rank,
    rank_stages,
    split_layers,
    split_layers_many,
    stage_ranges,
)
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.weights import (
    Weight,
    embedding_weight,
    embedding_weights,
    head_weights,
    layer_weights,
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


@dataclass(frozen=True)
class Sizes:
    """Elements of one weight on one rank, numbers or arrays [n]."""

    local: Any  # without ZeRO
    padded: Any  # of all ZeRO shards together as FSDP2 sends them, each as large as the largest
    shard: Any  # of this rank's ZeRO shard: dimension 0 of what it holds, split once more
    sharded: Any  # does ZeRO shard it?
    gradient: Any  # of its gradient, once data parallelism has reduced it


@dataclass(frozen=True)
class Unit:
    """Weights that data parallelism treats together, such as those of one layer."""

    weights: tuple[tuple[Weight, int], ...]  # each with how often it is in the unit
    count: Any  # of such units here


@dataclass(frozen=True)
class RankWorkload:
    """Chunks of layers on one rank, in one optimizer step. Counts are numbers or arrays [n]."""

    config: ModelConfig
    layout: Degrees  # Layout or Layouts
    sequence_length: int  # tokens of a whole sequence
    element_bytes: int
    layers: tuple[tuple[LayerKind, Any], ...]  # how many of each kind
    recomputed: tuple[Any, ...]  # how many of each kind run forward again as a whole
    chunks: Any  # how many chunks these are
    sends_on: Any  # of the chunks, those whose next stage is on another rank
    sends_back: Any  # those whose previous stage is on another rank
    first: Any  # has the embedding
    last: Any  # has the head
    place: RankCoordinates
    mtp: bool = False  # are the multi-token-prediction modules trained?
    flat: bool = False  # ZeRO shards one flat buffer, as other programs do, not each weight's rows

    def count_layers(self, which: Callable[[LayerKind], bool] = lambda kind: True) -> Any:
        """Layers of the kinds that `which` chooses."""
        return sum(count for kind, count in self.layers if which(kind))

    def count_recomputed(self, which: Callable[[LayerKind], bool] = lambda kind: True) -> Any:
        """Those of them that are recomputed in the backward pass."""
        pairs = zip(self.layers, self.recomputed, strict=True)
        return sum(count for (kind, _), count in pairs if which(kind))

    @property
    def micro_batches(self) -> Any:
        """Micro-batches that go through each chunk: all, or half of them come from either end."""
        return self.layout.accumulation // (1 + self.layout.is_bidirectional)

    @property
    def tokens(self) -> Any:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.layout.micro_batch * self.sequence_length // self.layout.cp

    @property
    def hidden_bytes(self) -> Any:
        """B: bytes of one micro-batch's hidden states on one context-parallel rank."""
        return self.tokens * self.config.hidden_size * self.element_bytes

    @property
    def mtp_layers(self) -> Any:
        """Multi-token-prediction modules, each with an embedding lookup and a head of its own."""
        return self.count_layers(lambda kind: kind.mtp)

    @property
    def shares_embedding(self) -> bool:
        """Do the first and the last stage use one embedding, as lookup and as head?"""
        return self.config.tied_embeddings or (self.mtp and self.config.mtp_layers > 0)

    @property
    def has_tied_embedding_copy(self) -> Any:
        """Is here the last stage's copy of an embedding that the first stage has too?

        On a rank that has both stages of a V, multi-token prediction shares the embedding
        (arXiv:2412.19437, section 2.2); a tied head, of another stage, has its own copy.
        """
        apart = np.logical_not(self.layout.first_and_last_share_rank) & self.shares_embedding
        return self.last & (apart | (self.layout.is_v_shaped & self.config.tied_embeddings))

    @property
    def reduces_tied_embedding(self) -> Any:
        """Is the embedding's gradient summed over the first and the last pipeline rank?"""
        apart = np.logical_not(self.layout.first_and_last_share_rank) & self.shares_embedding
        return (self.first | self.last) & apart

    @cached_property
    def units(self) -> tuple[list[Unit], list[Unit], list[Unit]]:
        """The weights: of the layers, of the layers' experts, and of what is outside the layers."""
        alike: dict[tuple[tuple[Weight, int], ...], Any] = {}
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
        elements: Callable[[Sizes], Any],
        which: Callable[[Weight], bool] = lambda weight: True,
    ) -> Any:
        """The sum of `elements` of all weights of the units that `which` chooses."""
        return sum(unit.count * self.unit_total(unit, elements, which) for unit in units)

    def unit_total(
        self,
        unit: Unit,
        elements: Callable[[Sizes], Any],
        which: Callable[[Weight], bool] = lambda weight: True,
    ) -> Any:
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
    ranges = stage_ranges(layout.layers or split_layers(config.num_layers, layout.stages))
    place = RankCoordinates(
        tp=here["tp"],
        dp_shard=group(layout, "dp_shard_cp", rank).index(rank),
        edp_shard=group(layout, "edp_shard", rank).index(rank),
        kv=here["tp"] // kv_copies(layout, config),
    )
    works = []
    for stage in rank_stages(layout, here["pp"]):
        first, last = stage == 0, stage == layout.stages - 1
        begin, end = ranges[stage].start, ranges[stage].stop
        layers, recomputed = _count_kinds(config, layout, begin, end, last if mtp else None)
        sends_on, sends_back = _sends(layout, stage)
        works.append(
            RankWorkload(
                config=config,
                layout=layout,
                sequence_length=sequence_length,
                element_bytes=ELEMENT_BYTES[precision],
                layers=layers,
                recomputed=recomputed,
                chunks=1,
                sends_on=int(sends_on),
                sends_back=int(sends_back),
                first=first,
                last=last,
                place=place,
                mtp=mtp,
            )
        )
    return works


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
    pipelines, number = _pipelines(layouts)
    held = _held(config, pipelines, role_rank(config, pipelines, role), mtp)
    held = {name: np.asarray(count)[number] for name, count in held.items()}
    return _work_of(config, layouts, sequence_length, precision, held, mtp, flat)


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
    held = _held(config, ranks, np.arange(layout.pp), mtp)
    return _work_of(config, ranks, sequence_length, precision, held, mtp, flat)


def stage_counts(config: ModelConfig, layout: Layout, mtp: bool) -> dict[Any, NDArray[Any]]:
    """What each virtual stage of one layout holds, arrays [stages]: the layers of a kind by
    ("layers", kind), those of them that are recomputed by ("recomputed", kind)."""
    stages = LayoutBatch.of([layout]).take(np.zeros(layout.stages, np.int64))
    return _chunk_counts(config, stages, np.arange(layout.stages), mtp)


def _held(
    config: ModelConfig, layouts: LayoutBatch, rank: NDArray[np.int64], mtp: bool
) -> dict[Any, NDArray[Any]]:
    """The counts of all chunks of one pipeline rank of each layout."""
    sums: dict[Any, Any] = {}
    for chunk in range(int(chunks_a_rank(layouts).max(initial=1))):
        exists = chunk < chunks_a_rank(layouts)
        counts = _chunk_counts(config, layouts, chunk_stage(layouts, rank, chunk), mtp)
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count * exists
    return sums


def _work_of(
    config: ModelConfig,
    layouts: LayoutBatch,
    sequence_length: int,
    precision: str,
    held: dict[Any, NDArray[Any]],
    mtp: bool,
    flat: bool = False,
) -> RankWorkload:
    kinds = [name[1] for name in held if name[0] == "layers"]
    return RankWorkload(
        config=config,
        layout=layouts,
        sequence_length=sequence_length,
        element_bytes=ELEMENT_BYTES[precision],
        layers=tuple((kind, held["layers", kind]) for kind in kinds),
        recomputed=tuple(held["recomputed", kind] for kind in kinds),
        chunks=chunks_a_rank(layouts),
        sends_on=held["sends_on"],
        sends_back=held["sends_back"],
        first=held["first"] > 0,
        last=held["last"] > 0,
        place=RankCoordinates(),
        mtp=mtp,
        flat=flat,
    )


def role_rank(config: ModelConfig, layout: Degrees, role: str) -> Any:
    """The pipeline rank that stands for a role: a number or an array [n].

    The middle rank is the second, or where the model begins with dense layers before its mixtures
    the first of those in the middle that hold mixtures: no other has more layers or activations.
    """
    if role != "middle":
        return 0 if role == "first" else layout.pp - 1
    leading = next((i for i in range(config.num_layers) if config.is_moe(i)), 0)
    rank = np.minimum(1, layout.pp - 1)
    for _ in range(leading):  # a stage has a layer or more
        begin, _ = layer_range(config, layout, rank)
        rank = rank + ((begin < leading) & (rank < layout.pp - 2))
    return rank


def _pipelines(layouts: LayoutBatch) -> tuple[LayoutBatch, NDArray[np.int64]]:
    """The layouts that differ in what their pipeline ranks hold, and which of them each one is."""
    placement = layouts.is_v_shaped + 2 * layouts.is_bidirectional
    full = (layouts.recompute == "full") * (1 + layouts.recompute_layers)
    code = np.zeros(len(layouts), np.int64)
    for column in (layouts.pp, layouts.vpp, placement, full):
        code = code * (column.max(initial=0) + 1) + column
    _, index, number = np.unique(code, return_index=True, return_inverse=True)
    return layouts.take(index), number


def _chunk_counts(
    config: ModelConfig, layouts: LayoutBatch, stage: NDArray[np.int64], mtp: bool
) -> dict[Any, Any]:
    """What virtual stage `stage` of each layout adds to the counts of its rank."""
    begin, end = layer_range(config, layouts, stage)
    first, last = stage == 0, stage == layouts.stages - 1
    layers, recomputed = _count_kinds(config, layouts, begin, end, last if mtp else None)
    sends_on, sends_back = _sends(layouts, stage)
    return {
        "first": first,
        "last": last,
        "sends_on": sends_on,
        "sends_back": sends_back,
        **{("layers", kind): count for kind, count in layers},
        **{("recomputed", kind): n for (kind, _), n in zip(layers, recomputed, strict=True)},
    }


def layer_range(config: ModelConfig, layout: Degrees, stage: Any) -> tuple[Any, Any]:
    """The layers first to end - 1 of a virtual stage, elementwise."""
    if layout.layers is None:
        return split_layers_many(config.num_layers, layout.stages, stage)
    ends = np.cumsum([0, *layout.layers])
    # A chunk that a rank does not have may be asked about too.
    stage = np.minimum(stage, len(layout.layers) - 1)
    return ends[stage], ends[stage + 1]


def _sends(layout: Degrees, stage: Any) -> tuple[Any, Any]:
    """Do a stage's neighbours, the next and the one before it, live on another rank?

    They do in every pipeline, but where a V turns: rank pp - 1 holds stages pp - 1 and pp.
    """
    on = (stage < layout.stages - 1) & np.logical_not(layout.is_v_shaped & (stage == layout.pp - 1))
    back = (stage > 0) & np.logical_not(layout.is_v_shaped & (stage == layout.pp))
    return on & (layout.pp > 1), back & (layout.pp > 1)


def _count_kinds(
    config: ModelConfig, layout: Degrees, begin: Any, end: Any, mtp_here: Any | None
) -> tuple[tuple[tuple[LayerKind, Any], ...], tuple[Any, ...]]:
    """How many layers from `begin` to `end - 1` there are of each kind, and how many of them are
    recomputed: the first `recompute_layers`, or all. `mtp_here`: do the multi-token-prediction
    modules come after them? None where they are not trained."""
    first_layers = layout.recompute_layers
    counted = np.where(first_layers == 0, config.num_layers, first_layers)
    full = layout.recompute == "full"
    recomputed_end = np.where(full, np.minimum(begin + counted, end), begin)
    layers, recomputed = [], []
    for kind, before in _layers_before(config):
        layers.append((kind, before[end] - before[begin]))
        recomputed.append(before[recomputed_end] - before[begin])
    if mtp_here is not None and config.mtp_layers:
        modules = config.mtp_layers * mtp_here
        layers.append((config.mtp_kind, modules))
        recomputed.append(modules * (full & (first_layers == 0)))
    return tuple(layers), tuple(recomputed)


@lru_cache(maxsize=64)
def _layers_before(config: ModelConfig) -> list[tuple[LayerKind, NDArray[np.int64]]]:
    """For each kind, how many of the layers before layer i are of it: [num_layers + 1]."""
    return [
        (kind, np.cumsum([0, *(each == kind for each in config.layer_kinds)]))
        for kind in dict.fromkeys(config.layer_kinds)
    ]


# Sizes of weights


def kv_copies(layout: Degrees, config: ModelConfig) -> Any:
    """How many tp ranks hold a copy of one kv head: more than one where heads are too few."""
    return np.maximum(1, layout.tp // config.num_kv_heads)


def shard_degree(layout: Degrees, expert: bool) -> Any:
    """Over how many ranks ZeRO shards a weight."""
    return layout.edp_shard if expert else layout.dp_shard * layout.cp


def part(size: Any, parts: Any, index: Any) -> Any:
    """Rows in part `index` of torch.chunk's split: ceil(size / parts), the last ones fewer."""
    rows = -(-size // parts)
    return np.clip(size - rows * index, 0, rows)


def local_shape(weight: Weight, work: RankWorkload) -> tuple[Any, ...]:
    """The shape of a weight that one rank holds (without ZeRO)."""
    layout, config, shape = work.layout, work.config, list[Any](weight.shape)
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


def choose(condition: Any, yes: Any, no: Any) -> Any:
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
