"""Exact counts of parameters and FLOPs, from the config alone.

Conventions: a tied embedding counts once; `active` is what one token meets: all weights outside
the experts, top-k routed experts, the shared expert, embedding and head; `active_matmul`, the N of
6 N, is that without the input embedding, which is looked up and not multiplied. With tied
embeddings the matrix stays in, because the head still multiplies by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.model.config import ModelConfig


@dataclass(frozen=True)
class LayerParameters:
    """Weights of one layer, in elements. What the layer does not have is 0."""

    attention: int  # query, key, value and output projections with their biases
    norms: int  # the two RMSNorms, and with qk_norm the two over head_dim
    dense_mlp: int
    router: int
    one_expert: int
    routed_experts: int  # all of them
    active_experts: int  # the top-k a token goes to
    shared_expert: int  # with its gate

    @property
    def total(self) -> int:
        return self._outside_experts + self.routed_experts

    @property
    def active(self) -> int:
        """The weights one token meets."""
        return self._outside_experts + self.active_experts

    @property
    def _outside_experts(self) -> int:
        return self.attention + self.norms + self.dense_mlp + self.router + self.shared_expert


@dataclass(frozen=True)
class ParameterCounts:
    """Weights of a model, in elements; the conventions are at the top of this module."""

    total: int
    active: int
    active_matmul: int
    embedding: int
    head: int  # 0 when tied
    final_norm: int
    routed_experts: int  # of all layers
    # Of one layer that has it (all such layers are alike), 0 when no layer has it:
    attention: int
    norms: int
    dense_mlp: int
    router: int
    one_expert: int
    shared_expert: int  # with its gate


def count_parameters(config: ModelConfig) -> ParameterCounts:
    layers = [layer_parameters(config, layer) for layer in range(config.num_layers)]
    matrix = config.vocab_size * config.hidden_size
    head = 0 if config.tied_embeddings else matrix
    final_norm = config.hidden_size
    outside_layers = matrix + head + final_norm
    active = outside_layers + sum(layer.active for layer in layers)
    return ParameterCounts(
        total=outside_layers + sum(layer.total for layer in layers),
        active=active,
        active_matmul=active if config.tied_embeddings else active - matrix,
        embedding=matrix,
        head=head,
        final_norm=final_norm,
        routed_experts=sum(layer.routed_experts for layer in layers),
        attention=max(layer.attention for layer in layers),
        norms=max(layer.norms for layer in layers),
        dense_mlp=max(layer.dense_mlp for layer in layers),
        router=max(layer.router for layer in layers),
        one_expert=max(layer.one_expert for layer in layers),
        shared_expert=max(layer.shared_expert for layer in layers),
    )


def layer_parameters(config: ModelConfig, layer: int) -> LayerParameters:
    """The weights of one layer (0-based, in model order)."""
    hidden, moe = config.hidden_size, config.moe
    norms = 2 * hidden + (2 * config.head_dim if config.qk_norm else 0)
    if moe is None or not moe.layers[layer]:
        width = config.intermediate_size
        biases = 2 * width + hidden if config.mlp_bias else 0
        return LayerParameters(
            attention=_attention_parameters(config),
            norms=norms,
            dense_mlp=3 * hidden * width + biases,
            router=0,
            one_expert=0,
            routed_experts=0,
            active_experts=0,
            shared_expert=0,
        )
    one_expert = 3 * hidden * moe.expert_intermediate_size
    shared_gate = hidden if moe.shared_gate else 0
    return LayerParameters(
        attention=_attention_parameters(config),
        norms=norms,
        dense_mlp=0,
        router=moe.num_experts * hidden,
        one_expert=one_expert,
        routed_experts=moe.num_experts * one_expert,
        active_experts=moe.experts_per_token * one_expert,
        shared_expert=3 * hidden * moe.shared_intermediate_size + shared_gate,
    )


def _attention_parameters(config: ModelConfig) -> int:
    hidden = config.hidden_size
    query = config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    qkv_bias = query + key_value if config.qkv_bias else 0
    output_bias = hidden if config.output_bias else 0
    return hidden * (query + key_value) + query * hidden + qkv_bias + output_bias


def flops_per_token(config: ModelConfig, sequence_length: int, causal: bool) -> int:
    """Training FLOPs a token, forward and backward, without recompute.

    6 for each weight that multiplies (2 forward, 4 backward: Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1) and 6 * heads * (qk_dim + v_dim) * keys a layer for attention.
    `causal` counts the half of the keys that a token sees on average, sequence_length / 2;
    otherwise the full square is counted. Say which one next to any MFU.
    """
    layers = range(config.num_layers)
    return head_flops_per_token(config) + sum(
        layer_flops_per_token(config, layer, sequence_length, causal) for layer in layers
    )


def layer_flops_per_token(
    config: ModelConfig, layer: int, sequence_length: int, causal: bool
) -> int:
    """The part of `flops_per_token` that one layer (0-based) does."""
    attention = 6 * config.num_heads * (2 * config.head_dim) * sequence_length
    if causal:
        attention //= 2  # exact: head_dim counts twice
    return 6 * layer_parameters(config, layer).active + attention


def head_flops_per_token(config: ModelConfig) -> int:
    """The part of `flops_per_token` after the last layer: final norm and head."""
    return 6 * (config.hidden_size + config.vocab_size * config.hidden_size)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The global name and shape of every parameter, in model order.

    Names are those of Hugging Face, but for the experts of a layer, which are stacked in
    three tensors: `experts.gate_proj` and `.up_proj` [num_experts, width, hidden_size] and
    `.down_proj` [num_experts, hidden_size, width]. A tied head has no name of its own.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        in_layer = {
            "input_layernorm.weight": (hidden,),
            **_attention_shapes(config),
            "post_attention_layernorm.weight": (hidden,),
            **_mlp_shapes(config, layer),
        }
        shapes |= {prefix + name: shape for name, shape in in_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes = (
        _linear("self_attn.q_proj", query, hidden, config.qkv_bias)
        | _linear("self_attn.k_proj", key_value, hidden, config.qkv_bias)
        | _linear("self_attn.v_proj", key_value, hidden, config.qkv_bias)
        | _linear("self_attn.o_proj", hidden, query, config.output_bias)
    )
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, moe = config.hidden_size, config.moe
    if moe is None or not moe.layers[layer]:
        return _gated_mlp("mlp", hidden, config.intermediate_size, config.mlp_bias)
    width, experts = moe.expert_intermediate_size, moe.num_experts
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_proj": (experts, width, hidden),
        "mlp.experts.up_proj": (experts, width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }
    if moe.shared_intermediate_size:
        shapes |= _gated_mlp("mlp.shared_expert", hidden, moe.shared_intermediate_size, False)
    if moe.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gated_mlp(name: str, hidden: int, width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return (
        _linear(f"{name}.gate_proj", width, hidden, bias)
        | _linear(f"{name}.up_proj", width, hidden, bias)
        | _linear(f"{name}.down_proj", hidden, width, bias)
    )


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes
