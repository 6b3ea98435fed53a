"""Context parallelism: what ulysses and ring send.

Ulysses (arXiv:2309.14509): four all-to-alls per layer and direction, for queries, keys, values and
the output; with grouped queries those of keys and values are smaller. Ring (arXiv:2310.01889):
keys and values go r - 1 times to the next rank; in the backward pass they do so again and their
gradients, in fp32, do too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.ledger import Transfer
from fivefold.parallel.workload import FP32, RankWorkload, choose


def transfers(work: RankWorkload) -> Iterator[Transfer]:
    """Messages of one step."""
    layers, recomputed = work.count_layers(), work.count_recomputed()
    passes = work.micro_batches * layers
    output_again = work.micro_batches * recomputed
    selective = work.layout.recompute == "selective"
    attention_again = choose(selective, passes, output_again)
    if np.any(work.layout.ulysses > 1):
        yield from _ulysses(work, passes, attention_again, output_again)
    if np.any(work.layout.ring > 1):
        yield from _ring(work, passes, attention_again)


def _kv_heads(work: RankWorkload) -> Elementwise:
    """kv heads on this rank, repeated for tp and for ulysses when there are too few."""
    kv_heads = np.maximum(work.config.num_kv_heads // work.layout.tp, 1)
    return np.maximum(kv_heads, work.layout.ulysses)


def _ulysses(
    work: RankWorkload, passes: Elementwise, attention_again: Elementwise, output_again: Elementwise
):
    config, size = work.config, work.layout.ulysses
    heads, kv_heads = config.num_heads // work.layout.tp, _kv_heads(work)
    happens = size > 1
    # Tensors of one shape are one transfer; in latent attention keys are wider than values.
    tensors: dict[tuple[str, int], list[Elementwise]] = defaultdict(list)
    tensors["q", config.qk_head_dim].append(attention_again)
    tensors["q", config.v_head_dim].append(output_again)
    tensors["kv", config.qk_head_dim].append(attention_again)
    tensors["kv", config.v_head_dim].append(attention_again)
    for (name, head_dim), again in tensors.items():
        head_bytes = work.tokens * head_dim * work.element_bytes
        payload = head_bytes * (heads if name == "q" else kv_heads)
        once, more = len(again) * passes * happens, sum(again) * happens
        yield Transfer("cp", "forward", "all_to_all", size, payload, once, axis="ulysses")
        yield Transfer("cp", "backward", "all_to_all", size, payload, once, axis="ulysses")
        if np.any(more):
            yield Transfer(
                "cp",
                "backward",
                "all_to_all",
                size,
                payload,
                more,
                axis="ulysses",
                is_recompute=True,
            )


def _ring(
    work: RankWorkload, passes: Elementwise, attention_again: Elementwise
) -> Iterator[Transfer]:
    """A ring rank has the whole heads that ulysses left it, of ulysses times the tokens."""
    size = work.layout.ring
    hops = size - 1
    width = work.config.qk_head_dim + work.config.v_head_dim
    pair = work.tokens * width * _kv_heads(work)
    keys, gradients, again = pair * work.element_bytes, pair * FP32, attention_again * hops
    calls = passes * hops
    yield Transfer("cp", "forward", "send", size, keys, calls, axis="ring")
    yield Transfer("cp", "backward", "send", size, keys, calls, axis="ring")
    if np.any(again):
        yield Transfer("cp", "backward", "send", size, keys, again, axis="ring", is_recompute=True)
    yield Transfer("cp", "backward", "send", size, gradients, calls, axis="ring")
