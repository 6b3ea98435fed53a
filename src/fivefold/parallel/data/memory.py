"""What weights, gradients and optimizer state take on one rank, by ZeRO stage. No torch.

With E elements on a rank before ZeRO, S in its shard, weights and gradients in fp32 and the
compute precision's e bytes an element:

| ZeRO | weights          | gradients                        | optimizer |
| ---- | ---------------- | -------------------------------- | --------- |
| 0    | 4 E (+ e E bf16) | 4 E                              | 8 E       |
| 1    | 4 S + e E        | 4 E while accumulating, then 4 S | 8 S       |
| 2    | 4 S + e E        | 4 S                              | 8 S       |
| 3    | 4 S + e (units)  | 4 S                              | 8 S       |

The gathered weights (e E) and unsharded gradients exist within a step only (arXiv:1910.02054,
section 3, with fp32 master weights as the shards). FSDP2 pads shards to equal size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.parallel.workload import FP32, RankWorkload, Sizes, choose, shard_degree

MOMENTS_BYTES = 8
"""AdamW's two fp32 moments of an element."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes, numbers or arrays [n] over layouts."""

    weights: Elementwise
    gradients: Elementwise
    optimizer: Elementwise

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )

    def scaled(self, times: Elementwise) -> StateBytes:
        return StateBytes(times * self.weights, times * self.gradients, times * self.optimizer)


def after_step(work: RankWorkload) -> StateBytes:
    """Bytes of the chunks after an optimizer step, their gradients still there."""
    return _sum(work, _after_step)


def before_last_backward(work: RankWorkload) -> StateBytes:
    """Bytes of the chunks between the last micro-batch's forward and backward pass, when most is
    gathered and not yet reduced. Tests hold it against a run."""
    return _sum(work, _before_last_backward)


def _sum(work: RankWorkload, bytes_of: Callable[..., StateBytes]) -> StateBytes:
    dense, experts, outside = work.units
    total = StateBytes(0, 0, 0)
    for units, in_layer in ((dense, True), (experts, True), (outside, False)):
        for unit in units:
            for weight, times in unit.weights:
                shards = shard_degree(work.layout, weight.is_routed)
                state = bytes_of(work, work.sizes(weight), shards, in_layer)
                total += state.scaled(times * unit.count)
    return total


def _after_step(
    work: RankWorkload, sizes: Sizes, shards: Elementwise, in_layer: bool
) -> StateBytes:
    stored = choose(sizes.sharded, sizes.padded // shards, sizes.local)
    # Without shards to gather from, a second copy in the compute precision stays.
    copy_bytes = work.element_bytes if work.element_bytes < FP32 else 0
    copy = copy_bytes * sizes.local * np.logical_not(sizes.sharded)
    return StateBytes(FP32 * stored + copy, FP32 * stored, MOMENTS_BYTES * sizes.gradient)


def _before_last_backward(
    work: RankWorkload, sizes: Sizes, shards: Elementwise, in_layer: bool
) -> StateBytes:
    state = _after_step(work, sizes, shards, in_layer)
    layout = work.layout
    accumulates = layout.accumulation > 1
    # ZeRO 3 keeps what is outside the layers where the backward pass follows at once.
    resharded = (layout.zero == 3) & (in_layer | np.logical_not(layout.backward_follows_at_once))
    gathered = work.element_bytes * sizes.padded * (sizes.sharded & np.logical_not(resharded))
    whole = (layout.zero == 1) & accumulates
    gradients = choose(whole, FP32 * sizes.local, state.gradients * accumulates)
    return StateBytes(
        state.weights + gathered,
        choose(sizes.sharded, gradients, state.gradients),
        state.optimizer,
    )
