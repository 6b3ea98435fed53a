"""Tensor and megatron sequence parallelism: what they send.

A transformer layer has pairs of split matrices: attention, and an MLP or a shared expert. Each
pair needs one sum over the tp ranks forward (after its closing matrix) and one backward (of its
input's gradient), of the hidden states B; the embedding adds one forward, the head one backward
(Megatron-LM, arXiv:1909.08053, section 3). With megatron SP each sum is a reduce-scatter and an
all-gather, and the gathered inputs are not kept but gathered again for the weight gradients
(arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.ledger import Transfer
from fivefold.parallel.work import FP32, Work, kv_copies, work_weights


def transfers(work: Work) -> Iterator[Transfer]:
    """Messages of one chunk in one step."""
    layout, m = work.layout, work.micro_batches
    shared = work.moe_layers * work.has_shared_expert
    pairs = work.layers + work.dense_layers + shared
    entries = pairs + work.last  # where hidden states enter split matrices
    exits = pairs + work.first  # where sums leave them
    # Full recomputation runs a layer's forward pass again up to the last result that is needed,
    # which the sum at the end of a dense layer is not.
    again = layout.recompute == "full"
    entries_again = pairs * again
    exits_again = (pairs - work.dense_layers) * again

    def move(phase: str, op: str, calls: int, split: str) -> Transfer:
        return Transfer(split, phase, op, layout.tp, work.hidden_bytes, m * calls)

    if layout.sp:
        yield move("forward", "all_gather", entries, "sp")
        yield move("forward", "reduce_scatter", exits, "sp")
        yield move("backward", "all_gather", 2 * pairs + work.first + work.last, "sp")
        yield move("backward", "all_gather", entries_again, "sp")
        yield move("backward", "reduce_scatter", entries, "sp")
        yield move("backward", "reduce_scatter", exits_again, "sp")
    else:
        yield move("forward", "all_reduce", exits, "tp")
        yield move("backward", "all_reduce", entries, "tp")
        yield move("backward", "all_reduce", exits_again, "tp")
    # The loss joins row maxima, then row sums and the labels' logits in one message.
    row_bytes = work.tokens * FP32
    calls = m * work.last
    yield Transfer("tp", "forward", "all_reduce", layout.tp, row_bytes, calls)
    yield Transfer("tp", "forward", "all_reduce", layout.tp, 2 * row_bytes, calls)
    yield from _partial_gradients(work)


def _partial_gradients(work: Work) -> Iterator[Transfer]:
    """Whole weights that each tp rank used on a part of the sequence or of the heads."""
    layout = work.layout
    copies = kv_copies(layout, work.config)
    kinds = {"tp", "sp"} if layout.sp else {"tp"}
    split = "sp" if layout.sp else "tp"
    for group_size, partial in ((layout.tp, kinds), (copies, {"kv"})):
        weights = [w for w in work_weights(work) if w.partial in partial]
        elements = sum(w.gradient_elements(work) for w in weights)
        calls = 1 if elements else 0
        yield Transfer(split, "optimizer", "all_reduce", group_size, elements * FP32, calls)
