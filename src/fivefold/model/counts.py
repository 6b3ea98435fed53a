"""Exact counts of parameters and FLOPs, from the table of weights in fivefold.model.weights.

Conventions: a tied embedding counts once; `active` is what one token meets: all weights outside
the experts, top-k routed experts, the shared expert, embedding and head; `active_matmul`, the N of
6 N, is that without the input embedding, which is looked up and not multiplied. With tied
embeddings the matrix stays in, because the head still multiplies by it.

Multi-token-prediction modules (mtp) are counted only when asked for, and without the copies of
embedding and head that some published files store: both are the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.weights import (
    Weight,
    embedding_weight,
    embedding_weights,
    head_weights,
    layer_weights,
)


@dataclass(frozen=True)
class LayerParameters:
    """Weights of one layer, in elements. What the layer does not have is 0."""

    attention: int  # all projections with their biases, and attention sinks
    norms: int  # of the hidden states, and of queries, keys or latent vectors
    dense_mlp: int
    router: int
    one_expert: int
    routed_experts: int  # all of them
    active_experts: int  # the top-k a token goes to
    shared_expert: int  # with its gate
    mtp_projection: int  # what joins a multi-token-prediction module to the model

    @property
    def total(self) -> int:
        return self._outside_experts + self.routed_experts

    @property
    def active(self) -> int:
        """The weights one token meets."""
        return self._outside_experts + self.active_experts

    @property
    def _outside_experts(self) -> int:
        mlps = self.dense_mlp + self.shared_expert
        return self.attention + self.norms + mlps + self.router + self.mtp_projection


@dataclass(frozen=True)
class ParameterCounts:
    """Weights of a model, in elements; the conventions are at the top of this module."""

    total: int
    active: int
    active_matmul: int
    embedding: int  # with that of positions, where it is learned
    head: int  # 0 when tied
    routed_experts: int  # of all layers
    mtp: int  # all of the multi-token-prediction modules; 0 unless asked for
    # Of one layer that has it (all such layers are alike), 0 when no layer has it:
    attention: int
    norms: int
    dense_mlp: int
    router: int
    one_expert: int
    shared_expert: int  # with its gate


def count_parameters(config: ModelConfig, *, mtp: bool = False) -> ParameterCounts:
    """`mtp`: with the multi-token-prediction modules that the config offers."""
    kinds = _kinds(config, mtp)
    layers = {kind: layer_parameters(config, kind) for kind in kinds}
    embedding, head = _size(embedding_weights(config)), _size(head_weights(config))
    matrix = embedding_weight(config).elements
    outside_layers = embedding + head
    active = outside_layers + sum(layers[kind].active * kinds[kind] for kind in kinds)
    looked_up = embedding - matrix if config.tied_embeddings else embedding
    head_matrix = 0 if config.tied_embeddings else matrix
    return ParameterCounts(
        total=outside_layers + sum(layers[kind].total * kinds[kind] for kind in kinds),
        active=active,
        active_matmul=active - looked_up,
        embedding=embedding,
        head=head_matrix,
        routed_experts=sum(layers[kind].routed_experts * kinds[kind] for kind in kinds),
        mtp=sum(layers[kind].total * kinds[kind] for kind in kinds if kind.mtp),
        attention=max(layer.attention for layer in layers.values()),
        norms=max(layers[kind].norms for kind in kinds if not kind.mtp),
        dense_mlp=max(layer.dense_mlp for layer in layers.values()),
        router=max(layer.router for layer in layers.values()),
        one_expert=max(layer.one_expert for layer in layers.values()),
        shared_expert=max(layer.shared_expert for layer in layers.values()),
    )


def layer_parameters(config: ModelConfig, kind: LayerKind) -> LayerParameters:
    """The weights of one layer of this kind."""
    sizes: Counter[str] = Counter()
    for weight in layer_weights(config, kind):
        sizes[_part(weight)] += weight.elements
    routed = sizes["routed_experts"]
    one_expert = routed // config.moe.num_experts if config.moe else 0
    top_k = config.moe.experts_per_token if config.moe else 0
    return LayerParameters(
        attention=sizes["attention"],
        norms=sizes["norms"],
        dense_mlp=sizes["dense_mlp"],
        router=sizes["router"],
        one_expert=one_expert,
        routed_experts=routed,
        active_experts=top_k * one_expert,
        shared_expert=sizes["shared_expert"],
        mtp_projection=sizes["mtp_projection"],
    )


def _part(weight: Weight) -> str:
    """The field of LayerParameters that a weight counts in, by its name."""
    module = weight.name.rpartition(".")[0]
    if weight.is_routed:
        return "routed_experts"
    if module.endswith("norm"):
        return "norms"
    if module.startswith("self_attn"):
        return "attention"
    if module == "mlp.gate":
        return "router"
    if module.startswith("mlp.shared_expert"):
        return "shared_expert"
    return "dense_mlp" if module.startswith("mlp") else "mtp_projection"


def flops_per_token(
    config: ModelConfig, sequence_length: int, causal: bool, *, mtp: bool = False
) -> int:
    """Training FLOPs a token, forward and backward, without recompute.

    6 for each weight that multiplies (2 forward, 4 backward: Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1) and 6 * heads * (qk_dim + v_dim) * keys a layer for attention,
    where keys are the whole sequence, or the window of the layer if that is shorter (the
    full-square convention); `causal` counts half of the attention, since a token sees half of
    the keys on average. Say which one next to any MFU.

    `mtp`: with the multi-token-prediction modules, each of which runs the head once more.
    """
    multiplying = count_parameters(config, mtp=mtp).active_matmul
    if mtp:
        multiplying += config.mtp_layers * embedding_weight(config).elements
    return 6 * multiplying + sum(
        count * _attention_flops(config, kind, sequence_length, causal)
        for kind, count in _kinds(config, mtp).items()
    )


def layer_flops_per_token(
    config: ModelConfig, kind: LayerKind, sequence_length: int, causal: bool
) -> int:
    """The part of `flops_per_token` that one layer of this kind does."""
    attention = _attention_flops(config, kind, sequence_length, causal)
    return 6 * layer_parameters(config, kind).active + attention


def _attention_flops(
    config: ModelConfig, kind: LayerKind, sequence_length: int, causal: bool
) -> int:
    """Of one layer's attention a token, without its weights."""
    keys = min(sequence_length, kind.window) if kind.window else sequence_length
    attention = 6 * config.num_heads * (config.qk_head_dim + config.v_head_dim) * keys
    return attention // 2 if causal else attention  # exact: 6 is even


def head_flops_per_token(config: ModelConfig) -> int:
    """The part of `flops_per_token` after the last layer: final norm and head."""
    matrix = embedding_weight(config).elements if config.tied_embeddings else 0
    return 6 * (_size(head_weights(config)) + matrix)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The global name and shape of every parameter, in model order, without mtp modules.

    A tied head has no name of its own. See fivefold.model.weights for the names.
    """
    shapes = {weight.name: weight.shape for weight in embedding_weights(config)}
    for layer, kind in enumerate(config.layer_kinds):
        for weight in layer_weights(config, kind):
            shapes[f"model.layers.{layer}.{weight.name}"] = weight.shape
    return shapes | {weight.name: weight.shape for weight in head_weights(config)}


def _kinds(config: ModelConfig, mtp: bool) -> Counter[LayerKind]:
    """How many layers of each kind there are."""
    kinds = Counter(config.layer_kinds)
    if mtp and config.mtp_layers:
        kinds[config.mtp_kind] = config.mtp_layers
    return kinds


def _size(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)
