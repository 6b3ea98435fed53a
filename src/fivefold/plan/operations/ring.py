"""Ring attention's operation (`parallel.context.run`): keys and values travel, and the blocks'
results are added up in fp32."""

from __future__ import annotations

import numpy as np

from fivefold.plan.operations.operation import Bytes, Operation
from fivefold.plan.operations.sizes import Sizes
from fivefold.plan.time.operations import Attention


def operation(s: Sizes, inputs: tuple[str, ...], attention: Attention) -> Operation:
    """One operation for all steps of the ring. In a short float the result is rounded, and the
    fp32 one kept; else they are one tensor. A result that was computed again is held by nobody once
    the backward pass has rounded it."""
    kept = {"log_sums": s.log_sums}
    if s.structure.short:
        kept["fp32_result"] = s.fp32(s.query)
    return Operation(
        "ring",
        "attention",
        inputs,
        {"result": s.query},
        kept,
        saved=(*inputs, *kept, *(() if s.structure.short else ("result",))),
        replaced=("fp32_result",) if s.structure.short else (),
        peaks=_forward(s),
        backward_peaks=_backward(s),
        attention=attention,
    )


def _forward(s: Sizes) -> tuple[Bytes, ...]:
    """Temporaries of the first and the second block, without the result: keys and values here and
    on their way, their copies per query head, and the block's output."""
    under_way = 4 * s.spread_key
    part, repeated = s.query, 2 * s.query
    running = s.fp32(s.query) if s.structure.short else 0.0
    first = under_way + part + repeated
    second = under_way + part + running + np.maximum(2.5 * s.query, s.fp32(s.query) / 2)
    return first, second


def _backward(s: Sizes) -> tuple[Bytes, ...]:
    """The result in short floats and the query's gradient in fp32; keys and values for each query
    head, their gradients, the query's, and what the kernel takes inside."""
    keys, fp32_keys = 2 * s.spread_key, 2 * s.fp32(s.spread_key)
    whole = s.query * s.structure.short + s.fp32(s.query)
    inside = s.fp32(s.query) + s.log_sums
    first = whole + 2 * keys + 5 * s.query + np.maximum(inside, keys)
    # Later blocks are halves. Gradients of keys are at home, then also in the block before and
    # under way; keys travel on, but to nobody from the last rank.
    inside = np.maximum(inside / 2, keys)
    second = whole + keys + fp32_keys + 5.5 * s.query + inside
    if s.structure.ring == 2:
        return first, second
    third = whole + keys + 3 * fp32_keys + 5 * s.query + inside
    return first, second + keys, third + keys * (s.structure.ring > 3)
