"""What is trained: the shape of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fivefold.errors import UserError

TRAINED_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Families whose mathematics fivefold.model's torch modules have; the others are planned only."""


@dataclass(frozen=True)
class MoEConfig:
    """The mixture-of-experts part of a model; the router takes a softmax over all experts.

    The balance loss of one layer is num_experts * sum_i f_i P_i, with f_i the fraction of the
    layer's *assignments* (top-k times tokens) that went to expert i and P_i the mean probability
    of expert i: 1.0 at uniform routing. What is added to the model's loss is `aux_loss_coef`
    times the *sum* of it over the mixture layers.

    Hugging Face's `router_aux_loss_coef` multiplies another loss: f_i is there a fraction of
    *tokens*, which gives top-k at uniform routing, and the layers are averaged. So a config is
    read with

        aux_loss_coef = router_aux_loss_coef * experts_per_token / number of mixture layers

    which makes the two the same for layers that route alike. (Hugging Face takes f and P
    as means over all layers before it multiplies them, so layers whose imbalances differ can
    cancel there; here each layer answers for its own.)
    """

    num_experts: int
    experts_per_token: int  # top-k
    expert_intermediate_size: int
    shared_intermediate_size: int  # width of the shared expert, 0 when there is none
    shared_gate: bool  # the shared expert's output is scaled by sigmoid(x . w)
    norm_topk_prob: bool  # the k chosen probabilities are scaled to sum to 1
    aux_loss_coef: float  # of one layer's balance loss (which is 1.0 at uniform routing)
    layers: tuple[bool, ...]  # for each layer of the model: is its MLP a mixture?
    router_bias: bool = False  # one number an expert: a bias, or what DeepSeek-V3 selects by
    expert_bias: bool = False  # biases of each expert's three projections
    groups: int = 1  # into which the experts fall; a token goes to experts of a few groups only:
    groups_per_token: int = 0  # 0: of any group

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"num_experts_per_tok {self.experts_per_token} is more than the "
                f"{self.num_experts} experts there are; it can be at most {self.num_experts}"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: keys and values (and queries, where `q_lora_rank` is not None)
    are products of a narrow latent vector that all heads share (DeepSeek-V2, arXiv:2405.04434).

    A query or key head has `qk_nope_head_dim` elements without and `qk_rope_head_dim` with rotary
    embedding, and the latter part of the key is one for all heads.
    """

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LayerKind:
    """What tells one layer of a model from another; layers of one kind are alike."""

    moe: bool  # its MLP is a mixture of experts
    window: int = 0  # keys that a query may see at most, 0 = all before it
    mtp: bool = False  # a multi-token-prediction module: a layer and what joins it to the model


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes are counts of elements.

    In a model with `mla`, `num_kv_heads` is `num_heads` and `head_dim` that of queries and keys.
    """

    family: str  # model_type of the Hugging Face config
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool  # biases of the dense MLP's projections
    qk_norm: bool  # RMSNorm over head_dim on each query and key head
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)  # {"rope_type": ..., its numbers}
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    windows: tuple[int, ...] | None = None  # of each layer, see LayerKind; None: no layer has one
    gated_mlp: bool = True  # three matrices (SwiGLU and its kind); False: two
    norm_kind: str = "rms"  # or "layer": layer norms, which have biases
    norms_per_layer: int = 2  # 4: also after attention and after the MLP; 1: one for both
    parallel_attention: bool = False  # attention and MLP read the same hidden states
    learned_positions: int = 0  # rows of a table of position embeddings
    attention_sinks: bool = False  # one learned logit a query head
    mtp_layers: int = 0  # multi-token-prediction modules that the config offers
    dropout: bool = False  # the config asks for dropout somewhere
    untrainable: tuple[str, ...] = ()  # what this program reads but cannot train
    notes: tuple[str, ...] = ()  # what the counts leave out

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}; {_nearest_divisor(self.num_heads, self.num_kv_heads)} "
                "key/value heads would do"
            )
        if self.head_dim % 2 and not self.learned_positions:
            raise UserError(
                f"head_dim {self.head_dim} is odd, but rotary position embedding turns pairs of "
                f"elements; {self.head_dim + 1} would do"
            )
        if self.moe is not None and len(self.moe.layers) != self.num_layers:
            raise UserError(
                f"the mixture of experts says which of {len(self.moe.layers)} layers it is in, "
                f"but the model has {self.num_layers}"
            )
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise UserError(
                f"there are attention windows for {len(self.windows)} layers, but the model has "
                f"{self.num_layers}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query or key head."""
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of one value head."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in model order, without multi-token prediction."""
        windows = self.windows or (0,) * self.num_layers
        return tuple(LayerKind(self.is_moe(i), window) for i, window in enumerate(windows))

    @property
    def mtp_kind(self) -> LayerKind:
        """The kind of a multi-token-prediction module: its layer is like the model's last one."""
        return LayerKind(self.is_moe(self.num_layers - 1), mtp=True)

    def is_moe(self, layer: int) -> bool:
        """Is the MLP of this layer (0-based, in model order) a mixture of experts?"""
        return self.moe is not None and self.moe.layers[layer]


def require_trainable(config: ModelConfig) -> None:
    """Raise UserError, naming the reason, for a model that can be planned but not trained."""
    if config.family not in TRAINED_FAMILIES:
        raise UserError(
            f"models of type {config.family} can be planned but not trained; those of type "
            f"{', '.join(TRAINED_FAMILIES)} can"
        )
    if config.untrainable:
        raise UserError(
            f"this {config.family} model can be planned but not trained: "
            f"{'; '.join(config.untrainable)}"
        )


def _nearest_divisor(number: int, wish: int) -> int:
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return min(divisors, key=lambda each: abs(each - wish))
