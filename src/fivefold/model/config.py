"""What is trained: the shape of a model, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.model.keys import Keys
from fivefold.model.rope import read_rope


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

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"num_experts_per_tok {self.experts_per_token} is more than the "
                f"{self.num_experts} experts there are; it can be at most {self.num_experts}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes are counts of elements."""

    family: str  # model_type of the Hugging Face config
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the dense gated MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool  # biases of the dense MLP's three projections
    qk_norm: bool  # RMSNorm over head_dim on each query and key head
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)  # {"rope_type": ..., its numbers}
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}; {_nearest_divisor(self.num_heads, self.num_kv_heads)} "
                "key/value heads would do"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim {self.head_dim} is odd, but rotary position embedding turns pairs of "
                f"elements; {self.head_dim + 1} would do"
            )
        if self.moe is not None and len(self.moe.layers) != self.num_layers:
            raise UserError(
                f"the mixture of experts says which of {len(self.moe.layers)} layers it is in, "
                f"but the model has {self.num_layers}"
            )

    def is_moe(self, layer: int) -> bool:
        """Is the MLP of this layer (0-based, in model order) a mixture of experts?"""
        return self.moe is not None and self.moe.layers[layer]


def load_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json: a path to the file or its folder, or its content.

    A width or count that is missing is an error. A key for which the family's Hugging Face
    class has a rule may be left out. A key that asks for other mathematics than is implemented,
    or that is not known, is refused by name: raises UserError.
    """
    values = source if isinstance(source, Mapping) else _read_json(Path(source))
    family = values.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise UserError(f"model_type {family!r} is not known; it can be {', '.join(READERS)}")
    keys = Keys(values, family)
    config = READERS[family](keys)
    keys.refuse_unread()
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the model config {path} cannot be read ({error.strerror}); give a Hugging Face "
            "config.json or the folder that holds it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the model config {path} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"the model config {path} holds a {type(values).__name__}, not an object")
    return values


# --- One reader a family. Each says what its Hugging Face class fixes without a key, and the
# --- class's defaults (huggingface/transformers, src/transformers/models/*/configuration_*.py).
# --- A class also has default sizes, those of one published model; they are never taken.


def _read_llama(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return _read_decoder(
        keys,
        kv_heads_by_rule=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _read_mistral(keys: Keys) -> ModelConfig:
    _refuse_window(keys, default_window=4096, default_positions=131072)
    return _read_decoder(keys)


def _read_mixtral(keys: Keys) -> ModelConfig:
    _refuse_window(keys, default_window=None, default_positions=131072)
    moe = _read_moe(
        keys,
        layers=(True,) * keys.count("num_hidden_layers"),
        num_experts=_count_of_two_names(keys, "num_local_experts", "num_experts"),
        expert_intermediate_size=keys.count("intermediate_size"),
        norm_topk_prob=True,
    )
    return _read_decoder(keys, rms_norm_eps=1e-5, rope_theta=1e6, moe=moe)


def _read_qwen2(keys: Keys) -> ModelConfig:
    _refuse_qwen_window(keys)
    return _read_decoder(keys, qkv_bias=True)


def _read_qwen3(keys: Keys) -> ModelConfig:
    _refuse_qwen_window(keys)
    bias = keys.flag("attention_bias", False)
    return _read_decoder(keys, default_head_dim=128, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _read_qwen2_moe(keys: Keys) -> ModelConfig:
    _refuse_qwen_window(keys)
    moe = _read_moe(
        keys,
        layers=_mixture_layers(keys),
        num_experts=keys.count("num_experts"),
        expert_intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
        shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
    )
    return _read_decoder(keys, qkv_bias=keys.flag("qkv_bias", True), moe=moe)


def _read_qwen3_moe(keys: Keys) -> ModelConfig:
    _refuse_qwen_window(keys)
    bias = keys.flag("attention_bias", False)
    moe = _read_moe(
        keys,
        layers=_mixture_layers(keys),
        num_experts=_count_of_two_names(keys, "num_experts", "num_local_experts"),
        expert_intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
    )
    return _read_decoder(keys, qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe)


READERS: dict[str, Callable[[Keys], ModelConfig]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen2": _read_qwen2,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
}


# --- What the families have in common.


def _read_decoder(
    keys: Keys,
    *,
    kv_heads_by_rule: bool = False,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 1e4,
    moe: MoEConfig | None = None,
) -> ModelConfig:
    """The keys all families share.

    `kv_heads_by_rule`: without num_key_value_heads there is one a query head.
    `default_head_dim`: without head_dim it is this, or if None hidden_size / heads.
    `rms_norm_eps` and `rope_theta` are the defaults of the family's class.
    """
    theta, scaling = read_rope(keys, rope_theta)
    num_layers = keys.count("num_hidden_layers")
    _refuse_layer_types(keys, num_layers)
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=keys.count("num_attention_heads"),
        num_kv_heads=_num_kv_heads(keys, by_rule=kv_heads_by_rule),
        head_dim=_head_dim(keys, default_head_dim),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        rms_norm_eps=keys.number("rms_norm_eps", rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        moe=moe,
    )


def _read_moe(
    keys: Keys,
    *,
    layers: tuple[bool, ...],
    num_experts: int,
    expert_intermediate_size: int,
    norm_topk_prob: bool,
    shared_intermediate_size: int = 0,
) -> MoEConfig | None:
    """None when no layer is a mixture. A shared expert has a sigmoid gate in every family here."""
    top_k = keys.count("num_experts_per_tok")
    hugging_face_coef = keys.number("router_aux_loss_coef", 0.001, zero_allowed=True)
    if not any(layers):
        return None
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=top_k,
        expert_intermediate_size=expert_intermediate_size,
        shared_intermediate_size=shared_intermediate_size,
        shared_gate=shared_intermediate_size > 0,
        norm_topk_prob=norm_topk_prob,
        aux_loss_coef=hugging_face_coef * top_k / sum(layers),
        layers=layers,
    )


def _mixture_layers(keys: Keys) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, but for those that are named to be dense."""
    num_layers = keys.count("num_hidden_layers")
    step = keys.count("decoder_sparse_step", 1)
    dense = keys.layer_set("mlp_only_layers", num_layers)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _num_kv_heads(keys: Keys, *, by_rule: bool) -> int:
    """null means one a query head, everywhere; an absent key only where the class says so."""
    if by_rule or "num_key_value_heads" in keys:
        return keys.count("num_key_value_heads", keys.count("num_attention_heads"))
    return keys.count("num_key_value_heads")


def _head_dim(keys: Keys, default: int | None) -> int:
    if keys.take("head_dim") is not None or default is not None:
        return keys.count("head_dim", default)
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden_size % num_heads:
        raise UserError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "there is no head_dim; add it"
        )
    return hidden_size // num_heads


def _count_of_two_names(keys: Keys, name: str, other: str) -> int:
    """A count that the Hugging Face class reads under two names."""
    if keys.take(other) is None:
        return keys.count(name)
    value = keys.count(other)
    if keys.take(name) is not None and keys.count(name) != value:
        raise UserError(f"{name} {keys.count(name)} and {other} {value} differ; keep one of them")
    return value


def _refuse_qwen_window(keys: Keys) -> None:
    if keys.flag("use_sliding_window", False):
        _refuse_window(keys, default_window=4096, default_positions=32768)
    else:
        keys.take("sliding_window")


def _refuse_window(keys: Keys, *, default_window: int | None, default_positions: int) -> None:
    """Windowed attention is not implemented; a window no sequence outgrows is none at all.

    The defaults are those of the class when the keys are absent; a null window is none.
    """
    positions = keys.count("max_position_embeddings", default_positions)
    given = "sliding_window" in keys
    if (keys.take("sliding_window") if given else default_window) is None:
        return
    window = keys.count("sliding_window", default_window)
    if window < positions:
        origin = "" if given else f" (what {keys.family} takes when the key is absent)"
        raise UserError(
            f"sliding_window {window}{origin} is shorter than max_position_embeddings {positions} "
            "and windowed attention is not implemented; set it to null if no sequence will have "
            f"more than {window} tokens"
        )


def _refuse_layer_types(keys: Keys, num_layers: int) -> None:
    layer_types = keys.take("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        raise UserError(
            f'layer_types must be "full_attention" for each of the {num_layers} layers, the only '
            "kind that is implemented"
        )


def _nearest_divisor(number: int, wish: int) -> int:
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return min(divisors, key=lambda each: abs(each - wish))
