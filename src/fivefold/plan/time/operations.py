"""What one rank computes for one micro-batch, operation by operation. Shapes only, no seconds.

All sizes may be arrays [n], one entry a layout. A product is [m, k] x [k, n]. Its backward pass
is two products of the same FLOPs: of the input's gradient and of the weight's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.layout.batch import LayoutBatch
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.plan.constants import (
    ATTENTION_KERNELS,
    EXPERT_KERNELS,
    EXPERT_PASSES,
    EXPERT_PASSES_FUSED,
    EXPERT_PASSES_ONCE_A_NODE,
    HEAD_KERNELS,
    MLP_KERNELS,
    QUANTIZED_EXPERT_KERNELS,
    ROUTING_KERNELS,
)
from fivefold.plan.engines import Job


@dataclass(frozen=True)
class Matmul:
    """`groups` matrix products of one shape, in one call: [m, k] x [k, n] each."""

    name: str
    m: Elementwise
    n: Elementwise
    k: Elementwise
    groups: Elementwise = 1.0
    quantized: bool = True  # in the low precision of the job, where it has one
    split: bool = True  # its messages are those of tensor parallelism

    @property
    def flops(self) -> Elementwise:
        """Of the forward pass."""
        return 2.0 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """Scores and weighted sum of the heads of one rank."""

    tokens: Elementwise  # queries of this rank
    keys: Elementwise  # that one query sees on average
    heads: Elementwise  # on this rank
    qk_dim: int
    v_dim: int
    sequence: Elementwise  # keys of one sequence that a rank holds at a time

    @property
    def flops(self) -> Elementwise:
        """Of the forward pass; a masked score is not counted."""
        return 2.0 * self.tokens * self.keys * self.heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class Operations:
    """Of one layer (or of what stands before or after the layers), one micro-batch."""

    products: tuple[Matmul, ...]
    attention: Attention | None
    elements_moved: Elementwise  # read and written by elementwise operations, forward
    kernels: Elementwise  # launched in the forward pass
    # The same for the copies and bookkeeping that splits add. Only a CPU core notices them.
    split_elements_moved: Elementwise = 0.0
    split_kernels: Elementwise = 0.0

    @property
    def flops(self) -> Elementwise:
        attention = 0.0 if self.attention is None else self.attention.flops
        return sum((p.flops for p in self.products), attention)


def tokens(job: Job, layouts: LayoutBatch) -> Elementwise:
    """Of one micro-batch on one context-parallel rank."""
    return layouts.micro_batch * (job.sequence_length / layouts.cp)


def layer_operations(job: Job, layouts: LayoutBatch, kind: LayerKind) -> Operations:
    """The forward pass of one layer."""
    config, t = job.config, tokens(job, layouts)
    products = list(attention_products(config, layouts, t))
    scores = attention(job, layouts, kind, t)
    # Between the products: norms and residual sums on the whole width (split by megatron SP),
    # rotary embedding and activation on the part of a tp rank.
    slices = np.where(layouts.sp, layouts.tp, 1)
    norms = config.norms_per_layer * 2.0 * config.hidden_size
    residuals = 2 * 3.0 * config.hidden_size
    rotary = 2.0 * (config.num_heads + config.num_kv_heads) * config.qk_head_dim
    if config.qk_norm:
        rotary = 2 * rotary
    moved = t * ((norms + residuals) / slices + rotary / layouts.tp)
    kernels: Elementwise = ATTENTION_KERNELS
    if kind.moe:
        expert_products, expert_moved = _expert_operations(job, layouts, t)
        products += expert_products
        moved = moved + expert_moved
        kernels = kernels + _expert_kernels(job, layouts)
    else:
        width = config.intermediate_size
        products += mlp_products("mlp", config, t, width, layouts.tp)
        moved = moved + t * _activation_elements(config.gated_mlp) * width / layouts.tp
        kernels += MLP_KERNELS
    return Operations(tuple(products), scores, moved, kernels, *_of_splits(job, layouts, kind, t))


def _of_splits(
    job: Job, layouts: LayoutBatch, kind: LayerKind, t: Elementwise
) -> tuple[Elementwise, Elementwise]:
    """Elements moved and kernels launched by the splits themselves in one layer, forward: counted
    in `parallel/*/run.py`."""
    config = job.config
    query = t * config.num_heads / layouts.tp * config.qk_head_dim
    key_value = 2 * t * np.maximum(config.num_kv_heads / layouts.tp, 1.0) * config.qk_head_dim
    # Ulysses puts queries, keys, values and the output into the order in which they travel.
    ulysses = layouts.ulysses > 1
    moved = ulysses * 2 * (2 * query + key_value)
    kernels = ulysses * 12.0
    # The ring stacks keys with values, and merges each block's output into the running one.
    blocks = layouts.ring - 1
    moved = moved + (blocks > 0) * 2 * key_value + blocks * (4 * query + 2 * key_value)
    kernels = kernels + (blocks > 0) * 8.0 + blocks * 14.0
    kernels = kernels + (layouts.tp > 1) * 4.0
    if kind.moe:
        assert config.moe is not None
        copies = t / layouts.tp * config.moe.experts_per_token * layouts.etp
        travels = layouts.ep * layouts.etp > 1
        moved = moved + travels * 4 * copies * config.hidden_size
        kernels = kernels + travels * 24.0 + (layouts.etp > 1) * 8.0
    return moved, kernels


def embedding_operations(job: Job, layouts: LayoutBatch) -> Operations:
    """Looking up the tokens' rows."""
    moved = 2.0 * tokens(job, layouts) * job.config.hidden_size
    return Operations((), None, moved, MLP_KERNELS)


def head_operations(job: Job, layouts: LayoutBatch) -> Operations:
    """Final norm, the head's product and the loss."""
    config, t = job.config, tokens(job, layouts)
    columns = config.vocab_size / layouts.tp
    head = Matmul("head", t, columns, config.hidden_size, quantized=False)
    slices = np.where(layouts.sp, layouts.tp, 1)
    # Written and read once in 16 bits, and what the loss does to them besides.
    passes = 2.0 + min(job.engine.loss_bytes, 6)
    moved = t * (2.0 * config.hidden_size / slices + passes * columns)
    return Operations((head,), None, moved, HEAD_KERNELS)


def attention_products(config: ModelConfig, layouts: LayoutBatch, t: Elementwise):
    hidden, tp = config.hidden_size, layouts.tp
    out_width = config.num_heads * config.v_head_dim
    if config.mla is None:
        kv_heads = np.maximum(config.num_kv_heads / tp, 1.0)  # copies where they are too few
        rows = config.num_heads * config.head_dim / tp + 2 * kv_heads * config.head_dim
        yield Matmul("qkv", t, rows, hidden)
    else:
        mla = config.mla
        # The down-projections are whole on every tp rank; megatron SP splits their tokens.
        part = t / np.where(layouts.sp, tp, 1)
        q_width = config.num_heads * config.qk_head_dim / tp
        if mla.q_lora_rank:
            yield Matmul("q_down", part, mla.q_lora_rank, hidden, split=False)
            yield Matmul("q_up", t, q_width, mla.q_lora_rank)
        else:
            yield Matmul("q", t, q_width, hidden)
        yield Matmul("kv_down", part, mla.kv_lora_rank + mla.qk_rope_head_dim, hidden, split=False)
        width = config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp
        yield Matmul("kv_up", t, width, mla.kv_lora_rank)
    yield Matmul("out", t, hidden, out_width / tp)


def attention(job: Job, layouts: LayoutBatch, kind: LayerKind, t: Elementwise) -> Attention:
    """Ulysses gives a rank its share of the heads of ulysses times the tokens: the same work."""
    config, s = job.config, float(job.sequence_length)
    # A causal query sees half of the keys on average; a window w sees w - w^2 / 2s of them.
    keys = s / 2
    if 0 < kind.window < s:
        keys = kind.window - kind.window**2 / (2 * s)
    return Attention(
        tokens=t,
        keys=keys,
        heads=config.num_heads / layouts.tp,
        qk_dim=config.qk_head_dim,
        v_dim=config.v_head_dim,
        sequence=s / layouts.ring,
    )


def mlp_products(name: str, config: ModelConfig, t: Elementwise, width: float, parts: Elementwise):
    columns = (2 if config.gated_mlp else 1) * width / parts
    yield Matmul(f"{name}_in", t, columns, config.hidden_size)
    yield Matmul(f"{name}_out", t, config.hidden_size, width / parts)


def _activation_elements(gated: bool) -> float:
    """Elements moved for each element of the MLP's width."""
    return 3.0 if gated else 2.0


def _expert_kernels(job: Job, layouts: LayoutBatch) -> Elementwise:
    """Routing and permutation take small kernels; and each expert of a rank its own products, with
    several more in front of each where inputs are quantized."""
    assert job.config.moe is not None
    if job.engine.fused_experts:
        return ROUTING_KERNELS
    local = job.config.moe.num_experts / layouts.ep
    each = QUANTIZED_EXPERT_KERNELS if job.is_low_precision else EXPERT_KERNELS
    return ROUTING_KERNELS + local * each


def expert_products(job: Job, layouts: LayoutBatch, t: Elementwise):
    """The router's product, and the two of the experts."""
    hidden, moe = job.config.hidden_size, job.config.moe
    assert moe is not None
    routed = t / layouts.tp  # each tp rank routes its own slice of the tokens
    # Copies that arrive on the busiest rank; where experts are split over tp, all its slices.
    copies = routed * moe.experts_per_token * layouts.etp * job.busiest(layouts.ep)
    local = moe.num_experts / layouts.ep
    width = moe.expert_intermediate_size / layouts.etp
    gates = 2 if job.config.gated_mlp else 1
    yield Matmul("router", routed, moe.num_experts, hidden, quantized=False, split=False)
    yield Matmul("experts_in", copies / local, gates * width, hidden, local, split=False)
    yield Matmul("experts_out", copies / local, hidden, width, local, split=False)


def _expert_operations(job: Job, layouts: LayoutBatch, t: Elementwise):
    config = job.config
    moe = config.moe
    assert moe is not None
    hidden = config.hidden_size
    routed = t / layouts.tp  # each tp rank routes its own slice of the tokens
    # Copies that arrive on the busiest rank; where experts are split over tp, all its slices.
    copies = routed * moe.experts_per_token * layouts.etp * job.busiest(layouts.ep)
    fused = job.engine.fused_experts
    width = moe.expert_intermediate_size / layouts.etp
    gates = 2 if config.gated_mlp else 1
    products = list(expert_products(job, layouts, t))
    without = EXPERT_PASSES_ONCE_A_NODE if job.engine.once_a_node else EXPERT_PASSES
    passes = EXPERT_PASSES_FUSED if fused else without
    moved = (routed * moe.experts_per_token + copies) / 2 * hidden * passes
    if not fused:
        moved = moved + copies * _activation_elements(config.gated_mlp) * width
    if (
        moe.expert_bias and not fused
    ):  # no fused kernel adds them, or clamps and gates as such models do
        moved = moved + copies * (2 * (gates * width + hidden) + 6.0 * width)
    moved = moved + routed * moe.num_experts * 6.0
    if moe.shared_intermediate_size:
        shared = moe.shared_intermediate_size
        products += mlp_products("shared", config, t, shared, layouts.tp)
        moved = moved + t * _activation_elements(config.gated_mlp) * shared / layouts.tp
    return products, moved
