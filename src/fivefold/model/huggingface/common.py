"""What the readers of the families have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig, MoEConfig
from fivefold.model.huggingface.config_reader import ConfigReader
from fivefold.model.huggingface.rope_keys import read_rope
from fivefold.model.huggingface.windows import windows_of_types

WRAPPER_KEYS = (
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
)
"""Keys of a model of text and images, in addition to those of its text model."""


def read_decoder(
    keys: ConfigReader,
    *,
    kv_heads_by_rule: bool = False,
    default_head_dim: int | None = None,
    tied: bool = False,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 1e4,
    moe: MoEConfig | None = None,
    windows: tuple[int, ...] | None = None,
    **parts: bool,
) -> ModelConfig:
    """The keys that most families share.

    `kv_heads_by_rule`: without num_key_value_heads there is one a query head.
    `default_head_dim`: without head_dim it is this, or if None hidden_size / heads.
    `tied`, `rms_norm_eps` and `rope_theta` are the defaults of the family's class.
    `parts`: qkv_bias, output_bias, mlp_bias and qk_norm of the config, False where left out.
    """
    theta, scaling = read_rope(keys, rope_theta)
    num_layers = keys.count("num_hidden_layers")
    if windows is None:
        windows = windows_of_types(keys, num_layers, {})
    config = ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=keys.count("num_attention_heads"),
        num_kv_heads=_num_kv_heads(keys, by_rule=kv_heads_by_rule),
        head_dim=_head_dim(keys, default_head_dim),
        tied_embeddings=keys.flag("tie_word_embeddings", tied),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rms_norm_eps=keys.number("rms_norm_eps", rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        moe=moe,
        windows=windows,
        dropout=asks_for_dropout(
            keys, 0.0, "attention_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"
        ),
    )
    return replace(config, **parts)


def read_text_config(
    keys: ConfigReader,
    read: Callable[[ConfigReader], ModelConfig],
    vision_parameters: Callable[[int], int],
) -> ModelConfig:
    """The text model inside a model of text and images."""
    if keys.take("text_config") is None:
        raise UserError(
            f"the config of this {keys.family} model has no text_config, which describes its "
            "language model; add it"
        )
    keys.pass_over(*WRAPPER_KEYS)
    text = keys.inside("text_config")
    text.family = f"{keys.family}_text"
    config = read(text)
    text.refuse_unread()
    if text.take("tie_word_embeddings") is None:
        tied = keys.flag("tie_word_embeddings", config.tied_embeddings)
        config = replace(config, tied_embeddings=tied)
    keys.pass_over("tie_word_embeddings")
    note = f"the vision tower ({vision_parameters(config.hidden_size):,} parameters as published)"
    return replace(config, family=keys.family, notes=(f"{note} is not included",))


def read_moe(
    keys: ConfigReader,
    *,
    layers: tuple[bool, ...],
    num_experts: int,
    expert_intermediate_size: int,
    norm_topk_prob: bool,
    shared_intermediate_size: int = 0,
    shared_gate: bool = False,
) -> MoEConfig | None:
    """None when no layer is a mixture."""
    top_k = keys.count("num_experts_per_tok")
    hugging_face_coef = keys.number("router_aux_loss_coef", 0.001, zero_allowed=True)
    if not any(layers):
        return None
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=top_k,
        expert_intermediate_size=expert_intermediate_size,
        shared_intermediate_size=shared_intermediate_size,
        shared_gate=shared_gate,
        norm_topk_prob=norm_topk_prob,
        aux_loss_coef=hugging_face_coef * top_k / sum(layers),
        layers=layers,
    )


def read_routed_experts(keys: ConfigReader, *, router_bias: bool) -> MoEConfig | None:
    """The keys of DeepSeek's mixtures: first dense layers, then shared and routed experts."""
    num_layers, width = keys.count("num_hidden_layers"), keys.count("moe_intermediate_size")
    first = keys.count("first_k_dense_replace", zero_allowed=True)
    step = keys.count("moe_layer_freq", 1)
    keys.pass_over("routed_scaling_factor", "scoring_func")
    groups, per_token = keys.count("n_group", 1), keys.count("topk_group", 1)
    layers = tuple(layer >= first and layer % step == 0 for layer in range(num_layers))
    experts, top_k = keys.count("n_routed_experts"), keys.count("num_experts_per_tok")
    shared = keys.count("n_shared_experts", zero_allowed=True)
    norm_topk_prob = keys.flag("norm_topk_prob", router_bias)
    aux_loss_coef = keys.number("aux_loss_alpha", 0.0, zero_allowed=True)
    if not any(layers):
        return None
    return MoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        expert_intermediate_size=width,
        shared_intermediate_size=shared * width,
        shared_gate=False,
        norm_topk_prob=norm_topk_prob,
        aux_loss_coef=aux_loss_coef,
        layers=layers,
        groups=groups,
        groups_per_token=per_token if groups > 1 else 0,
        router_bias=router_bias,
    )


def mixture_layers(keys: ConfigReader) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, but for those that are named to be dense."""
    num_layers = keys.count("num_hidden_layers")
    step = keys.count("decoder_sparse_step", 1)
    dense = keys.layer_set("mlp_only_layers", num_layers)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def llama4_mixtures(keys: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step = keys.count("interleave_moe_layer_step", 1)
    if keys.take("moe_layers") is not None:
        named = keys.layer_set("moe_layers", num_layers)
        return tuple(layer in named for layer in range(num_layers))
    return tuple((layer + 1) % step == 0 for layer in range(num_layers))


def _num_kv_heads(keys: ConfigReader, *, by_rule: bool) -> int:
    """null means one a query head, everywhere; an absent key only where the class says so."""
    if by_rule or "num_key_value_heads" in keys:
        return keys.count("num_key_value_heads", keys.count("num_attention_heads"))
    return keys.count("num_key_value_heads")


def _head_dim(keys: ConfigReader, default: int | None) -> int:
    if keys.take("head_dim") is not None or default is not None:
        return keys.count("head_dim", default)
    return even_share(keys.count("hidden_size"), keys.count("num_attention_heads"))


def even_share(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise UserError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "there is no head_dim; add it"
        )
    return hidden_size // num_heads


def count_of_two_names(keys: ConfigReader, name: str, other: str) -> int:
    """A count that the Hugging Face class reads under two names."""
    if keys.take(other) is None:
        return keys.count(name)
    value = keys.count(other)
    if keys.take(name) is not None and keys.count(name) != value:
        raise UserError(f"{name} {keys.count(name)} and {other} {value} differ; keep one of them")
    return value


def asks_for_dropout(keys: ConfigReader, default: float, *names: str) -> bool:
    """Does the config ask for dropout? The program has a setting of its own for it."""
    rates = {name: keys.number(name, default, zero_allowed=True) for name in names}
    keys.untrainable.extend(
        f"{name} = {rate:g} is not used" for name, rate in rates.items() if rate
    )
    return any(rates.values())
