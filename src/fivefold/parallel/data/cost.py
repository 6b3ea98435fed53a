"""Data parallelism: what plain DP and the ZeRO stages send.

ZeRO 0 all-reduces gradients once a step. ZeRO 1 reduce-scatters them once and gathers weights
once, ZeRO 2 reduce-scatters every micro-batch, ZeRO 3 also gathers weights for every forward and
every backward pass (arXiv:1910.02054, section 7). Dense weights are replicated over dp and cp,
expert weights over edp. Units are layers, and the rest of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.ledger import Transfer
from fivefold.parallel.workload import FP32, RankWorkload, Unit, choose, shard_degree


def transfers(work: RankWorkload) -> Iterator[Transfer]:
    """Messages of one step."""
    dense, experts, outside = work.units
    for unit in [*dense, *experts]:
        yield from _all_reduce(work, unit)
        yield from _sharded(work, [unit], unit.count, again=True)
    for unit in outside:
        yield from _all_reduce(work, unit)
    yield from _sharded_outside(work, *outside)
    yield from _sum_replicas(work, [*dense, *experts, *outside])


def _sharded_outside(
    work: RankWorkload, embedding: Unit, copy: Unit, head: Unit
) -> Iterator[Transfer]:
    """What is outside the layers of one stage is one unit.

    Where the backward pass follows the head at once its weights are kept for it; an embedding's
    backward pass needs none.
    """
    together = work.layout.stages == 1
    apart = Unit(embedding.weights, work.first & np.logical_not(together))
    joined = Unit(embedding.weights, work.first & together)
    yield from _sharded(work, [apart], apart.count, again=False)
    again = np.logical_not(work.layout.backward_follows_at_once)
    yield from _sharded(work, [joined, copy, head], work.last, again)


def _is_expert(unit: Unit) -> bool:
    return unit.weights[0][0].is_routed


def _is_sharded(work: RankWorkload, expert: bool) -> Elementwise:
    """Does ZeRO shard these weights? Experts may have too few replicas to shard over."""
    return (work.layout.zero > 0) & (shard_degree(work.layout, expert) > 1)


def _all_reduce(work: RankWorkload, unit: Unit) -> Iterator[Transfer]:
    """The gradients of unsharded weights, a message a unit."""
    layout, expert = work.layout, _is_expert(unit)
    size = layout.edp if expert else layout.dp * layout.cp
    calls = unit.count * ((size > 1) & np.logical_not(_is_sharded(work, expert)))
    if np.any(calls):
        payload = work.unit_total(unit, lambda sizes: sizes.local) * FP32
        axis = "edp" if expert else "dp_cp"
        yield Transfer("dp", "backward", "all_reduce", size, payload, calls, axis=axis)


def _sharded(
    work: RankWorkload, parts: list[Unit], count: Elementwise, again: Elementwise
) -> Iterator[Transfer]:
    """Units of sharded weights, each of these parts; `again`: gathered for the backward pass?"""
    layout, m, expert = work.layout, work.micro_batches, _is_expert(parts[0])
    units = count * _is_sharded(work, expert)
    if not np.any(units):
        return
    elements = work.total(parts, lambda sizes: sizes.padded) // np.maximum(1, count)
    size, axis = shard_degree(layout, expert), "edp_shard" if expert else "dp_shard_cp"
    gathered, reduced = elements * work.element_bytes, elements * FP32
    forward = units * choose(layout.zero == 3, m, 1)
    backward = units * m * ((layout.zero == 3) & again)
    reductions = units * choose(layout.zero == 1, 1, m)
    yield Transfer("dp", "forward", "all_gather", size, gathered, forward, axis=axis)
    if np.any(backward):
        yield Transfer("dp", "backward", "all_gather", size, gathered, backward, axis=axis)
    yield Transfer("dp", "backward", "reduce_scatter", size, reduced, reductions, axis=axis)


def _sum_replicas(work: RankWorkload, units: list[Unit]) -> Iterator[Transfer]:
    """HSDP: the shards are summed over the replicas, in one message a chunk."""
    size = work.layout.dp_replicate
    if np.any(size > 1):
        elements = work.total(units, lambda sizes: sizes.shard * sizes.sharded)
        payload = elements * FP32 / work.chunks
        calls = work.chunks * ((size > 1) & (elements > 0))  # an uneven split's last part is empty
        yield Transfer("dp", "optimizer", "all_reduce", size, payload, calls, axis="dp_replicate")
