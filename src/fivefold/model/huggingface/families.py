"""One reader of config.json for each family of models.

Each says what its Hugging Face class fixes without a key, and the class's defaults
(huggingface/transformers, src/transformers/models/*/configuration_*.py). A class also has default
sizes, those of one published model; they are never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fivefold.model.config import MLAConfig, ModelConfig
from fivefold.model.huggingface.common import (
    asks_for_dropout,
    count_of_two_names,
    llama4_mixtures,
    mixture_layers,
    read_decoder,
    read_moe,
    read_routed_experts,
    read_text_config,
)
from fivefold.model.huggingface.config_reader import ConfigReader
from fivefold.model.huggingface.layer_norm_families import read_falcon, read_gpt2, read_gpt_neox
from fivefold.model.huggingface.rope_keys import read_rope
from fivefold.model.huggingface.windows import (
    llama4_chunks,
    qwen_windows,
    read_windows,
    windows_of_types,
)


def _read_llama(keys: ConfigReader) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return read_decoder(
        keys,
        kv_heads_by_rule=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _read_mistral(keys: ConfigReader) -> ModelConfig:
    windows = read_windows(keys, default_window=4096, default_positions=131072)
    return read_decoder(keys, windows=windows)


def _read_mixtral(keys: ConfigReader) -> ModelConfig:
    windows = read_windows(keys, default_positions=131072)
    moe = read_moe(
        keys,
        layers=(True,) * keys.count("num_hidden_layers"),
        num_experts=count_of_two_names(keys, "num_local_experts", "num_experts"),
        expert_intermediate_size=keys.count("intermediate_size"),
        norm_topk_prob=True,
    )
    return read_decoder(keys, rms_norm_eps=1e-5, rope_theta=1e6, moe=moe, windows=windows)


def _read_qwen2(keys: ConfigReader) -> ModelConfig:
    windows = qwen_windows(keys, lambda layer, limit: layer >= limit)
    return read_decoder(keys, qkv_bias=True, windows=windows)


def _read_qwen3(keys: ConfigReader) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return read_decoder(
        keys,
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=qwen_windows(keys, lambda layer, limit: layer >= limit),
    )


def _read_qwen2_moe(keys: ConfigReader) -> ModelConfig:
    windows = qwen_windows(keys, lambda layer, limit: layer % 2 == 0 and layer < limit)
    moe = read_moe(
        keys,
        layers=mixture_layers(keys),
        num_experts=keys.count("num_experts"),
        expert_intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
        shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return read_decoder(keys, qkv_bias=keys.flag("qkv_bias", True), moe=moe, windows=windows)


def _read_qwen3_moe(keys: ConfigReader) -> ModelConfig:
    windows = qwen_windows(keys, lambda layer, limit: True)
    bias = keys.flag("attention_bias", False)
    moe = read_moe(
        keys,
        layers=mixture_layers(keys),
        num_experts=count_of_two_names(keys, "num_experts", "num_local_experts"),
        expert_intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
    )
    return read_decoder(
        keys, qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe, windows=windows
    )


def _read_llama4(keys: ConfigReader) -> ModelConfig:
    """The published models share one vision tower, whose output is 4096 wide."""
    return read_text_config(keys, _read_llama4_text, lambda hidden: 850_960_896 + 4096 * hidden)


def _read_llama4_text(keys: ConfigReader) -> ModelConfig:
    """Every mixture has one shared expert, as wide as a routed one. L2 norms have no weights."""
    num_layers = keys.count("num_hidden_layers")
    width = keys.count("intermediate_size")
    moe = read_moe(
        keys,
        layers=llama4_mixtures(keys, num_layers),
        num_experts=keys.count("num_local_experts"),
        expert_intermediate_size=width,
        norm_topk_prob=False,
        shared_intermediate_size=width,
    )
    keys.pass_over("attn_scale", "attn_temperature_tuning", "floor_scale", "use_qk_norm")
    keys.pass_over("cache_implementation", "for_llm_compressor")
    bias = keys.flag("attention_bias", False)
    config = read_decoder(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        moe=moe,
        windows=llama4_chunks(keys, num_layers),
    )
    return replace(config, intermediate_size=keys.count("intermediate_size_mlp"))


def _read_gemma2(keys: ConfigReader) -> ModelConfig:
    sliding = [layer % 2 == 0 for layer in range(keys.count("num_hidden_layers"))]
    return _read_gemma(keys, sliding)


def _read_gemma3_text(keys: ConfigReader) -> ModelConfig:
    """One layer in `sliding_window_pattern` sees everything."""
    old, new = keys.take("_sliding_window_pattern"), keys.take("sliding_window_pattern")
    name = "sliding_window_pattern" if old is None or new is not None else "_sliding_window_pattern"
    pattern = keys.count(name, 6)
    num_layers = keys.count("num_hidden_layers")
    sliding = [(layer + 1) % pattern > 0 for layer in range(num_layers)]
    keys.pass_over("rope_local_base_freq")
    return replace(_read_gemma(keys, sliding), qk_norm=True)


def _read_gemma3(keys: ConfigReader) -> ModelConfig:
    """The vision tower is SigLIP's for 896 pixels, 1152 wide, with a norm and a projection."""
    return read_text_config(
        keys, _read_gemma3_text, lambda hidden: 416_866_032 + 1152 + 1152 * hidden
    )


def _read_gemma(keys: ConfigReader, sliding: Sequence[bool]) -> ModelConfig:
    keys.pass_over(
        "attn_logit_softcapping",
        "cache_implementation",
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
    )
    keys.count("head_dim")  # not hidden_size / heads, and its default is one model's
    bias = keys.flag("attention_bias", False)
    config = read_decoder(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        tied=True,
        windows=read_windows(keys, sliding, required=True),
    )
    return replace(config, norms_per_layer=4)


def _read_phi3(keys: ConfigReader) -> ModelConfig:
    keys.pass_over("original_max_position_embeddings")
    return read_decoder(keys, kv_heads_by_rule=True, rms_norm_eps=1e-5, windows=read_windows(keys))


def _read_gpt_oss(keys: ConfigReader) -> ModelConfig:
    num_layers = keys.count("num_hidden_layers")
    moe = read_moe(
        keys,
        layers=(True,) * num_layers,
        num_experts=count_of_two_names(keys, "num_local_experts", "num_experts"),
        expert_intermediate_size=keys.count("intermediate_size"),
        norm_topk_prob=True,
    )
    assert moe is not None
    keys.pass_over("experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit")
    bias = keys.flag("attention_bias", True)
    sliding = [layer % 2 == 0 for layer in range(num_layers)]
    config = read_decoder(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        moe=replace(moe, router_bias=True, expert_bias=True),
        windows=read_windows(keys, sliding, required=True),
    )
    return replace(config, attention_sinks=True)


def _read_deepseek_v2(keys: ConfigReader) -> ModelConfig:
    return _read_deepseek(keys, router_bias=keys.take("topk_method") == "noaux_tc")


def _read_deepseek_v3(keys: ConfigReader) -> ModelConfig:
    keys.pass_over("topk_method")
    return _read_deepseek(keys, router_bias=True)


def _read_deepseek(keys: ConfigReader, *, router_bias: bool) -> ModelConfig:
    """Latent attention: the number of key/value heads says nothing, nor does head_dim."""
    mla = MLAConfig(
        q_lora_rank=_q_lora_rank(keys),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )
    keys.pass_over("head_dim", "num_key_value_heads", "rope_interleave", "seq_aux")
    theta, scaling = read_rope(keys, 1e4)
    heads, num_layers = keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    windows = windows_of_types(keys, num_layers, {})
    bias = keys.flag("attention_bias", False)
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=False,
        qk_norm=False,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        moe=read_routed_experts(keys, router_bias=router_bias),
        mla=mla,
        windows=windows,
        mtp_layers=keys.count("num_nextn_predict_layers", 0, zero_allowed=True),
        dropout=asks_for_dropout(keys, 0.0, "attention_dropout"),
    )


def _q_lora_rank(keys: ConfigReader) -> int | None:
    """null says that queries are projected directly; an absent key says nothing."""
    if "q_lora_rank" in keys and keys.take("q_lora_rank") is None:
        return None
    return keys.count("q_lora_rank")


def _read_glm4_moe(keys: ConfigReader) -> ModelConfig:
    keys.pass_over("topk_method", "use_grouped_mm")
    config = read_decoder(
        keys,
        qkv_bias=keys.flag("attention_bias", False),  # and none on the output
        qk_norm=keys.flag("use_qk_norm", False),
        rms_norm_eps=1e-5,
        moe=read_routed_experts(keys, router_bias=True),
    )
    mtp_layers = keys.count("num_nextn_predict_layers", 0, zero_allowed=True)
    return replace(config, mtp_layers=mtp_layers)


READERS: dict[str, Callable[[ConfigReader], ModelConfig]] = {
    "llama": _read_llama,
    "llama4": _read_llama4,
    "llama4_text": _read_llama4_text,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen2": _read_qwen2,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "gemma2": _read_gemma2,
    "gemma3": _read_gemma3,
    "gemma3_text": _read_gemma3_text,
    "phi3": _read_phi3,
    "gpt2": read_gpt2,
    "gpt_neox": read_gpt_neox,
    "falcon": read_falcon,
    "gpt_oss": _read_gpt_oss,
    "deepseek_v2": _read_deepseek_v2,
    "deepseek_v3": _read_deepseek_v3,
    "kimi_k2": _read_deepseek_v3,
    "glm4_moe": _read_glm4_moe,
}
