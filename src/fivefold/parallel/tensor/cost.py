"""Tensor parallelism: the messages of one step (see the package for the scheme).

Of the models that only the planner knows: attention and an MLP that read the same hidden states
are one pair; what enters latent attention (MLA) is its latent vectors, which are narrower than
hidden states; a multi-token-prediction module has an embedding lookup and a head of its own, and
one pair more, its joining matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.ledger import Transfer
from fivefold.model.config import ModelConfig
from fivefold.parallel.workload import FP32, RankWorkload, kv_copies


def transfers(work: RankWorkload) -> Iterator[Transfer]:
    """Messages of one step."""
    if not np.any(work.layout.tp > 1):
        return
    yield from _sums(work)
    yield from _loss(work)
    yield from _partial_gradients(work)


def _sums(work: RankWorkload) -> Iterator[Transfer]:
    config, layout = work.config, work.layout
    first, last = work.first + work.mtp_layers, work.last + work.mtp_layers
    attention, pairs = work.count_layers(), _pairs(config, work.count_layers)
    # Full recomputation runs a layer's forward pass again up to the last result that is needed,
    # which the sum at the end of a dense layer is not.
    again = _pairs(config, work.count_recomputed)
    exits_again = again - work.count_recomputed(lambda kind: not kind.moe)
    megatron_sp = layout.sp & (layout.tp > 1)
    plain = np.logical_not(layout.sp) & (layout.tp > 1)

    def move(phase: str, op: str, calls: Elementwise, is_recompute: bool = False) -> Transfer:
        happens = plain if op == "all_reduce" else megatron_sp
        calls = work.micro_batches * calls * happens
        size, payload = layout.tp, work.hidden_bytes
        return Transfer("tp", phase, op, size, payload, calls, axis="tp", is_recompute=is_recompute)

    def entries(
        phase: str, op: str, calls: Elementwise, attention: Elementwise, is_recompute: bool = False
    ):
        """Moves of what enters split matrices, of which `attention` enter attention."""
        latent = _latent_width(config)
        if latent is None:
            yield move(phase, op, calls, is_recompute)
            return
        yield move(phase, op, calls - attention, is_recompute)
        narrow = work.tokens * latent * work.element_bytes
        yield replace(move(phase, op, attention, is_recompute), payload_bytes=narrow)

    if np.any(megatron_sp):
        attention_again = work.count_recomputed()
        yield from entries("forward", "all_gather", pairs + last, attention)
        yield move("forward", "reduce_scatter", pairs + first)
        gathers = 2 * pairs + first + last
        yield from entries("backward", "all_gather", gathers, attention)
        yield from entries("backward", "reduce_scatter", pairs + last, attention)
        if np.any(again):
            yield from entries("backward", "all_gather", again, attention_again, True)
            yield move("backward", "reduce_scatter", exits_again, is_recompute=True)
    if np.any(plain):
        yield move("forward", "all_reduce", pairs + first)
        yield from entries("backward", "all_reduce", pairs + last, attention)
        if np.any(exits_again):
            yield move("backward", "all_reduce", exits_again, is_recompute=True)


def _pairs(config: ModelConfig, count: Callable[..., Elementwise]) -> Elementwise:
    """Pairs of split matrices in the layers that `count` counts."""
    has_shared = config.moe is not None and config.moe.shared_intermediate_size > 0
    mlps = count(lambda kind: not kind.moe) * (not config.parallel_attention)
    shared = count(lambda kind: kind.moe) * has_shared
    return count() + mlps + shared + count(lambda kind: kind.mtp)


def _latent_width(config: ModelConfig) -> int | None:
    """Elements per token of the latent vectors that enter attention's split matrices in place of
    hidden states; None without latent queries."""
    if config.mla is None or config.mla.q_lora_rank is None:
        return None
    return config.mla.q_lora_rank + config.mla.kv_lora_rank + config.mla.qk_rope_head_dim


def _loss(work: RankWorkload) -> Iterator[Transfer]:
    """The loss joins row maxima, then row sums and the labels' logits in one message."""
    size, row_bytes = work.layout.tp, work.tokens * FP32
    calls = work.micro_batches * (work.last + work.mtp_layers) * (size > 1)
    if np.any(calls):
        yield Transfer("tp", "forward", "all_reduce", size, row_bytes, calls, axis="tp")
        yield Transfer("tp", "forward", "all_reduce", size, 2 * row_bytes, calls, axis="tp")


def _partial_gradients(work: RankWorkload) -> Iterator[Transfer]:
    """Whole weights that each tp rank used on a part of the sequence or of the heads: their
    gradients are summed in one message a chunk, over the tp ranks or over the copies."""
    layout = work.layout
    dense, _, outside = work.units

    def gradients(partial: str) -> Elementwise:
        weights = [*dense, *outside]
        return work.total(weights, lambda sizes: sizes.gradient, lambda w: w.partial == partial)

    used_in_parts = gradients("tp") + layout.sp * gradients("sp")
    for size, elements in (
        (layout.tp, used_in_parts),
        (kv_copies(layout, work.config), gradients("kv")),
    ):
        calls = work.chunks * ((elements > 0) & (size > 1))
        payload = elements * FP32 / work.chunks
        if np.any(calls):
            yield Transfer("tp", "optimizer", "all_reduce", size, payload, calls, axis="tp")
