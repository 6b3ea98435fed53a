"""Counts are equal, to the unit, to the public totals of the models' published weights.

data/counts.csv: `total` is the number of weights in the published safetensors files (Hugging Face
hub; without stored rotary buffers, vision towers, fp8 scales and second copies of a tied head,
mixtral-8x22b with its base model's vocabulary); the other columns follow from it by the
conventions of fivefold.model.counts, FLOPs without windows but for gpt-oss-120b.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.model.config import MLAConfig, ModelConfig, MoEConfig
from fivefold.model.counts import (
    count_parameters,
    flops_per_token,
    head_flops_per_token,
    layer_flops_per_token,
    layer_parameters,
    parameter_shapes,
)
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import PUBLISHED as PUBLISHED_CONFIGS
from fivefold.model.huggingface.presets import load_preset

with open(Path(__file__).parent / "data" / "counts.csv", newline="") as file:
    PUBLISHED = list(csv.DictReader(file))

TINY_D = load_config(
    {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
)
TINY_M = load_config(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
)


def example(name: str) -> ModelConfig:
    return load_preset(name)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_counts_and_flops_equal_the_published_numbers(row: dict[str, str]) -> None:
    config = example(row["model"])
    counts = count_parameters(config)
    unwindowed = config if row["model"] == "gpt-oss-120b" else replace(config, windows=None)
    counted = {
        "total": counts.total,
        "active": counts.active,
        "active_matmul": counts.active_matmul,
        "embedding": counts.embedding,
        "head": counts.head,
        "routed_experts": counts.routed_experts,
        "mixtures": sum(config.moe.layers) if config.moe else 0,
        "mtp": count_parameters(config, mtp=True).mtp,
        "flops_4096": flops_per_token(unwindowed, 4096, causal=False),
        "flops_8192": flops_per_token(unwindowed, 8192, causal=False),
    }
    assert counted == {name: int(row[name]) for name in counted}


def test_all_published_models_of_the_families_are_in_the_table() -> None:
    assert len(PUBLISHED) == 31


def test_the_tiny_models_have_their_known_counts() -> None:
    assert count_parameters(TINY_D).total == 386_112
    assert flops_per_token(TINY_D, 64, causal=False) == 2_660_736
    counts = count_parameters(TINY_M)
    assert (counts.total, counts.active, counts.active_matmul) == (264_832, 117_376, 109_184)


def test_the_fused_projections_of_qwen3_32b_have_heads_of_their_own_width() -> None:
    shapes = parameter_shapes(example("qwen3-32b"))
    rows = [shapes[f"model.layers.0.self_attn.{name}_proj.weight"][0] for name in "qkv"]
    assert sum(rows) == 10_240


def test_flops_of_qwen3_30b_count_active_weights_and_say_whether_causal() -> None:
    config = example("qwen3-30b-a3b")
    assert flops_per_token(config, 8192, causal=False) == 37_578_559_488
    assert flops_per_token(config, 8192, causal=True) == 27_914_883_072


def test_flops_of_llama_8b_causal() -> None:
    config = example("llama-3.1-8b")
    assert flops_per_token(config, 8192, causal=False) == 57_914_449_920
    assert flops_per_token(config, 8192, causal=True) == 51_471_998_976


def test_windows_bound_the_keys_of_their_layers() -> None:
    config = example("gpt-oss-120b")
    assert flops_per_token(config, 8192, causal=False) == 38_158_100_352
    assert flops_per_token(replace(config, windows=None), 8192, causal=False) == 45_292_611_456
    gemma = example("gemma-2-9b")  # 21 of its layers see 4096 keys, 16 heads of 256
    full = flops_per_token(replace(gemma, windows=None), 8192, causal=False)
    assert full - flops_per_token(gemma, 8192, causal=False) == 21 * 6 * 16 * 512 * 4096


def test_mtp_is_counted_only_when_asked_for_and_once_without_copies() -> None:
    """Stored files: DeepSeek-R1's with copies of embedding and head, GLM-4.6's without."""
    for name, stored, copies in [
        ("deepseek-v3", 684_489_845_504, 1),
        ("glm-4.5-air", 110_468_824_832, 1),
        ("glm-4.5", 358_337_791_296, 1),
        ("glm-4.5", 356_785_898_816, 0),
    ]:
        config = example(name)
        without, counts = count_parameters(config), count_parameters(config, mtp=True)
        assert counts.total == without.total + counts.mtp and without.mtp == 0
        assert counts.total + copies * (counts.embedding + counts.head) == stored
        assert counts.active > without.active


def test_an_mtp_module_runs_a_layer_its_projection_and_the_head() -> None:
    config = example("deepseek-v3")
    more = flops_per_token(config, 4096, False, mtp=True) - flops_per_token(config, 4096, False)
    layer = layer_flops_per_token(config, config.layer_kinds[-1], 4096, False)
    assert more == layer + 6 * (2 * 7168**2 + 3 * 7168 + 129_280 * 7168)


@pytest.mark.parametrize(
    ("name", "changes", "total"),
    [
        ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
        ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, 354_823_168),
        (
            "gemma-2-9b",
            {
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
            2_614_341_888,
        ),
        (
            "gemma-3-270m",
            {
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "num_hidden_layers": 26,
            },
            999_885_952,
        ),
        ("gpt-oss-120b", {"num_local_experts": 32, "num_hidden_layers": 24}, 20_914_757_184),
        (
            "deepseek-v2-lite",
            {
                "hidden_size": 5120,
                "intermediate_size": 12288,
                "moe_intermediate_size": 1536,
                "num_hidden_layers": 60,
                "num_attention_heads": 128,
                "q_lora_rank": 1536,
                "n_routed_experts": 160,
            },
            235_741_434_880,
        ),
        (
            "phi-3-mini",
            {
                "hidden_size": 5120,
                "intermediate_size": 17920,
                "num_hidden_layers": 40,
                "num_attention_heads": 40,
                "num_key_value_heads": 10,
            },
            13_960_238_080,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_sizes_of_a_family_have_their_published_totals(
    name: str, changes: dict[str, int | None], total: int
) -> None:
    """gpt2-xl and -medium, gemma-2-2b, gemma-3-1b, gpt-oss-20b, DeepSeek-V2, Phi-3-medium."""
    values = json.loads((PUBLISHED_CONFIGS / f"{name}.json").read_text())
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: changes["num_hidden_layers"]]
    assert count_parameters(load_config({**values, **changes})).total == total


def test_a_wrong_reading_of_mla_or_of_an_expert_would_show() -> None:
    lite = example("deepseek-v2-lite")
    assert lite.mla is not None
    compressed = replace(lite, mla=replace(lite.mla, q_lora_rank=1536))
    assert count_parameters(compressed).total == 15_748_993_024
    qwen = example("qwen3-30b-a3b")
    assert qwen.moe is not None
    dense_width = replace(qwen.moe, expert_intermediate_size=qwen.intermediate_size)
    assert count_parameters(replace(qwen, moe=dense_width)).total == 233_469_327_360
    gemma = example("gemma-2-9b")
    assert count_parameters(replace(gemma, tied_embeddings=False)).total == 10_159_209_984


def test_tying_the_head_saves_weights_but_no_flops() -> None:
    tied = example("qwen3-0.6b")
    untied = replace(tied, tied_embeddings=False)
    assert count_parameters(untied).total == 751_632_384
    assert flops_per_token(untied, 8192, False) == flops_per_token(tied, 8192, False)
    assert flops_per_token(tied, 8192, False) == 9_213_444_096


def test_the_parts_of_one_layer_are_what_the_shapes_say() -> None:
    counts = count_parameters(example("qwen1.5-moe-a2.7b"))
    assert counts.attention == 4 * 2048 * 2048 + 3 * 2048
    assert counts.norms == 2 * 2048
    assert counts.dense_mlp == 0
    assert counts.router == 60 * 2048
    assert counts.one_expert == 3 * 2048 * 1408
    assert counts.shared_expert == 3 * 2048 * 5632 + 2048


def test_the_names_are_those_of_hugging_face_with_stacked_experts() -> None:
    shapes = parameter_shapes(example("qwen1.5-moe-a2.7b"))
    layer = {
        name.removeprefix("model.layers.23."): shape
        for name, shape in shapes.items()
        if name.startswith("model.layers.23.")
    }
    assert layer == {
        "input_layernorm.weight": (2048,),
        "self_attn.q_proj.weight": (2048, 2048),
        "self_attn.q_proj.bias": (2048,),
        "self_attn.k_proj.weight": (2048, 2048),
        "self_attn.k_proj.bias": (2048,),
        "self_attn.v_proj.weight": (2048, 2048),
        "self_attn.v_proj.bias": (2048,),
        "self_attn.o_proj.weight": (2048, 2048),
        "post_attention_layernorm.weight": (2048,),
        "mlp.gate.weight": (60, 2048),
        "mlp.experts.gate_proj": (60, 1408, 2048),
        "mlp.experts.up_proj": (60, 1408, 2048),
        "mlp.experts.down_proj": (60, 2048, 1408),
        "mlp.shared_expert.gate_proj.weight": (5632, 2048),
        "mlp.shared_expert.up_proj.weight": (5632, 2048),
        "mlp.shared_expert.down_proj.weight": (2048, 5632),
        "mlp.shared_expert_gate.weight": (1, 2048),
    }
    outside = [name for name in shapes if not name.startswith("model.layers.")]
    assert outside == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def test_a_dense_layer_with_every_bias_and_a_tied_head_has_these_names() -> None:
    config = replace(
        TINY_D,
        num_layers=1,
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
    )
    assert parameter_shapes(config) == {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.self_attn.k_proj.weight": (32, 64),
        "model.layers.0.self_attn.k_proj.bias": (32,),
        "model.layers.0.self_attn.v_proj.weight": (32, 64),
        "model.layers.0.self_attn.v_proj.bias": (32,),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.self_attn.o_proj.bias": (64,),
        "model.layers.0.self_attn.q_norm.weight": (8,),
        "model.layers.0.self_attn.k_norm.weight": (8,),
        "model.layers.0.post_attention_layernorm.weight": (64,),
        "model.layers.0.mlp.gate_proj.weight": (176, 64),
        "model.layers.0.mlp.gate_proj.bias": (176,),
        "model.layers.0.mlp.up_proj.weight": (176, 64),
        "model.layers.0.mlp.up_proj.bias": (176,),
        "model.layers.0.mlp.down_proj.weight": (64, 176),
        "model.layers.0.mlp.down_proj.bias": (64,),
        "model.norm.weight": (64,),
    }


SIZE = st.integers(1, 40)
FLAG = st.booleans()


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_layers = draw(st.integers(1, 5))
    num_kv_heads = draw(st.integers(1, 4))
    moe = None
    if draw(FLAG):
        shared = draw(st.integers(0, 20))
        num_experts = draw(st.integers(1, 9))
        moe = MoEConfig(
            num_experts=num_experts,
            experts_per_token=draw(st.integers(1, num_experts)),
            expert_intermediate_size=draw(SIZE),
            shared_intermediate_size=shared,
            shared_gate=shared > 0 and draw(FLAG),
            norm_topk_prob=True,
            aux_loss_coef=0.0,
            layers=tuple(draw(st.lists(FLAG, min_size=num_layers, max_size=num_layers))),
            router_bias=draw(FLAG),
            expert_bias=draw(FLAG),
        )
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    mla = draw(st.none() | st.builds(MLAConfig, st.none() | SIZE, SIZE, SIZE, SIZE, SIZE))
    return ModelConfig(
        family="llama",
        vocab_size=draw(SIZE),
        hidden_size=draw(SIZE),
        intermediate_size=draw(SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if mla is None else num_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        tied_embeddings=draw(FLAG),
        qkv_bias=draw(FLAG),
        output_bias=draw(FLAG),
        mlp_bias=draw(FLAG),
        qk_norm=draw(FLAG),
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        moe=moe,
        mla=mla,
        windows=draw(st.none() | st.tuples(*[st.integers(0, 60)] * num_layers)),
        gated_mlp=draw(FLAG),
        norm_kind=draw(st.sampled_from(["rms", "layer"])),
        norms_per_layer=draw(st.sampled_from([1, 2, 4])),
        learned_positions=draw(st.integers(0, 50)),
        attention_sinks=draw(FLAG),
        mtp_layers=draw(st.integers(0, 2)),
    )


@settings(max_examples=200, deadline=None)
@given(configs())
def test_the_counts_are_the_sums_of_the_shapes(config: ModelConfig) -> None:
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    counts = count_parameters(config)
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    assert counts.total == sum(sizes.values())
    assert counts.routed_experts == routed
    share = config.moe.experts_per_token / config.moe.num_experts if config.moe else 0
    assert counts.active == pytest.approx(counts.total - routed + routed * share, rel=1e-12)
    for layer, kind in enumerate(config.layer_kinds):
        in_layer = sum(size for name, size in sizes.items() if f".layers.{layer}." in name)
        assert layer_parameters(config, kind).total == in_layer


@settings(max_examples=100, deadline=None)
@given(configs(), st.integers(1, 100), FLAG)
def test_flops_are_six_a_matmul_weight_plus_attention_and_add_up_layer_by_layer(
    config: ModelConfig, sequence_length: int, causal: bool
) -> None:
    keys = [min(sequence_length, kind.window or sequence_length) for kind in config.layer_kinds]
    head = config.head_dim + (config.mla.v_head_dim if config.mla else config.head_dim)
    attention = 6 * config.num_heads * head * sum(keys) / (2 if causal else 1)
    flops = flops_per_token(config, sequence_length, causal)
    assert flops == 6 * count_parameters(config).active_matmul + attention
    assert flops == head_flops_per_token(config) + sum(
        layer_flops_per_token(config, kind, sequence_length, causal) for kind in config.layer_kinds
    )


def test_counting_does_not_import_torch() -> None:
    code = "import sys, fivefold.model.huggingface.presets; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert ran.stdout.strip() == "False"
