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

from dataclasses import dataclass, replace

from fivefold.parallel.work import FP32, Weight, Work, shard_degree, work_weights

MOMENTS_BYTES = 8
"""AdamW's two fp32 moments of an element."""


@dataclass(frozen=True)
class StateBytes:
    weights: int
    gradients: int
    optimizer: int

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


def after_step(work: Work) -> StateBytes:
    """Bytes of one chunk after an optimizer step, its gradients still there."""
    return _sum(work, _after_step)


def before_last_backward(work: Work) -> StateBytes:
    """Bytes of one chunk between the last micro-batch's forward and backward pass, when most is
    gathered and not yet reduced."""
    return _sum(work, _before_last_backward)


def _sum(work: Work, bytes_of) -> StateBytes:
    layers = replace(work, first=False, last=False)
    outside = replace(work, dense_layers=0, moe_layers=0)
    total = StateBytes(0, 0, 0)
    for weight in work_weights(layers):
        total += bytes_of(work, weight, in_layer=True)
    for weight in work_weights(outside):
        total += bytes_of(work, weight, in_layer=False)
    return total


def _after_step(work: Work, weight: Weight, in_layer: bool) -> StateBytes:
    if not weight.is_sharded(work.layout):
        elements = weight.elements(work)
        copy = work.element_bytes * elements if work.element_bytes < FP32 else 0
        return StateBytes(FP32 * elements + copy, FP32 * elements, MOMENTS_BYTES * elements)
    stored = weight.padded_elements(work) // shard_degree(work.layout, weight.split == "expert")
    shard = weight.shard_elements(work)
    return StateBytes(FP32 * stored, FP32 * stored, MOMENTS_BYTES * shard)


def _before_last_backward(work: Work, weight: Weight, in_layer: bool) -> StateBytes:
    state = _after_step(work, weight, in_layer)
    if not weight.is_sharded(work.layout):
        return state
    accumulates = work.layout.accumulation > 1
    gathered = work.element_bytes * weight.padded_elements(work)
    # ZeRO 3 keeps what is outside the layers where the backward pass follows at once.
    at_once = work.layout.backward_follows_at_once
    if work.layout.zero == 3 and (in_layer or not at_once):
        gathered = 0
    gradients = state.gradients if accumulates else 0
    if work.layout.zero == 1 and accumulates:
        gradients = FP32 * weight.elements(work)
    return replace(state, weights=state.weights + gathered, gradients=gradients)
