"""Expert parallelism: what it sends.

Each MoE layer sends k copies of every token to the experts' ranks and back (all-to-all dispatch
and combine, GShard, arXiv:2006.16668), and mirrors both in the backward pass. Where experts are
split over the tp ranks (etp = tp) the copies that arrived are gathered among these, and their
partial results summed; how many arrive is the router's choice, so the payload is a mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.ledger import Transfer
from fivefold.parallel.workload import FP32, RankWorkload

COUNT_BYTES = 8  # an int64 for each expert


def transfers(work: RankWorkload) -> Iterator[Transfer]:
    """Messages of one step."""
    if work.config.moe is None:
        return
    m = work.micro_batches
    passes = m * work.count_layers(lambda kind: kind.moe)
    again = m * work.count_recomputed(lambda kind: kind.moe)
    for transfer in _messages(work, passes, again):
        if np.any(transfer.calls):
            yield transfer


def _messages(work: RankWorkload, passes: Elementwise, again: Elementwise) -> Iterator[Transfer]:
    layout, moe = work.layout, work.config.moe
    assert moe is not None
    tokens = work.tokens // layout.tp  # each tp rank routes its own slice
    copies = tokens * moe.experts_per_token
    rows_bytes = copies * work.config.hidden_size * work.element_bytes
    counts_bytes = moe.num_experts * COUNT_BYTES
    sizes = {
        "sequence": layout.cp * layout.tp,
        "ep": layout.ep,
        "etp": layout.etp,
        "tp": layout.tp,
    }

    def move(
        phase: str,
        op: str,
        axis: str,
        payload: Elementwise,
        calls: Elementwise,
        is_recompute=False,
        routed=False,
    ) -> Transfer:
        size = sizes[axis]
        calls = calls * (size > 1)
        return Transfer(
            "ep", phase, op, size, payload, calls, routed, axis=axis, is_recompute=is_recompute
        )

    # Balance statistics: how often each sequence chose each expert.
    statistics = layout.micro_batch * moe.num_experts * FP32
    for phase, calls in (("forward", passes), ("backward", again)):
        repeated = phase == "backward"
        yield move(phase, "all_reduce", "sequence", statistics, calls, repeated)
        yield move(phase, "all_to_all", "ep", counts_bytes, calls, repeated)
        yield move(phase, "all_gather", "etp", layout.etp * counts_bytes, calls, repeated)
    yield move("forward", "all_to_all", "ep", rows_bytes, 2 * passes)
    yield move("backward", "all_to_all", "ep", rows_bytes, 2 * passes)
    yield move("backward", "all_to_all", "ep", rows_bytes, 2 * again, is_recompute=True)
    gathered = layout.etp * rows_bytes
    for op in ("all_gather", "reduce_scatter"):
        yield move("forward", op, "etp", gathered, passes, routed=True)
        yield move("backward", op, "etp", gathered, passes, routed=True)
        yield move("backward", op, "etp", gathered, again, is_recompute=True, routed=True)
    # Without megatron SP the slices are joined again, and so are their gradients.
    joined = passes * np.logical_not(layout.sp)
    yield move("forward", "all_gather", "tp", work.hidden_bytes, joined)
    yield move("backward", "all_gather", "tp", work.hidden_bytes, joined)
