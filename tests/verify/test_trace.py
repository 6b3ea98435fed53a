"""A trace sends what the plan says to the byte, and takes what it says."""

from __future__ import annotations

import json
import random
import resource
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fivefold.cli import main
from fivefold.errors import UserError
from fivefold.layout import legality
from fivefold.layout.notation import Layout, parse
from fivefold.layout.ranks import groups
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import load_preset
from fivefold.model.parameters import local_tensor
from fivefold.verify.trace import (
    ShapeTrainer,
    fake_world,
    fsdp_without_values,
    parts_in_pipeline,
    trace_report,
)
from tests.parallel.dry import dry_trainer, tiny_dense, tiny_mixture, tiny_shared
from tests.parity.harness import assert_parity, tiny

V3_SIZES = "examples/models/deepseek-v3-sizes.json"


def assert_as_planned(report: dict) -> None:
    for rank in report["ranks"]:
        assert rank["ledger_agrees"], f"{report['layout']}: {rank['ledger']}"
        assert rank["memory_agrees"], f"{report['layout']}: {rank['memory']}, {rank['moment']}"


TARGETS = {
    "Llama-3.1-405B on 16,384": ("llama-3.1-405b", "tp8 sp pp16 dp128 zero1 ga16", 8192),
    "at a context of 131,072": ("llama-3.1-405b", "tp8 sp pp16 ring16 dp8 zero1 ga16", 131_072),
    "DeepSeek-V3's sizes on 2,048": (V3_SIZES, "pp16 dp128 ep64 zero1 ga120 recompute=full", 4096),
    "Llama-3.1-70B, FSDP on 512": ("llama-3.1-70b", "dp512 zero3 ga2", 8192),
}


def target(name: str) -> tuple[ModelConfig, Layout, int]:
    model, text, length = TARGETS[name]
    config = load_config(model) if model.endswith(".json") else load_preset(model)
    return config, parse(text), length


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("Llama-3.1-405B on 16,384", 0),
        ("Llama-3.1-70B, FSDP on 512", None),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in TARGETS),
    ],
)
def test_frontier_layouts_are_as_planned_in_a_minute_a_rank(name: str, rank: int | None) -> None:
    """One rank, or one of each kind of stage."""
    config, layout, length = target(name)
    started = time.process_time()
    report = trace_report(config, layout, length, "bf16", rank)
    assert_as_planned(report)
    assert (time.process_time() - started) / len(report["ranks"]) < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 8e9


# Drawn layouts

WIDE = {"hidden_size": 192, "intermediate_size": 384, "head_dim": 16, "vocab_size": 1001}
EXPERTS = {"moe_intermediate_size": 192}
MODELS = {
    "dense": tiny_dense(**WIDE),
    "tied": tiny_dense(**WIDE, tie_word_embeddings=True),
    "two kv heads": tiny_dense(**WIDE, num_key_value_heads=2),
    "mixture": tiny_mixture(**WIDE, **EXPERTS),
    "shared expert": tiny_shared(**WIDE, **EXPERTS, shared_expert_intermediate_size=384),
}


SCHEDULES = (
    ("1f1b", 1),
    ("1f1b", 2),
    ("gpipe", 1),
    ("bfs", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
)
"""With the stages of a rank, on two ranks; the models have four layers."""


@st.composite
def traced_layouts(draw: st.DrawFn, largest_world: int) -> tuple[str, Layout, int, str]:
    """A model, a legal layout for it, a sequence length and a precision."""
    name = draw(st.sampled_from(sorted(MODELS)))
    moe = MODELS[name].moe is not None
    length = draw(st.sampled_from((384, 1536)))
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    tp, pp = pick(1, 1, 2, 3, 4), pick(1, 1, 2, 4)
    schedule, vpp = pick(*SCHEDULES) if pp == 2 else (pick("1f1b", "1f1b", "gpipe", "zb-h1"), 1)
    recompute = pick("none", "none", "selective", "full")
    layout = Layout(
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        pp=pp,
        vpp=vpp,
        dp=pick(1, 2, 3, 4, 6, 16),
        dp_replicate=pick(1, 1, 2),
        zero=pick(0, 0, 1, 2, 3),
        ep=pick(1, 2, 3, 4) if moe else 1,
        etp=pick(1, tp) if moe else 1,
        ulysses=pick(1, 1, 2, 3),
        ring=pick(1, 1, 2, 3),
        micro_batch=pick(1, 2),
        accumulation=pick(1, 2, 3, 4, 8),
        recompute=recompute,
        recompute_layers=pick(0, 0, 1, 3) if recompute == "full" else 0,
        schedule=schedule if pp > 1 else "1f1b",
    )
    assume(layout.world_size <= largest_world)
    assume(not legality.violations(layout, MODELS[name], length))
    return name, layout, length, pick("bf16", "bf16", "fp32")


COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}


@given(traced_layouts(largest_world=64))
@settings(max_examples=6, **COMMON)
def test_any_legal_layout_is_as_planned(drawn: tuple[str, Layout, int, str]) -> None:
    name, layout, length, precision = drawn
    assert_as_planned(trace_report(MODELS[name], layout, length, precision, None))


@pytest.mark.parametrize(
    ("name", "text", "precision"),
    [
        ("dense", "dp3 zero1 mb2 ga3 recompute=full", "fp32"),
        ("dense", "pp2 zero3 ring2", "bf16"),
        ("dense", "tp4 pp4 dp16 zero1 mb2 ga2 schedule=zb-h1", "fp32"),
        ("tied", "tp2 sp pp4 zero1 ulysses2 ring2 ga2 recompute=selective schedule=zb-h1", "bf16"),
        ("mixture", "tp4 sp pp2 dp3 zero1 ep2 ga4 schedule=gpipe", "fp32"),
        ("mixture", "pp4 zero3 ep3 ulysses2 ring3 ga3 schedule=zb-h1", "fp32"),
        ("shared expert", "pp2 vpp2 dp4 zero3 ep3 ring3 mb2 schedule=zb-v", "bf16"),
        ("shared expert", "tp2 sp pp4 dp3 ep3 etp2 mb2 ga2 schedule=zb-h1", "fp32"),
        ("shared expert", "pp2 dp3 zero1 ring3 mb2 recompute=full schedule=zb-h1", "bf16"),
    ],
)
def test_layouts_that_an_account_was_once_wrong_about_are_as_planned(
    name: str, text: str, precision: str
) -> None:
    assert_as_planned(trace_report(MODELS[name], parse(text), 384, precision, None))


@pytest.mark.slow
@given(traced_layouts(largest_world=4096))
@settings(max_examples=50, **COMMON)
def test_many_legal_layouts_are_as_planned(drawn: tuple[str, Layout, int, str]) -> None:
    name, layout, length, precision = drawn
    assert_as_planned(trace_report(MODELS[name], layout, length, precision, None))


# Real sizes


def shortened(preset: str, layers: int) -> ModelConfig:
    """A published model with fewer layers: what is beside them then counts for more."""
    config = load_preset(preset)
    moe = config.moe and replace(config.moe, layers=config.moe.layers[:layers])
    return replace(config, num_layers=layers, moe=moe)


@pytest.mark.parametrize(
    ("preset", "layers", "text", "length", "precision"),
    [
        # FSDP2 frees the root's weights before it reduces their gradients.
        ("llama-3.1-8b", 8, "dp16 zero3 ulysses2 ring4 mb2 recompute=full", 4096, "fp32"),
        # The two gradients of a tied embedding are added in a third tensor.
        ("llama-3.2-1b", 8, "dp8 zero1 ulysses4 ga3 recompute=selective", 2048, "fp32"),
        # The last gradient of a unit outlives the others: here, the embedding's.
        ("llama-3.2-1b", 4, "pp2 dp2 dp_replicate2 zero3 ring2 ga2 recompute=full", 8192, "bf16"),
        # The gradients of one chunk are summed over the replicas, then those of the other.
        ("llama-3.1-70b", 8, "tp8 sp pp2 vpp2 dp4 dp_replicate2 zero3 schedule=bfs", 2048, "bf16"),
        # Experts that run again are gathered once more for their backward pass.
        ("qwen3-30b-a3b", 4, "tp4 sp dp4 zero3 ulysses4 mb2 recompute=full", 4096, "bf16"),
    ],
)
def test_real_sizes_are_as_planned(
    preset: str, layers: int, text: str, length: int, precision: str
) -> None:
    config = shortened(preset, layers)
    assert_as_planned(trace_report(config, parse(text), length, precision, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "text", "length"),
    [
        ("llama-3.1-8b", "dp16 zero3 ulysses4 ring2 mb2 ga4 recompute=full", 8192),
        ("qwen3-30b-a3b", "tp4 sp dp4 zero3 ulysses4 mb2 recompute=full", 4096),
    ],
)
def test_whole_models_are_as_planned(preset: str, text: str, length: int) -> None:
    assert_as_planned(trace_report(load_preset(preset), parse(text), length, "bf16", None))


PUBLISHED = (
    ("llama-3.2-1b", 8),
    ("llama-3.1-8b", 8),
    ("llama-3.1-70b", 8),
    ("qwen3-30b-a3b", 6),
    ("mixtral-8x7b", 4),
    ("qwen1.5-moe-a2.7b", 6),
)


def drawn_published(draw: random.Random) -> tuple[ModelConfig, Layout, int, str]:
    """A legal layout of a model of a published size."""
    pick = lambda *values: draw.choice(values)  # noqa: E731
    while True:
        config = shortened(*pick(*PUBLISHED))
        tp, pp, length = pick(1, 1, 2, 4, 8), pick(1, 1, 2, 4), pick(2048, 4096, 8192)
        schedule, vpp = pick(*SCHEDULES) if pp == 2 else (pick("1f1b", "1f1b", "gpipe"), 1)
        layout = Layout(
            tp=tp,
            sp=pick(tp > 1, False),
            pp=pp,
            vpp=vpp,
            dp=pick(1, 2, 4, 8, 16, 64),
            dp_replicate=pick(1, 1, 2),
            zero=pick(0, 0, 1, 2, 3, 3),
            ep=pick(1, 2, 4, 8) if config.moe else 1,
            etp=pick(1, tp) if config.moe else 1,
            ulysses=pick(1, 1, 2, 4),
            ring=pick(1, 1, 2, 4),
            micro_batch=pick(1, 2),
            accumulation=pick(1, 2, 3, 4),
            recompute=pick("none", "none", "selective", "full"),
            schedule=schedule if pp > 1 else "1f1b",
        )
        if not legality.violations(layout, config, length):
            return config, layout, length, pick("bf16", "bf16", "fp32")


@pytest.mark.slow
def test_peaks_of_many_real_sizes_are_within_a_percent() -> None:
    draw, errors = random.Random(7), []
    for _ in range(60):
        drawn = drawn_published(draw)
        for rank in trace_report(*drawn, None)["ranks"]:
            total = rank["memory"][-1]
            errors.append(abs(total["predicted_bytes"] / total["measured_bytes"] - 1))
    median, p99 = np.quantile(errors, [0.5, 0.99])
    assert median < 0.001
    assert p99 < 0.02
    assert max(errors) < 0.03


# Schedules


@pytest.mark.parametrize("model", ["tied", "shared expert"])
@pytest.mark.parametrize(
    "text",
    [
        "pp4 tp2 sp schedule=zb-h1 ga8",
        "pp2 dp2 zero1 schedule=zb-h1 ga4 recompute=full",
        "pp2 vpp2 tp2 schedule=zb-v ga6",
        "pp2 vpp2 dp2 zero2 schedule=dualpipe-v ga6",
        "pp2 vpp2 dp2 zero3 schedule=bfs ga4",
    ],
)
def test_schedules_of_all_kinds_take_what_is_planned(model: str, text: str) -> None:
    assert_as_planned(trace_report(MODELS[model], parse(text), 384, "bf16", None))


# Field cases


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("tp2 ep8 dp4", 4_400_822_272),
        ("tp4 ep2 dp1", 14_890_383_360),
        ("ep8 dp8", 5_164_972_032),
    ],
)
def test_case_54_a_rank_has_its_share_of_experts_whatever_tp_is(text, parameters) -> None:
    layout = parse(text)
    with fake_world(0, layout.world_size), fsdp_without_values():
        trainer = ShapeTrainer(load_preset("qwen3-30b-a3b"), layout, 4096, "bf16", 0)
        (stage,) = trainer.stages.values()
        assert sum(local_tensor(p).numel() for p in stage.parameters()) == parameters


def test_case_55_copies_of_tokens_leave_by_the_ep_ranks_and_come_back() -> None:
    report = trace_report(load_preset("qwen3-30b-a3b"), parse("dp8 ep8 zero1"), 4096, "bf16", 0)
    (rank,) = report["ranks"]
    layers, copies, hidden = 48, 4096 * 8, 2048
    (sent,) = [
        row
        for row in rank["ledger"]
        if (row["split"], row["phase"], row["op"]) == ("ep", "forward", "all_to_all")
        and row["measured_bytes"] / row["measured_calls"] > 1e6
    ]
    assert sent["measured_calls"] == 2 * layers
    assert sent["measured_bytes"] == 2 * layers * copies * hidden * 2  # 128 MiB each
    assert_as_planned(report)


# The command


@cache
def _dense_report() -> dict:
    return trace_report(MODELS["dense"], parse("tp2 sp pp4 dp2 ga8"), 384, "bf16", None)


def test_one_rank_stands_for_the_stages_that_hold_the_same() -> None:
    layout = parse("tp2 pp4 dp2 ga8")
    config = tiny_dense(num_hidden_layers=12)
    parts = parts_in_pipeline(config, layout, 384, "bf16")
    assert list(parts.values()) == [[0], [1, 2], [3]]
    pipeline = groups(layout, "pp")[0].tolist()
    assert list(parts) == [pipeline[0], pipeline[1], pipeline[3]]


def test_the_moment_of_the_peak_is_told() -> None:
    moments = [rank["moment"] for rank in _dense_report()["ranks"]]
    assert all("of micro-batch" in moment and "stage" in moment for moment in moments)
    assert "layer" in moments[0]


def test_the_command_prints_what_was_compared(tmp_path, capsys) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps({**_keys(), "num_hidden_layers": 4}))
    args = ["trace", str(model), "--layout", "pp2 tp2 ga4", "--seq", "256"]
    assert main(args) == 0
    assert "sends what the plan predicts, to the byte" in " ".join(capsys.readouterr().out.split())
    assert main([*args, "--rank", "3", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["rank"], rank["pp_ranks"]) == (3, [1])


def _keys() -> dict:
    from tests.parallel.dry import TINY

    return {**TINY, **WIDE}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama-3.1-8b"], "trace needs --layout"),
        (["llama-3.1-8b", "--layout", "tp2", "--rank", "2"], "is not one of the 2 ranks"),
        (["llama-3.1-8b", "--layout", "tp2", "--precision", "fp8"], "bf16 or fp32 can"),
        (["deepseek-v3", "--layout", "tp2"], "can be planned but not trained"),
        (["llama-3.1-8b", "--layout", "tp3"], "tp"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_a_sentence(arguments, sentence, capsys) -> None:
    assert main(["trace", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_experts_that_no_gpu_multiplies_are_refused() -> None:
    with pytest.raises(UserError, match="16 bytes"):
        trace_report(tiny_mixture(moe_intermediate_size=20), parse("dp2 ep2"), 48, "bf16", None)


def test_a_fake_world_leaves_nothing_that_a_real_one_would_take() -> None:
    """DTensor keeps a mesh for the next one of the same shape, with the coordinates of a rank."""
    config = tiny("llama", num_hidden_layers=1)
    with fake_world(0, 2):
        dry_trainer(config, parse("dp2 zero3 ga2"), 0, "fp32", 64).step(0, lr=1e-3)
    assert_parity(config, "dp2 zero3 mb2", steps=1)
