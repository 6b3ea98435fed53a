"""The one table of a model's weights, from which counts, shapes and all costs follow.

Names are those of Hugging Face for the families that the program trains, but for the experts of a
layer, which are stacked in three tensors: `experts.gate_proj` and `.up_proj` [num_experts, width,
hidden_size] and `.down_proj` [num_experts, hidden_size, width]. The weights of the other families
have the same names wherever they do the same; matrices that a family stores fused stand apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.model.config import LayerKind, MLAConfig, ModelConfig, MoEConfig


@dataclass(frozen=True)
class Weight:
    """One weight tensor, and how tensor and expert parallelism split it."""

    name: str  # of a layer's weight: what follows `model.layers.N.`
    shape: tuple[int, ...]
    split: str = "whole"  # over tp: "rows", "columns", "kv" rows; or "expert" rows / columns
    width_dim: int = 0  # of an expert weight: the dimension that etp splits, 0 = none
    partial: str = ""  # its gradient is in parts over: "tp", "sp" (if on), "kv" copies

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def is_routed(self) -> bool:
        """Is it a stack of routed experts, of which a token meets its top-k alone?"""
        return self.split == "expert"


def layer_weights(config: ModelConfig, kind: LayerKind) -> list[Weight]:
    """All weights of one layer, in model order; of an mtp module also what joins it."""
    weights = [*_norm(config, "input_layernorm")]
    weights += _attention(config)
    if config.norms_per_layer > 1:
        weights += _norm(config, "post_attention_layernorm")
    if config.norms_per_layer > 2:
        weights += _norm(config, "pre_feedforward_layernorm")
    if kind.moe:
        assert config.moe is not None
        weights += _mixture(config, config.moe)
    else:
        weights += _mlp(config, "mlp", config.intermediate_size, config.mlp_bias)
    if config.norms_per_layer > 2:
        weights += _norm(config, "post_feedforward_layernorm")
    return weights if not kind.mtp else [*_mtp_entry(config), *weights, *_mtp_exit(config)]


def embedding_weights(config: ModelConfig) -> list[Weight]:
    """The embedding of tokens, and that of positions where they are learned."""
    weights = [embedding_weight(config)]
    if config.learned_positions:
        shape = (config.learned_positions, config.hidden_size)
        weights.append(Weight("model.embed_positions.weight", shape, partial="sp"))
    return weights


def embedding_weight(config: ModelConfig) -> Weight:
    """The embedding of tokens, which is also the head's matrix where the two are tied."""
    shape = (config.vocab_size, config.hidden_size)
    return Weight("model.embed_tokens.weight", shape, "rows")


def head_weights(config: ModelConfig) -> list[Weight]:
    """The final norm, and the head's matrix where it is not the embedding."""
    weights = list(_norm(config, "model.norm"))
    if not config.tied_embeddings:
        weights.append(replace(embedding_weight(config), name="lm_head.weight"))
    return weights


def _attention(config: ModelConfig) -> Iterator[Weight]:
    hidden, heads = config.hidden_size, config.num_heads
    if config.mla is not None:
        yield from _latent_projections(config, config.mla)
    else:
        q, kv = heads * config.head_dim, config.num_kv_heads * config.head_dim
        yield from _linear("self_attn.q_proj", q, hidden, "rows", config.qkv_bias)
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            yield from _linear(name, kv, hidden, "kv", config.qkv_bias, partial="kv")
    yield from _row_parallel(
        "self_attn.o_proj", hidden, heads * config.v_head_dim, config.output_bias
    )
    if config.qk_norm:
        yield Weight("self_attn.q_norm.weight", (config.head_dim,), partial="tp")
        yield Weight("self_attn.k_norm.weight", (config.head_dim,), partial="tp")
    if config.attention_sinks:
        yield Weight("self_attn.sinks", (heads,), "rows")


def _latent_projections(config: ModelConfig, mla: MLAConfig) -> Iterator[Weight]:
    """Down to the latent vectors, which every tp rank has whole, and up to the heads."""
    hidden, q = config.hidden_size, config.num_heads * config.qk_head_dim
    if mla.q_lora_rank is None:
        yield Weight("self_attn.q_proj.weight", (q, hidden), "rows")
    else:
        rank = mla.q_lora_rank
        yield from _linear("self_attn.q_a_proj", rank, hidden, "whole", config.qkv_bias, "sp")
        yield Weight("self_attn.q_a_layernorm.weight", (rank,), partial="sp")
        yield Weight("self_attn.q_b_proj.weight", (q, rank), "rows")
    rank, down = mla.kv_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim
    up = config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from _linear("self_attn.kv_a_proj_with_mqa", down, hidden, "whole", config.qkv_bias, "sp")
    yield Weight("self_attn.kv_a_layernorm.weight", (rank,), partial="sp")
    yield Weight("self_attn.kv_b_proj.weight", (up, rank), "rows")


def _mixture(config: ModelConfig, moe: MoEConfig) -> Iterator[Weight]:
    hidden, experts, width = config.hidden_size, moe.num_experts, moe.expert_intermediate_size
    yield Weight("mlp.gate.weight", (experts, hidden), partial="tp")
    if moe.router_bias:
        yield Weight("mlp.gate.bias", (experts,), partial="tp")
    opening = ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",)
    for name in opening:
        yield Weight(f"mlp.experts.{name}", (experts, width, hidden), "expert", width_dim=1)
        if moe.expert_bias:
            yield Weight(f"mlp.experts.{name}_bias", (experts, width), "expert", width_dim=1)
    yield Weight("mlp.experts.down_proj", (experts, hidden, width), "expert", width_dim=2)
    if moe.expert_bias:
        yield Weight("mlp.experts.down_proj_bias", (experts, hidden), "expert")
    if moe.shared_intermediate_size:
        yield from _mlp(config, "mlp.shared_expert", moe.shared_intermediate_size, bias=False)
    if moe.shared_gate:
        yield Weight("mlp.shared_expert_gate.weight", (1, hidden), partial="sp")


def _mtp_entry(config: ModelConfig) -> Iterator[Weight]:
    """Joins hidden states and the next token's embedding (DeepSeek-V3, arXiv:2412.19437, 2.2)."""
    hidden = config.hidden_size
    yield from _norm(config, "enorm")
    yield from _norm(config, "hnorm")
    yield Weight("eh_proj.weight", (hidden, 2 * hidden), "rows")


def _mtp_exit(config: ModelConfig) -> Iterator[Weight]:
    """Embedding and head are the model's own."""
    yield from _norm(config, "shared_head.norm")


def _mlp(config: ModelConfig, name: str, width: int, bias: bool) -> Iterator[Weight]:
    hidden = config.hidden_size
    if config.gated_mlp:
        yield from _linear(f"{name}.gate_proj", width, hidden, "rows", bias)
    yield from _linear(f"{name}.up_proj", width, hidden, "rows", bias)
    yield from _row_parallel(f"{name}.down_proj", hidden, width, bias)


def _norm(config: ModelConfig, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (config.hidden_size,), partial="sp")
    if config.norm_kind == "layer":
        yield Weight(f"{name}.bias", (config.hidden_size,), partial="sp")


def _linear(
    name: str, rows: int, columns: int, split: str, bias: bool, partial: str = ""
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (rows, columns), split, partial=partial)
    if bias:
        yield Weight(f"{name}.bias", (rows,), split, partial=partial)


def _row_parallel(name: str, rows: int, columns: int, bias: bool) -> Iterator[Weight]:
    """A matrix whose input is split over tp: its parts are summed, then the whole bias added."""
    yield Weight(f"{name}.weight", (rows, columns), "columns")
    if bias:
        yield Weight(f"{name}.bias", (rows,), partial="sp")
