"""What the pipeline ranks of layouts hold: how many layers of each kind, and which ends."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from fivefold.arrays import Elementwise, Ints
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.degrees import Degrees
from fivefold.layout.notation import Layout
from fivefold.layout.stages import chunk_stage, chunks_a_rank, split_layers_many
from fivefold.model.config import LayerKind, ModelConfig


@dataclass(frozen=True)
class StageCounts:
    """What virtual stages hold, one of them or several together: numbers, or arrays [n]."""

    first: Elementwise  # has the embedding
    last: Elementwise  # has the head
    sends_on: Elementwise  # its next stage is on another rank
    sends_back: Elementwise  # its previous stage is on another rank
    layers: dict[LayerKind, Elementwise]  # how many of each kind
    recomputed: dict[LayerKind, Elementwise]  # those of them that run forward again as a whole

    def combine(self, compute: Callable[..., Elementwise], *others: StageCounts) -> StageCounts:
        """Each count computed from those of these and of the others, which have the same kinds."""
        given = (self, *others)
        return StageCounts(
            compute(*(each.first for each in given)),
            compute(*(each.last for each in given)),
            compute(*(each.sends_on for each in given)),
            compute(*(each.sends_back for each in given)),
            {kind: compute(*(each.layers[kind] for each in given)) for kind in self.layers},
            {kind: compute(*(each.recomputed[kind] for each in given)) for kind in self.layers},
        )


def all_stage_counts(config: ModelConfig, layout: Layout, mtp: bool) -> StageCounts:
    """What each virtual stage of one layout holds, arrays [stages]."""
    stages = LayoutBatch.of([layout]).take(np.zeros(layout.stages, np.int64))
    return stage_counts(config, stages, np.arange(layout.stages), mtp)


def held_counts(config: ModelConfig, layouts: LayoutBatch, rank: Ints, mtp: bool) -> StageCounts:
    """What all stages of one pipeline rank of each layout hold together."""
    total = None
    for chunk in range(int(chunks_a_rank(layouts).max(initial=1))):
        exists = chunk < chunks_a_rank(layouts)
        here = stage_counts(config, layouts, chunk_stage(layouts, rank, chunk), mtp)
        here = here.combine(partial(operator.mul, 1 * exists))
        total = here if total is None else total.combine(operator.add, here)
    assert total is not None
    return total


def role_rank(config: ModelConfig, layout: Degrees, role: str) -> Elementwise:
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


def pipelines(layouts: LayoutBatch) -> tuple[LayoutBatch, Ints]:
    """The layouts that differ in what their pipeline ranks hold, and which of them each one is."""
    placement = layouts.is_v_shaped + 2 * layouts.is_bidirectional
    full = (layouts.recompute == "full") * (1 + layouts.recompute_layers)
    code = np.zeros(len(layouts), np.int64)
    for column in (layouts.pp, layouts.vpp, placement, full):
        code = code * (column.max(initial=0) + 1) + column
    _, index, number = np.unique(code, return_index=True, return_inverse=True)
    return layouts.take(index), number


def layer_range(
    config: ModelConfig, layout: Degrees, stage: Elementwise
) -> tuple[Elementwise, Elementwise]:
    """The layers first to end - 1 of a virtual stage, elementwise."""
    if layout.layers is None:
        return split_layers_many(config.num_layers, layout.stages, stage)
    ends = np.cumsum([0, *layout.layers])
    # A chunk that a rank does not have may be asked about too.
    stage = np.minimum(stage, len(layout.layers) - 1)
    return ends[stage], ends[stage + 1]


def stage_counts(
    config: ModelConfig, layout: Degrees, stage: Elementwise, mtp: bool
) -> StageCounts:
    """What a virtual stage holds, elementwise. `mtp`: are the multi-token-prediction modules
    trained? They come after the layers of the last stage."""
    first, last = stage == 0, stage == layout.stages - 1
    begin, end = layer_range(config, layout, stage)
    first_layers = layout.recompute_layers
    counted = np.where(first_layers == 0, config.num_layers, first_layers)
    full = layout.recompute == "full"
    recomputed_end = np.where(full, np.minimum(begin + counted, end), begin)
    layers, recomputed = {}, {}
    for kind, before in _layers_before(config):
        layers[kind] = before[end] - before[begin]
        recomputed[kind] = before[recomputed_end] - before[begin]
    if mtp and config.mtp_layers:
        layers[config.mtp_kind] = config.mtp_layers * last
        recomputed[config.mtp_kind] = config.mtp_layers * last * (full & (first_layers == 0))
    # A stage's neighbour is on another rank, except where a V turns: rank pp - 1 holds stages
    # pp - 1 and pp.
    turns_here, turned_here = (layout.is_v_shaped & (stage == layout.pp - back) for back in (1, 0))
    return StageCounts(
        first,
        last,
        np.logical_not(last | turns_here) & (layout.pp > 1),
        np.logical_not(first | turned_here) & (layout.pp > 1),
        layers,
        recomputed,
    )


@lru_cache(maxsize=64)
def _layers_before(config: ModelConfig) -> list[tuple[LayerKind, Ints]]:
    """For each kind, how many of the layers before layer i are of it: [num_layers + 1]."""
    return [
        (kind, np.cumsum([0, *(each == kind for each in config.layer_kinds)]))
        for kind in dict.fromkeys(config.layer_kinds)
    ]
