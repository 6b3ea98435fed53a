"""One reader of config.json for each family of models.

Each says what its Hugging Face class fixes without a key, and the class's defaults
(huggingface/transformers, src/transformers/models/*/configuration_*.py). A class also has default
sizes, those of one published model; they are never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fivefold.errors import UserError
from fivefold.model.config import MLAConfig, ModelConfig, MoEConfig
from fivefold.model.huggingface.config_reader import ConfigReader
from fivefold.model.rope import read_rope

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
"""Keys of a model of text and images, beside those of its text model."""


def _read_llama(keys: ConfigReader) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return _read_decoder(
        keys,
        kv_heads_by_rule=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _read_mistral(keys: ConfigReader) -> ModelConfig:
    windows = _windows(keys, default_window=4096, default_positions=131072)
    return _read_decoder(keys, windows=windows)


def _read_mixtral(keys: ConfigReader) -> ModelConfig:
    windows = _windows(keys, default_positions=131072)
    moe = _read_moe(
        keys,
        layers=(True,) * keys.count("num_hidden_layers"),
        num_experts=_count_of_two_names(keys, "num_local_experts", "num_experts"),
        expert_intermediate_size=keys.count("intermediate_size"),
        norm_topk_prob=True,
    )
    return _read_decoder(keys, rms_norm_eps=1e-5, rope_theta=1e6, moe=moe, windows=windows)


def _read_qwen2(keys: ConfigReader) -> ModelConfig:
    windows = _qwen_windows(keys, lambda layer, limit: layer >= limit)
    return _read_decoder(keys, qkv_bias=True, windows=windows)


def _read_qwen3(keys: ConfigReader) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return _read_decoder(
        keys,
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(keys, lambda layer, limit: layer >= limit),
    )


def _read_qwen2_moe(keys: ConfigReader) -> ModelConfig:
    windows = _qwen_windows(keys, lambda layer, limit: layer % 2 == 0 and layer < limit)
    moe = _read_moe(
        keys,
        layers=_mixture_layers(keys),
        num_experts=keys.count("num_experts"),
        expert_intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
        shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _read_decoder(keys, qkv_bias=keys.flag("qkv_bias", True), moe=moe, windows=windows)


def _read_qwen3_moe(keys: ConfigReader) -> ModelConfig:
    windows = _qwen_windows(keys, lambda layer, limit: True)
    bias = keys.flag("attention_bias", False)
    moe = _read_moe(
        keys,
        layers=_mixture_layers(keys),
        num_experts=_count_of_two_names(keys, "num_experts", "num_local_experts"),
        expert_intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
    )
    return _read_decoder(
        keys, qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe, windows=windows
    )


def _read_llama4(keys: ConfigReader) -> ModelConfig:
    """The published models share one vision tower, whose output is 4096 wide."""
    return _read_text_config(keys, _read_llama4_text, lambda hidden: 850_960_896 + 4096 * hidden)


def _read_llama4_text(keys: ConfigReader) -> ModelConfig:
    """Every mixture has one shared expert, as wide as a routed one. L2 norms have no weights."""
    num_layers = keys.count("num_hidden_layers")
    width = keys.count("intermediate_size")
    moe = _read_moe(
        keys,
        layers=_llama4_mixtures(keys, num_layers),
        num_experts=keys.count("num_local_experts"),
        expert_intermediate_size=width,
        norm_topk_prob=False,
        shared_intermediate_size=width,
    )
    keys.pass_over("attn_scale", "attn_temperature_tuning", "floor_scale", "use_qk_norm")
    keys.pass_over("cache_implementation", "for_llm_compressor")
    bias = keys.flag("attention_bias", False)
    config = _read_decoder(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        moe=moe,
        windows=_llama4_chunks(keys, num_layers),
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
    return _read_text_config(
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
    config = _read_decoder(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        tied=True,
        windows=_windows(keys, sliding, required=True),
    )
    return replace(config, norms_per_layer=4)


def _read_phi3(keys: ConfigReader) -> ModelConfig:
    keys.pass_over("original_max_position_embeddings")
    return _read_decoder(keys, kv_heads_by_rule=True, rms_norm_eps=1e-5, windows=_windows(keys))


def _read_gpt2(keys: ConfigReader) -> ModelConfig:
    hidden, heads = keys.count("n_embd"), keys.count("n_head")
    keys.pass_over(
        "activation_function",
        "gradient_checkpointing",
        "n_ctx",
        "reorder_and_upcast_attn",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    )
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("n_inner", 4 * hidden),
        num_layers=keys.count("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_even_share(hidden, heads),
        tied_embeddings=keys.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        rms_norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        rope_theta=1e4,
        rope_scaling=None,
        gated_mlp=False,
        norm_kind="layer",
        learned_positions=keys.count("n_positions"),
        dropout=_dropout(keys, 0.1, "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    )


def _read_gpt_neox(keys: ConfigReader) -> ModelConfig:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    keys.pass_over("classifier_dropout", "hidden_act", "rotary_pct")
    theta, scaling = read_rope(keys, keys.number("rotary_emb_base", 1e4))
    bias = keys.flag("attention_bias", True)
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=keys.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_even_share(hidden, heads),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        qk_norm=False,
        rms_norm_eps=keys.number("layer_norm_eps", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        gated_mlp=False,
        norm_kind="layer",
        parallel_attention=keys.flag("use_parallel_residual", True),
        dropout=_dropout(keys, 0.0, "attention_dropout", "hidden_dropout"),
    )


def _read_falcon(keys: ConfigReader) -> ModelConfig:
    hidden = keys.count("hidden_size")
    heads = _count_of_two_names(keys, "num_attention_heads", "n_head")
    new = keys.flag("new_decoder_architecture", False)
    parallel = keys.flag("parallel_attn", True)
    keys.pass_over("activation", "alibi", "apply_residual_connection_post_layernorm")
    theta, scaling = read_rope(keys, 1e4)
    bias = keys.flag("bias", False)
    one_norm = parallel and keys.count("num_ln_in_parallel_attn", 2 if new else 1) == 1
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("ffn_hidden_size", 4 * hidden),
        num_layers=_count_of_two_names(keys, "num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=_falcon_kv_heads(keys, heads, new),
        head_dim=_even_share(hidden, heads),
        tied_embeddings=keys.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        rms_norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        gated_mlp=False,
        norm_kind="layer",
        norms_per_layer=1 if one_norm else 2,
        parallel_attention=parallel,
        dropout=_dropout(keys, 0.0, "attention_dropout", "hidden_dropout"),
    )


def _falcon_kv_heads(keys: ConfigReader, heads: int, new: bool) -> int:
    """The key counts only in the new architecture; before, it was one for all or one each."""
    multi_query = keys.flag("multi_query", True)
    name = "n_head_kv" if keys.take("num_kv_heads") is None else "num_kv_heads"
    given = keys.count(name, heads)
    keys.pass_over("n_head_kv")
    if new:
        return given
    return 1 if multi_query else heads


def _read_gpt_oss(keys: ConfigReader) -> ModelConfig:
    num_layers = keys.count("num_hidden_layers")
    moe = _read_moe(
        keys,
        layers=(True,) * num_layers,
        num_experts=_count_of_two_names(keys, "num_local_experts", "num_experts"),
        expert_intermediate_size=keys.count("intermediate_size"),
        norm_topk_prob=True,
    )
    assert moe is not None
    keys.pass_over("experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit")
    bias = keys.flag("attention_bias", True)
    sliding = [layer % 2 == 0 for layer in range(num_layers)]
    config = _read_decoder(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        moe=replace(moe, router_bias=True, expert_bias=True),
        windows=_windows(keys, sliding, required=True),
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
    windows = _windows_of_types(keys, num_layers, {})
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
        moe=_read_routed_experts(keys, router_bias=router_bias),
        mla=mla,
        windows=windows,
        mtp_layers=keys.count("num_nextn_predict_layers", 0, zero_allowed=True),
        dropout=_dropout(keys, 0.0, "attention_dropout"),
    )


def _q_lora_rank(keys: ConfigReader) -> int | None:
    """null says that queries are projected directly; an absent key says nothing."""
    if "q_lora_rank" in keys and keys.take("q_lora_rank") is None:
        return None
    return keys.count("q_lora_rank")


def _read_glm4_moe(keys: ConfigReader) -> ModelConfig:
    keys.pass_over("topk_method", "use_grouped_mm")
    config = _read_decoder(
        keys,
        qkv_bias=keys.flag("attention_bias", False),  # and none on the output
        qk_norm=keys.flag("use_qk_norm", False),
        rms_norm_eps=1e-5,
        moe=_read_routed_experts(keys, router_bias=True),
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
    "gpt2": _read_gpt2,
    "gpt_neox": _read_gpt_neox,
    "falcon": _read_falcon,
    "gpt_oss": _read_gpt_oss,
    "deepseek_v2": _read_deepseek_v2,
    "deepseek_v3": _read_deepseek_v3,
    "kimi_k2": _read_deepseek_v3,
    "glm4_moe": _read_glm4_moe,
}


# --- What the families have in common.


def _read_decoder(
    keys: ConfigReader,
    *,
    kv_heads_by_rule: bool = False,
    default_head_dim: int | None = None,
    tied: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 1e4,
    moe: MoEConfig | None = None,
    windows: tuple[int, ...] | None = None,
) -> ModelConfig:
    """The keys that most families share.

    `kv_heads_by_rule`: without num_key_value_heads there is one a query head.
    `default_head_dim`: without head_dim it is this, or if None hidden_size / heads.
    `tied`, `rms_norm_eps` and `rope_theta` are the defaults of the family's class.
    """
    theta, scaling = read_rope(keys, rope_theta)
    num_layers = keys.count("num_hidden_layers")
    if windows is None:
        windows = _windows_of_types(keys, num_layers, {})
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=keys.count("num_attention_heads"),
        num_kv_heads=_num_kv_heads(keys, by_rule=kv_heads_by_rule),
        head_dim=_head_dim(keys, default_head_dim),
        tied_embeddings=keys.flag("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        rms_norm_eps=keys.number("rms_norm_eps", rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        moe=moe,
        windows=windows,
        dropout=_dropout(
            keys, 0.0, "attention_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"
        ),
    )


def _read_text_config(
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


def _read_moe(
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


def _read_routed_experts(keys: ConfigReader, *, router_bias: bool) -> MoEConfig | None:
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


def _mixture_layers(keys: ConfigReader) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, but for those that are named to be dense."""
    num_layers = keys.count("num_hidden_layers")
    step = keys.count("decoder_sparse_step", 1)
    dense = keys.layer_set("mlp_only_layers", num_layers)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _llama4_mixtures(keys: ConfigReader, num_layers: int) -> tuple[bool, ...]:
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
    return _even_share(keys.count("hidden_size"), keys.count("num_attention_heads"))


def _even_share(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise UserError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "there is no head_dim; add it"
        )
    return hidden_size // num_heads


def _count_of_two_names(keys: ConfigReader, name: str, other: str) -> int:
    """A count that the Hugging Face class reads under two names."""
    if keys.take(other) is None:
        return keys.count(name)
    value = keys.count(other)
    if keys.take(name) is not None and keys.count(name) != value:
        raise UserError(f"{name} {keys.count(name)} and {other} {value} differ; keep one of them")
    return value


def _dropout(keys: ConfigReader, default: float, *names: str) -> bool:
    """Does the config ask for dropout? The program has a setting of its own for it."""
    rates = {name: keys.number(name, default, zero_allowed=True) for name in names}
    keys.untrainable.extend(
        f"{name} = {rate:g} is not used" for name, rate in rates.items() if rate
    )
    return any(rates.values())


# --- Which keys a query may see: windows[layer], 0 = all before it. None: no layer has a window.


def _windows(
    keys: ConfigReader,
    sliding: Sequence[bool] | None = None,
    *,
    required: bool = False,
    default_window: int | None = None,
    default_positions: int | None = None,
) -> tuple[int, ...] | None:
    """Windows of `sliding_window` in the layers that layer_types name, or else `sliding` (or all).

    A window that no sequence outgrows is none. The defaults are those of the class when the keys
    are absent; a null window is none, but where the family always has one (`required`).
    """
    num_layers = keys.count("num_hidden_layers")
    given = "sliding_window" in keys
    if not required and (keys.take("sliding_window") if given else default_window) is None:
        return _windows_of_types(keys, num_layers, {"sliding_attention": 0})
    window = keys.count("sliding_window", default_window)
    windows = _windows_of_types(keys, num_layers, {"sliding_attention": window})
    if keys.take("layer_types") is None:
        windows = tuple(window * each for each in sliding or (True,) * num_layers)
    if windows is None or not any(windows):
        return None
    if keys.take("max_position_embeddings") is None and default_positions is None:
        return windows
    positions = keys.count("max_position_embeddings", default_positions)
    if window >= positions:
        return None
    origin = "" if given else f" (what {keys.family} takes when the key is absent)"
    keys.untrainable.append(
        f"sliding_window {window}{origin} is shorter than max_position_embeddings {positions} "
        "and windowed attention is not implemented; set it to null if no sequence will have "
        f"more than {window} tokens"
    )
    return windows


def _qwen_windows(keys: ConfigReader, slides: Callable[[int, int], bool]) -> tuple[int, ...] | None:
    """`slides`(layer, max_window_layers) is the class's rule where layer_types are absent."""
    num_layers = keys.count("num_hidden_layers")
    if not keys.flag("use_sliding_window", False):
        keys.pass_over("sliding_window")
        return _windows_of_types(keys, num_layers, {"sliding_attention": 0})
    limit = keys.count("max_window_layers", 28, zero_allowed=True)
    sliding = [slides(layer, limit) for layer in range(num_layers)]
    return _windows(keys, sliding, default_window=4096, default_positions=32768)


def _llama4_chunks(keys: ConfigReader, num_layers: int) -> tuple[int, ...] | None:
    """Layers with rotary embedding attend within chunks; every fourth has neither."""
    interval = keys.count("no_rope_layer_interval", 4)
    no_rope = keys.take("no_rope_layers")  # 1 = rotary embedding, in spite of the name
    if "attention_chunk_size" in keys and keys.take("attention_chunk_size") is None:
        return _windows_of_types(keys, num_layers, {"chunked_attention": 0})
    chunk = keys.count("attention_chunk_size")
    if keys.take("layer_types") is not None:
        return _windows_of_types(keys, num_layers, {"chunked_attention": chunk})
    if not no_rope:
        return tuple(chunk * ((layer + 1) % interval > 0) for layer in range(num_layers))
    if not isinstance(no_rope, list) or len(no_rope) != num_layers or set(no_rope) - {0, 1}:
        raise UserError(f"no_rope_layers must be a list of {num_layers} numbers, each 0 or 1")
    return tuple(chunk * each for each in no_rope)


def _windows_of_types(
    keys: ConfigReader, num_layers: int, kinds: dict[str, int]
) -> tuple[int, ...] | None:
    """What layer_types say, where they are there; `kinds`: the windows of the family's kinds."""
    layer_types = keys.take("layer_types")
    if layer_types is None:
        return None
    known = {"full_attention": 0, **kinds}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or not all(isinstance(each, str) and each in known for each in layer_types)
    ):
        names = " or ".join(f'"{name}"' for name in known)
        raise UserError(f"layer_types must be {names} for each of the {num_layers} layers")
    windows = tuple(known[each] for each in layer_types)
    return windows if any(windows) else None
