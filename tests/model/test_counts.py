"""Counts are equal, to the unit, to the public totals of the models' published weights.

data/counts.csv: `total` is the number of weights in the published safetensors files (Hugging Face
hub; llama-2-70b without its stored rotary buffers, mixtral-8x22b with its base model's
vocabulary); the other columns follow from it by the conventions of fivefold.model.counts.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.model.config import ModelConfig, MoEConfig, load_config
from fivefold.model.counts import (
    count_parameters,
    flops_per_token,
    head_flops_per_token,
    layer_flops_per_token,
    layer_parameters,
    parameter_shapes,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
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
    return load_config(EXAMPLES / f"{name}.json")


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_counts_and_flops_equal_the_published_numbers(row: dict[str, str]) -> None:
    config = example(row["model"])
    counts = count_parameters(config)
    counted = {
        "total": counts.total,
        "active": counts.active,
        "active_matmul": counts.active_matmul,
        "embedding": counts.embedding,
        "head": counts.head,
        "routed_experts": counts.routed_experts,
        "flops_4096": flops_per_token(config, 4096, causal=False),
        "flops_8192": flops_per_token(config, 8192, causal=False),
    }
    assert counted == {name: int(row[name]) for name in counted}


def test_all_published_models_of_the_families_are_in_the_table() -> None:
    assert len(PUBLISHED) == 14


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
    assert flops_per_token(example("llama-3.1-8b"), 8192, causal=True) == 51_471_998_976


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
    assert counts.final_norm == 2048


def test_the_names_are_those_of_hugging_face_with_stacked_experts() -> None:
    shapes = parameter_shapes(load_config(EXAMPLES / "qwen1.5-moe-a2.7b.json"))
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
        )
    return ModelConfig(
        family="llama",
        vocab_size=draw(SIZE),
        hidden_size=draw(SIZE),
        intermediate_size=draw(SIZE),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
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
    for layer in range(config.num_layers):
        in_layer = sum(size for name, size in sizes.items() if f".layers.{layer}." in name)
        assert layer_parameters(config, layer).total == in_layer


@settings(max_examples=100, deadline=None)
@given(configs(), st.integers(1, 100), FLAG)
def test_flops_are_six_a_matmul_weight_plus_attention_and_add_up_layer_by_layer(
    config: ModelConfig, sequence_length: int, causal: bool
) -> None:
    keys = sequence_length / 2 if causal else sequence_length
    attention = config.num_layers * 6 * config.num_heads * 2 * config.head_dim * keys
    flops = flops_per_token(config, sequence_length, causal)
    assert flops == 6 * count_parameters(config).active_matmul + attention
    assert flops == head_flops_per_token(config) + sum(
        layer_flops_per_token(config, layer, sequence_length, causal)
        for layer in range(config.num_layers)
    )


def test_counting_does_not_import_torch() -> None:
    code = "import sys, fivefold.model.counts, fivefold.model.rope; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert ran.stdout.strip() == "False"
