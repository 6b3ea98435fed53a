"""Sequence parallelism around attention: what ulysses and ring send.

Ulysses (arXiv:2309.14509): four all-to-alls a layer and direction, for queries, keys, values and
the output; with grouped queries those of keys and values are smaller. Ring (arXiv:2310.01889):
keys and values go r - 1 times to the next rank; in the backward pass they do so again and their
gradients, in fp32, do too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.ledger import Transfer
from fivefold.parallel.work import FP32, Work


def transfers(work: Work) -> Iterator[Transfer]:
    """Messages of one chunk in one step."""
    layout, config = work.layout, work.config
    passes = work.micro_batches * work.layers
    head = work.tokens * config.head_dim  # elements of one head on one rank
    heads = config.num_heads // layout.tp
    # kv heads on this rank, repeated for tp and for ulysses when there are too few
    kv_heads = np.maximum(np.maximum(config.num_kv_heads // layout.tp, 1), layout.ulysses)
    q_bytes, kv_bytes = (head * n * work.element_bytes for n in (heads, kv_heads))
    attention_again = layout.recompute != "none"
    output_again = layout.recompute == "full"

    u = layout.ulysses
    yield Transfer("sp", "forward", "all_to_all", u, q_bytes, 2 * passes)
    yield Transfer("sp", "forward", "all_to_all", u, kv_bytes, 2 * passes)
    again = passes * attention_again
    yield Transfer(
        "sp", "backward", "all_to_all", u, q_bytes, 2 * passes + again + passes * output_again
    )
    yield Transfer("sp", "backward", "all_to_all", u, kv_bytes, 2 * passes + 2 * again)

    # A ring rank has the whole heads that ulysses left it, of ulysses times the tokens.
    pair = 2 * head * kv_heads
    hops = layout.ring - 1
    yield Transfer("sp", "forward", "send", layout.ring, pair * work.element_bytes, passes * hops)
    yield Transfer(
        "sp", "backward", "send", layout.ring, pair * work.element_bytes, (passes + again) * hops
    )
    yield Transfer("sp", "backward", "send", layout.ring, pair * FP32, passes * hops)
