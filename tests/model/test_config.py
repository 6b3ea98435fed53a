"""A Hugging Face config.json is read in full, or refused with the key that stands in the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.model.config import TRAINED_FAMILIES, ModelConfig, require_trainable
from fivefold.model.huggingface.families import READERS
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import PUBLISHED, load_preset
from tests.helpers import refusal

EXAMPLE_OF_FAMILY = {
    "llama": "llama-3.1-8b",
    "mistral": "mistral-nemo-12b",
    "mixtral": "mixtral-8x7b",
    "qwen2": "qwen2.5-7b",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "qwen3": "qwen3-0.6b",
    "qwen3_moe": "qwen3-30b-a3b",
    "llama4": "llama-4-scout",
    "gemma2": "gemma-2-9b",
    "gemma3": "gemma-3-27b",
    "gemma3_text": "gemma-3-270m",
    "phi3": "phi-3-mini",
    "gpt2": "gpt2",
    "gpt_neox": "gpt-neox-20b",
    "falcon": "falcon-7b",
    "gpt_oss": "gpt-oss-120b",
    "deepseek_v2": "deepseek-v2-lite",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "glm4_moe": "glm-4.5",
}
SIZES = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
]


def values(family: str, **changes: Any) -> dict[str, Any]:
    """The example of a family with changes; a change to ... takes the key away."""
    content = json.loads((PUBLISHED / f"{EXAMPLE_OF_FAMILY[family]}.json").read_text())
    changed = {**content, **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def refused(family: str, **changes: Any) -> str:
    return refusal(load_config, values(family, **changes))


def untrainable(family: str, **changes: Any) -> str:
    """Why a model that can be planned cannot be trained."""
    config = load_config(values(family, **changes))
    with pytest.raises(UserError) as error:
        require_trainable(config)
    message = str(error.value)
    assert "\n" not in message
    return message


def load(family: str, **changes: Any) -> ModelConfig:
    return load_config(values(family, **changes))


# --- Where it is read from


def test_a_file_its_folder_and_its_content_give_the_same_config(tmp_path: Path) -> None:
    content = values("qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(content))
    from_content = load_config(content)
    assert load_config(tmp_path) == from_content
    assert load_config(str(tmp_path / "config.json")) == from_content
    assert load_config(PUBLISHED / "qwen3-30b-a3b.json") == from_content


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"llama"', "[" * 100_000, "\udcff"])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_config(path)


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*No such file"):
        load_config(tmp_path / "nowhere")


@pytest.mark.parametrize("model_type", ["bert", "", None, 7, ["llama"]])
def test_an_unknown_model_type_is_refused_with_the_known_ones(model_type: Any) -> None:
    message = refused("llama", model_type=model_type)
    assert repr(model_type) in message
    assert all(family in message for family in READERS)


def test_every_example_is_read() -> None:
    paths = sorted(PUBLISHED.glob("*.json"))
    known = [path for path in paths if json.loads(path.read_text())["model_type"] in READERS]
    assert len(known) >= 14
    for path in known:
        assert load_config(path).num_layers > 0


# --- What each family means without saying it


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_embeddings_are_not_tied_when_the_key_is_absent(family: str) -> None:
    assert load(family, tie_word_embeddings=...).tied_embeddings is False
    assert load(family, tie_word_embeddings=True).tied_embeddings is True


@pytest.mark.parametrize(
    ("family", "theta", "eps"),
    [
        ("llama", 1e4, 1e-6),
        ("mistral", 1e4, 1e-6),
        ("mixtral", 1e6, 1e-5),
        ("qwen2", 1e4, 1e-6),
        ("qwen2_moe", 1e4, 1e-6),
        ("qwen3", 1e4, 1e-6),
        ("qwen3_moe", 1e4, 1e-6),
    ],
)
def test_theta_and_epsilon_have_the_defaults_of_their_class(
    family: str, theta: float, eps: float
) -> None:
    config = load(family, rope_theta=..., rope_scaling=..., rms_norm_eps=...)
    assert (config.rope_theta, config.rms_norm_eps, config.rope_scaling) == (theta, eps, None)


@pytest.mark.parametrize(
    ("family", "qkv_bias", "output_bias", "qk_norm"),
    [
        ("llama", False, False, False),
        ("mistral", False, False, False),
        ("mixtral", False, False, False),
        ("qwen2", True, False, False),
        ("qwen2_moe", True, False, False),
        ("qwen3", False, False, True),
        ("qwen3_moe", False, False, True),
    ],
)
def test_biases_and_query_key_norms_follow_the_family(
    family: str, qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> None:
    config = load(family, attention_bias=..., mlp_bias=...)
    assert (config.qkv_bias, config.output_bias) == (qkv_bias, output_bias)
    assert (config.mlp_bias, config.qk_norm) == (False, qk_norm)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_attention_bias_is_of_all_four_projections_where_the_family_has_the_key(
    family: str,
) -> None:
    config = load(family, attention_bias=True)
    assert config.qkv_bias and config.output_bias


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2", "qwen2_moe"])
def test_attention_bias_is_refused_where_the_family_has_no_such_key(family: str) -> None:
    assert load(family, attention_bias=False) == load(family)
    assert "attention_bias = true" in refused(family, attention_bias=True)


def test_mlp_bias_is_a_key_of_llama_alone() -> None:
    assert load("llama", mlp_bias=True).mlp_bias
    assert "mlp_bias = true" in refused("qwen3", mlp_bias=True)


def test_qkv_bias_is_a_key_of_qwen2_moe_alone() -> None:
    assert not load("qwen2_moe", qkv_bias=False).qkv_bias
    assert "qkv_bias" in refused("qwen2", qkv_bias=False)


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_an_explicit_head_dim_wins_over_hidden_size_by_heads(family: str) -> None:
    assert load(family, head_dim=96).head_dim == 96


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_head_dim_is_hidden_size_by_heads_but_128_in_qwen3(family: str) -> None:
    content = values(family, head_dim=...)
    by_rule = content["hidden_size"] // content["num_attention_heads"]
    assert load_config(content).head_dim == (128 if family == "qwen3" else by_rule)
    content["head_dim"] = None
    assert load_config(content).head_dim == (128 if family == "qwen3" else by_rule)


def test_heads_that_do_not_divide_hidden_size_need_a_head_dim() -> None:
    message = refused("llama", hidden_size=4100)
    assert "4100" in message and "32" in message and "head_dim" in message
    assert load("llama", hidden_size=4100, head_dim=128).head_dim == 128


def test_llama_without_key_value_heads_has_one_a_query_head() -> None:
    assert load("llama", num_key_value_heads=...).num_kv_heads == 32


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_null_key_value_heads_are_one_a_query_head(family: str) -> None:
    config = load(family, num_key_value_heads=None)
    assert config.num_kv_heads == config.num_heads


@pytest.mark.parametrize("family", sorted(set(TRAINED_FAMILIES) - {"llama"}))
def test_key_value_heads_are_not_guessed_where_the_class_default_is_one_models_size(
    family: str,
) -> None:
    assert "num_key_value_heads" in refused(family, num_key_value_heads=...)


# --- Mixtures of experts


def test_mixtral_has_its_experts_in_every_layer_and_always_renormalises() -> None:
    moe = load("mixtral").moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.expert_intermediate_size) == (8, 2, 14336)
    assert (moe.shared_intermediate_size, moe.shared_gate) == (0, False)
    assert moe.norm_topk_prob and all(moe.layers) and len(moe.layers) == 32
    assert "norm_topk_prob" in untrainable("mixtral", norm_topk_prob=False)


def test_qwen2_moe_has_a_shared_expert_with_a_sigmoid_gate() -> None:
    moe = load("qwen2_moe").moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.expert_intermediate_size) == (60, 4, 1408)
    assert (moe.shared_intermediate_size, moe.shared_gate) == (5632, True)
    assert not moe.norm_topk_prob


def test_qwen3_moe_has_no_shared_expert() -> None:
    moe = load("qwen3_moe").moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.expert_intermediate_size) == (128, 8, 768)
    assert (moe.shared_intermediate_size, moe.shared_gate) == (0, False)
    assert moe.norm_topk_prob


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_qwen_mixtures_do_not_renormalise_when_the_key_is_absent(family: str) -> None:
    moe = load(family, norm_topk_prob=...).moe
    assert moe is not None and not moe.norm_topk_prob


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_sparse_step_and_dense_layers_say_where_the_mixtures_are(family: str) -> None:
    config = load(family, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [config.is_moe(layer) for layer in range(6)] == [0, 1, 0, 0, 0, 1]
    every = load(family, decoder_sparse_step=..., mlp_only_layers=...)
    assert all(every.is_moe(layer) for layer in range(every.num_layers))


def test_a_model_whose_layers_are_all_dense_has_no_mixture() -> None:
    config = load("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1])
    assert config.moe is None and not config.is_moe(1)


def test_dense_layers_outside_the_model_are_refused() -> None:
    assert "mlp_only_layers" in refused("qwen3_moe", mlp_only_layers=[48])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_number_of_experts_is_read_under_both_of_its_names(family: str) -> None:
    absent = {"num_local_experts": ..., "num_experts": ...}
    for name in absent:
        moe = load(family, **{**absent, name: 16}).moe
        assert moe is not None and moe.num_experts == 16
    assert load(family, num_local_experts=16, num_experts=16).moe is not None
    assert "differ" in refused(family, num_local_experts=16, num_experts=17)


def test_more_experts_a_token_than_experts_are_refused() -> None:
    message = refused("mixtral", num_experts_per_tok=9)
    assert "9" in message and "8" in message
    assert load("mixtral", num_experts_per_tok=8).moe is not None


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mixtral", {}, 0.02 * 2 / 32),
        ("mixtral", {"router_aux_loss_coef": ...}, 0.001 * 2 / 32),
        ("mixtral", {"router_aux_loss_coef": 0}, 0.0),
        ("qwen2_moe", {}, 0.001 * 4 / 24),
        ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2}, 0.001 * 8 / 3),
    ],
)
def test_the_balance_coefficient_is_converted_from_hugging_faces_convention(
    family: str, changes: dict[str, Any], expected: float
) -> None:
    moe = load(family, **changes).moe
    assert moe is not None and moe.aux_loss_coef == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("uniform", [True, False])
def test_the_converted_coefficient_gives_the_loss_hugging_face_would_add(uniform: bool) -> None:
    """Layers that route alike. Uniform routing, 8 experts, top-2: 1.0 here, 2.0 there."""
    moe = load("mixtral", router_aux_loss_coef=0.02, num_hidden_layers=4).moe
    assert moe is not None
    tokens, experts, top_k, num_layers = 64, 8, 2, 4
    logits = np.random.default_rng(0).normal(size=(tokens, experts))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=1)[:, :top_k]
    if uniform:
        probabilities = np.full((tokens, experts), 1 / experts)
        chosen = np.arange(tokens * top_k).reshape(tokens, top_k) % experts
    assignments = np.bincount(chosen.ravel(), minlength=experts)
    mean_probability = probabilities.mean(axis=0)

    one_layer = experts * (assignments / (tokens * top_k)) @ mean_probability
    ours = moe.aux_loss_coef * num_layers * one_layer
    hugging_face_loss = experts * (assignments / tokens) @ mean_probability
    assert ours == pytest.approx(0.02 * hugging_face_loss, rel=1e-12)
    if uniform:
        assert (one_layer, hugging_face_loss) == (pytest.approx(1.0), pytest.approx(2.0))


# --- Sizes are never guessed, and have to be sizes


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_refused_by_name(family: str, key: str) -> None:
    assert key in refused(family, **{key: ...})
    assert key in refused(family, **{key: None})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("mixtral", "num_local_experts"),
        ("mixtral", "num_experts_per_tok"),
        ("qwen2_moe", "num_experts"),
        ("qwen2_moe", "num_experts_per_tok"),
        ("qwen2_moe", "moe_intermediate_size"),
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("qwen3_moe", "num_experts"),
        ("qwen3_moe", "num_experts_per_tok"),
        ("qwen3_moe", "moe_intermediate_size"),
    ],
)
def test_a_missing_size_of_a_mixture_is_refused_by_name(family: str, key: str) -> None:
    assert key in refused(family, **{key: ...})


@pytest.mark.parametrize("value", ["4096", -1, 0, 4096.0, True, [4096]])
@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
def test_a_size_that_is_no_positive_integer_is_refused_with_its_value(key: str, value: Any) -> None:
    message = refused("llama", **{key: value})
    assert key in message and json.dumps(value) in message


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
def test_a_size_beyond_sense_is_refused_with_the_most(key: str) -> None:
    most = 10_000 if key == "num_hidden_layers" else 10_000_000
    assert f"{key} {most + 1:,} is too large: the most is {most:,}" in refused(
        "llama", **{key: most + 1}
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", "no"),
        ("tie_word_embeddings", 1),
        ("attention_bias", "false"),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", float("inf")),
        ("rope_theta", True),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(key: str, value: Any) -> None:
    message = refused("llama", **{key: value})
    assert key in message and json.dumps(value) in message


@pytest.mark.parametrize("value", [-0.1, "0.001", True])
def test_a_balance_coefficient_has_to_be_at_least_zero(value: Any) -> None:
    assert "router_aux_loss_coef" in refused("mixtral", router_aux_loss_coef=value)


@pytest.mark.parametrize("value", ["0", [0.5], [-1], [True], {"0": 1}])
def test_dense_layers_have_to_be_a_list_of_layers(value: Any) -> None:
    assert "mlp_only_layers" in refused("qwen3_moe", mlp_only_layers=value)


def test_query_heads_that_key_value_heads_do_not_divide_are_refused_with_the_nearest() -> None:
    message = refused("llama", num_key_value_heads=7)
    assert "32" in message and "7" in message and "8 key/value heads" in message


def test_an_odd_head_dim_is_refused() -> None:
    assert "head_dim 127" in refused("qwen3", head_dim=127)


def test_a_config_made_by_hand_is_held_to_the_same_rules() -> None:
    config = load("qwen3_moe")
    with pytest.raises(UserError, match="num_attention_heads 32"):
        replace(config, num_kv_heads=3)
    with pytest.raises(UserError, match="48 layers"):
        replace(config, num_layers=47)


def test_a_config_can_be_the_key_of_a_cache() -> None:
    assert hash(load("llama")) == hash(load("llama"))
    assert load("llama") != load("llama", rope_scaling=None)


# --- Keys that would change the mathematics


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_cross_attention", True),
        ("logit_scale", 0.0625),
        ("num_nextn_predict_layers", 1),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_what_might_change_the_weights_is_refused_by_name(
    family: str, key: str, value: Any
) -> None:
    assert key in refused(family, **{key: value})


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("hidden_dropout", 0.1),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_changes_no_size_is_planned_but_not_trained(family: str, key: str, value: Any) -> None:
    assert key in untrainable(family, **{key: value})


def test_all_that_cannot_be_trained_is_named_in_one_sentence() -> None:
    message = untrainable("llama", hidden_act="gelu", attention_dropout=0.1)
    assert "hidden_act" in message and "attention_dropout = 0.1" in message
    require_trainable(load("llama"))


@pytest.mark.parametrize("family", sorted(set(EXAMPLE_OF_FAMILY) - set(TRAINED_FAMILIES)))
def test_a_family_without_torch_modules_is_planned_but_not_trained(family: str) -> None:
    message = untrainable(family)
    assert family in message and "qwen3_moe" in message


@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_what_changes_nothing_is_ignored(family: str) -> None:
    harmless = {
        "architectures": ["SomeForCausalLM"],
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "use_cache": True,
        "initializer_range": 0.02,
        "transformers_version": "4.40.0",
        "hidden_act": "swish",
        "attention_dropout": 0.0,
        "quantization_config": None,
        "layer_types": ["full_attention"] * load(family).num_layers,
    }
    assert load(family, **harmless) == load(family)


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_a_window_shorter_than_the_longest_sequence_is_not_trained(family: str) -> None:
    binding = {"sliding_window": 4096, "max_position_embeddings": 32768}
    message = untrainable(family, **binding)
    assert "sliding_window 4096" in message and "32768" in message
    config = load(family, **binding)
    assert config.windows == (4096,) * config.num_layers
    assert load(family, sliding_window=4096, max_position_embeddings=4096).windows is None
    assert load(family, sliding_window=None).windows is None


def test_mistral_without_the_key_has_the_window_of_its_class() -> None:
    assert "sliding_window 4096" in untrainable("mistral", sliding_window=...)
    assert load("mixtral", sliding_window=...) == load("mixtral")


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_a_qwen_window_counts_only_when_it_is_used(family: str) -> None:
    assert load(family, sliding_window=128, use_sliding_window=False) == load(family)
    assert load(family, sliding_window=128, use_sliding_window=...) == load(family)
    assert load(family, sliding_window=None, use_sliding_window=True) == load(family)
    used = {"use_sliding_window": True, "max_window_layers": 1}
    assert "sliding_window 128" in untrainable(family, sliding_window=128, **used)
    assert "sliding_window 4096" in untrainable(family, sliding_window=..., **used)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2", (0, 0, 64, 64)),
        ("qwen3", (0, 0, 64, 64)),
        ("qwen2_moe", (64, 0, 0, 0)),
        ("qwen3_moe", (64, 64, 64, 64)),
    ],
)
def test_the_layers_with_a_qwen_window_follow_the_class(
    family: str, expected: tuple[int, ...]
) -> None:
    changes = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}
    config = load(family, sliding_window=64, **changes)
    assert config.windows == expected
    assert [kind.window for kind in config.layer_kinds] == list(expected)


@pytest.mark.parametrize(
    ("family", "positions"), [("mistral", 131072), ("mixtral", 131072), ("qwen3", 32768)]
)
def test_without_a_longest_sequence_the_window_is_held_against_the_classs(
    family: str, positions: int
) -> None:
    absent: dict[str, Any] = {"max_position_embeddings": ...}
    if family == "qwen3":
        absent |= {"use_sliding_window": True, "max_window_layers": 0}
    assert load(family, sliding_window=positions, **absent) == load(family)
    assert str(positions) in untrainable(family, sliding_window=positions - 1, **absent)


def test_layer_types_say_which_layers_have_the_window() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    config = load("mixtral", layer_types=types, sliding_window=1024)
    assert config.windows == (0, 1024) * 16
    assert "layer_types" in refused("mixtral", layer_types=types[1:], sliding_window=1024)
    assert "layer_types" in refused("llama", layer_types=types)


# --- The families that are planned only (field cases 34, 35, 37, 38 and 40)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("gemma2", True),
        ("gpt2", True),
        ("falcon", True),
        ("gemma3_text", True),
        ("gemma3", True),
        ("llama4", False),
        ("gpt_oss", False),
        ("deepseek_v3", False),
        ("gpt_neox", False),
        ("phi3", False),
    ],
)
def test_an_absent_key_ties_the_head_as_the_familys_class_does(family: str, tied: bool) -> None:
    assert load(family, tie_word_embeddings=...).tied_embeddings is tied
    assert load(family, tie_word_embeddings=not tied).tied_embeddings is not tied


def test_mla_reads_null_as_no_compression_and_an_absent_rank_as_an_error() -> None:
    config = load("deepseek_v2")
    assert config.mla is not None and config.mla.q_lora_rank is None
    assert "q_lora_rank" in refused("deepseek_v2", q_lora_rank=...)
    assert (config.qk_head_dim, config.v_head_dim) == (192, 128)


@pytest.mark.parametrize("kv_heads", [1, 3, 16, ...])
def test_key_value_heads_say_nothing_with_mla(kv_heads: Any) -> None:
    assert load("deepseek_v2", num_key_value_heads=kv_heads) == load("deepseek_v2")
    assert load("deepseek_v2").num_kv_heads == 16


MLA_SIZES = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
DEEPSEEK_SIZES = ["n_routed_experts", "n_shared_experts", "num_experts_per_tok"]
DEEPSEEK_SIZES += ["moe_intermediate_size", "first_k_dense_replace"]


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("deepseek_v3", key) for key in [*SIZES, *MLA_SIZES, *DEEPSEEK_SIZES, "q_lora_rank"]),
        *(("glm4_moe", key) for key in [*SIZES, *DEEPSEEK_SIZES, "num_key_value_heads"]),
        *(("gpt_oss", key) for key in [*SIZES, "num_local_experts", "num_experts_per_tok"]),
        *(("gpt_oss", key) for key in ["sliding_window", "num_key_value_heads"]),
        *(("gemma2", key) for key in [*SIZES, "head_dim", "num_key_value_heads"]),
        *(("gemma3_text", key) for key in ["head_dim", "sliding_window"]),
        *(("phi3", key) for key in SIZES),
        *(("gpt2", key) for key in ["n_embd", "n_layer", "n_head", "vocab_size", "n_positions"]),
        *(("gpt_neox", key) for key in SIZES),
        *(("falcon", key) for key in ["hidden_size", "num_hidden_layers", "vocab_size"]),
        ("falcon", "num_attention_heads"),
    ],
)
def test_a_missing_size_of_a_planned_family_is_refused_by_name(family: str, key: str) -> None:
    assert key in refused(family, **{key: ...})


@pytest.mark.parametrize(
    "key",
    [*SIZES, "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"]
    + ["attention_chunk_size"],
)
def test_a_missing_size_of_a_nested_text_model_is_refused_by_name(key: str) -> None:
    text = {**values("llama4")["text_config"]}
    del text[key]
    assert f"text_config.{key}" in refused("llama4", text_config=text)


def test_a_nested_text_model_is_read_and_the_vision_tower_noted() -> None:
    scout, gemma = load("llama4"), load("gemma3")
    assert (scout.hidden_size, scout.num_layers) == (5120, 48)
    assert "871,932,416" in scout.notes[0] and "not included" in scout.notes[0]
    assert "423,060,336" in gemma.notes[0]
    assert load("llama4", vision_config={"hidden_size": 1408}) == scout
    assert "text_config" in refused("llama4", text_config=...)
    text = values("gemma3")["text_config"]
    assert load_config({**text}).notes == ()
    assert "text_config.moe_width" in refused("gemma3", text_config={**text, "moe_width": 7})


def test_an_unknown_key_of_a_planned_family_is_refused_by_name() -> None:
    for family in sorted(set(EXAMPLE_OF_FAMILY) - set(TRAINED_FAMILIES)):
        assert "some_width" in refused(family, some_width=7)


def test_llama4_has_chunks_in_three_layers_of_four_and_a_shared_expert_in_each_mixture() -> None:
    config = load_preset("llama-4-maverick")
    assert config.windows is not None and config.moe is not None
    assert config.windows[:8] == (8192, 8192, 8192, 0) * 2
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, False, True]
    assert (config.intermediate_size, config.moe.shared_intermediate_size) == (16384, 8192)
    text = {**values("llama4")["text_config"], "no_rope_layers": [1, 0] * 24}
    assert load("llama4", text_config=text).windows == (8192, 0) * 24
    text["attention_chunk_size"] = None
    assert load("llama4", text_config=text).windows is None


def test_gemma_windows_alternate_or_leave_out_every_sixth_layer() -> None:
    assert load("gemma2").windows == (4096, 0) * 21
    windows = load("gemma3_text").windows
    assert windows is not None and windows[:7] == (512, 512, 512, 512, 512, 0, 512)
    types = ["full_attention"] + ["sliding_attention"] * 17
    named = load("gemma3_text", layer_types=types, sliding_window_pattern=...)
    assert named.windows == (0,) + (512,) * 17


def test_gemma_takes_the_new_style_of_rope_parameters_for_each_kind_of_layer() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    changes = {"rope_theta": ..., "rope_local_base_freq": ...}
    assert load("gemma3_text", rope_parameters=rope, **changes).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "kv_heads", "norms"),
    [
        ({}, 1, 1),
        ({"multi_query": False}, 71, 1),
        ({"parallel_attn": False}, 1, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 71}, 71, 2),
        ({"new_decoder_architecture": True}, 71, 2),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 71, 1),
    ],
)
def test_falcon_has_its_heads_and_norms_by_rule(
    changes: dict[str, Any], kv_heads: int, norms: int
) -> None:
    config = load("falcon", **changes)
    assert (config.num_kv_heads, config.norms_per_layer) == (kv_heads, norms)


def test_dropout_is_noted_and_gpt2_has_it_without_the_keys() -> None:
    absent = {"attn_pdrop": ..., "embd_pdrop": ..., "resid_pdrop": ...}
    assert load("gpt2", **absent).dropout
    assert not load("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).dropout
    assert not load("llama").dropout and load("llama", attention_dropout=0.1).dropout


# --- Whatever stands in the file

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_of_any_key_is_read_or_refused_in_one_sentence(data: st.DataObject) -> None:
    content = values(data.draw(st.sampled_from(sorted(EXAMPLE_OF_FAMILY))))
    key = data.draw(st.sampled_from(sorted(content)) | st.text(max_size=8))
    # A number of layers in the millions would be read, but not in the time of a test.
    content[key] = data.draw(JSON.filter(lambda value: not (type(value) is int and value > 999)))
    try:
        load_config(content)
    except UserError as error:
        assert "\n" not in str(error)
