"""The families with layer norms and two-matrix MLPs: GPT-2, GPT-NeoX and Falcon."""

from __future__ import annotations

from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.common import asks_for_dropout, count_of_two_names, even_share
from fivefold.model.huggingface.config_reader import ConfigReader
from fivefold.model.huggingface.rope_keys import read_rope


def read_gpt2(keys: ConfigReader) -> ModelConfig:
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
        head_dim=even_share(hidden, heads),
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
        dropout=asks_for_dropout(keys, 0.1, "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    )


def read_gpt_neox(keys: ConfigReader) -> ModelConfig:
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
        head_dim=even_share(hidden, heads),
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
        dropout=asks_for_dropout(keys, 0.0, "attention_dropout", "hidden_dropout"),
    )


def read_falcon(keys: ConfigReader) -> ModelConfig:
    hidden = keys.count("hidden_size")
    heads = count_of_two_names(keys, "num_attention_heads", "n_head")
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
        num_layers=count_of_two_names(keys, "num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=_falcon_kv_heads(keys, heads, new),
        head_dim=even_share(hidden, heads),
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
        dropout=asks_for_dropout(keys, 0.0, "attention_dropout", "hidden_dropout"),
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
