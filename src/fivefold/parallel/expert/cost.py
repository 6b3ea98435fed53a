"""Expert parallelism: what it sends.

Each MoE layer sends k copies of every token to the experts' ranks and back (all-to-all dispatch
and combine, GShard, arXiv:2006.16668), and mirrors both in the backward pass. Where experts are
split over the tp ranks (etp = tp) the copies that arrived are gathered among these, and their
partial results summed; how many arrive is the router's choice, so the payload is a mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.ledger import Transfer
from fivefold.parallel.work import FP32, Work

COUNT_BYTES = 8  # an int64 for each expert


def transfers(work: Work) -> Iterator[Transfer]:
    """Messages of one chunk in one step."""
    layout, moe = work.layout, work.config.moe
    if moe is None:
        return
    passes = work.micro_batches * work.moe_layers
    again = passes * (layout.recompute == "full")
    tokens = work.tokens // layout.tp  # each tp rank routes its own slice
    copies = tokens * moe.experts_per_token
    rows_bytes = copies * work.config.hidden_size * work.element_bytes
    counts_bytes = moe.num_experts * COUNT_BYTES

    def move(phase: str, op: str, size: int, payload: int, calls: int, routed=False) -> Transfer:
        return Transfer("ep", phase, op, size, payload, calls, routed)

    # Balance statistics: how often each sequence chose each expert.
    group = layout.cp * layout.tp
    statistics = layout.micro_batch * moe.num_experts * FP32
    for phase, calls in (("forward", passes), ("backward", again)):
        yield move(phase, "all_reduce", group, statistics, calls)
        yield move(phase, "all_to_all", layout.ep, counts_bytes, calls)
        yield move(phase, "all_gather", layout.etp, layout.etp * counts_bytes, calls)
    yield move("forward", "all_to_all", layout.ep, rows_bytes, 2 * passes)
    yield move("backward", "all_to_all", layout.ep, rows_bytes, 2 * passes + 2 * again)
    gathered = layout.etp * rows_bytes
    for op in ("all_gather", "reduce_scatter"):
        yield move("forward", op, layout.etp, gathered, passes, routed=True)
        yield move("backward", op, layout.etp, gathered, passes + again, routed=True)
    # Without megatron SP the slices are joined again, and so are their gradients.
    if not layout.sp:
        yield move("forward", "all_gather", layout.tp, work.hidden_bytes, passes)
        yield move("backward", "all_gather", layout.tp, work.hidden_bytes, passes)
