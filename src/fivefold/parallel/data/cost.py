"""Data parallelism: what plain DP and the ZeRO stages send.

ZeRO 0 all-reduces gradients once a step. ZeRO 1 reduce-scatters them once and gathers weights
once, ZeRO 2 reduce-scatters every micro-batch, ZeRO 3 also gathers weights for every forward and
every backward pass (arXiv:1910.02054, section 7). Dense weights are replicated over dp and cp,
expert weights over edp. Units are layers, and the rest of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.ledger import Transfer
from fivefold.parallel.work import (
    FP32,
    Weight,
    Work,
    embedding_weight,
    head_weights,
    layer_weights,
    shard_degree,
    work_weights,
)


def transfers(work: Work) -> Iterator[Transfer]:
    """Messages of one chunk in one step."""
    if work.layout.zero == 0:
        yield from _all_reduces(work)
    else:
        yield from _sharded(work)


def _all_reduces(work: Work) -> Iterator[Transfer]:
    config = work.config
    replicas = work.layout.dp * work.layout.cp
    for moe, layers in ((False, work.dense_layers), (True, work.moe_layers)):
        if layers:
            dense, experts = _layer_units(work, moe)
            yield _all_reduce(work, dense, replicas, layers)
            yield _all_reduce(work, experts, work.layout.edp, layers)
    if work.last:
        yield _all_reduce(work, head_weights(config), replicas, 1)
    if work.first or (work.last and config.tied_embeddings):
        yield _all_reduce(work, [embedding_weight(config)], replicas, 1)


def _all_reduce(work: Work, weights: list[Weight], group_size: int, calls: int) -> Transfer:
    elements = sum(w.elements(work) for w in weights)
    calls = calls if weights else 0
    return Transfer("dp", "backward", "all_reduce", group_size, elements * FP32, calls)


def _layer_units(work: Work, moe: bool) -> tuple[list[Weight], list[Weight]]:
    weights = list(layer_weights(work.config, moe))
    experts = [w for w in weights if w.split == "expert"]
    return [w for w in weights if w.split != "expert"], experts


def _sharded(work: Work) -> Iterator[Transfer]:
    layout, m = work.layout, work.micro_batches
    zero3 = layout.zero == 3
    for moe, layers in ((False, work.dense_layers), (True, work.moe_layers)):
        if not layers:
            continue
        dense, experts = _layer_units(work, moe)
        yield from _unit(work, dense, layers, m * zero3)
        if not experts:
            continue
        if shard_degree(layout, expert=True) > 1:
            yield from _unit(work, experts, layers, m * zero3)
        else:  # too few replicas to shard over
            yield _all_reduce(work, experts, layout.edp, layers)
    outside = work_weights(replace(work, dense_layers=0, moe_layers=0))
    if outside:
        # Where the backward pass follows the head at once its weights are kept for it; an
        # embedding's backward pass needs none.
        gathered_again = zero3 and work.last and not layout.backward_follows_at_once
        yield from _unit(work, outside, 1, m * gathered_again)
    if layout.dp_replicate > 1:
        yield from _sum_replicas(work)


def _unit(work: Work, weights: list[Weight], units: int, backward_gathers: int):
    layout, m = work.layout, work.micro_batches
    elements = sum(w.padded_elements(work) for w in weights)
    size = shard_degree(layout, expert=weights[0].split == "expert")
    gathered, reduced = elements * work.element_bytes, elements * FP32
    forward = m if layout.zero == 3 else 1
    reductions = 1 if layout.zero == 1 else m
    yield Transfer("dp", "forward", "all_gather", size, gathered, units * forward)
    yield Transfer("dp", "backward", "all_gather", size, gathered, units * backward_gathers)
    yield Transfer("dp", "backward", "reduce_scatter", size, reduced, units * reductions)


def _sum_replicas(work: Work) -> Iterator[Transfer]:
    """HSDP: the shards are summed over the replicas, in one message a chunk."""
    sharded = [w for w in work_weights(work) if w.is_sharded(work.layout)]
    elements = sum(w.gradient_elements(work) for w in sharded)
    size = work.layout.dp_replicate
    yield Transfer("dp", "optimizer", "all_reduce", size, elements * FP32, 1)
