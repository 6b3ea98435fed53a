from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.legality import check, legal, violations
from fivefold.layout.model_rules import allowed_tp
from fivefold.layout.notation import PLANNED_SCHEDULES, RECOMPUTE, SCHEDULES, Layout, parse
from fivefold.model.config import ModelConfig, MoEConfig


def dense(
    num_heads: int = 8,
    num_kv_heads: int = 4,
    num_layers: int = 8,
    intermediate_size: int = 176,
    vocab_size: int = 128,
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=8 * num_heads,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        tied_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
    )


def mixture(
    num_experts: int = 8,
    expert_width: int = 32,
    shared_width: int = 0,
    dense_layers: int = 0,
    **shape: int,
) -> ModelConfig:
    model = dense(**shape)
    moe = MoEConfig(
        num_experts=num_experts,
        experts_per_token=2,
        expert_intermediate_size=expert_width,
        shared_intermediate_size=shared_width,
        shared_gate=False,
        norm_topk_prob=True,
        aux_loss_coef=0.0,
        layers=tuple(layer >= dense_layers for layer in range(model.num_layers)),
    )
    return replace(model, moe=moe)


# Shapes as published in the models' config.json.
PHI_4 = dense(
    num_heads=40, num_kv_heads=10, num_layers=40, intermediate_size=17920, vocab_size=100352
)
FALCON_7B = dense(
    num_heads=71, num_kv_heads=1, num_layers=32, intermediate_size=18176, vocab_size=65024
)
QWEN3_30B = mixture(num_heads=32, num_kv_heads=4, num_layers=48, num_experts=128, expert_width=768)
GPT_OSS_120B = mixture(
    num_heads=64, num_kv_heads=8, num_layers=36, num_experts=128, expert_width=2880
)
QWEN15_MOE = mixture(num_heads=16, num_kv_heads=16, num_layers=24, num_experts=60)
TINY_D = dense()
TINY_M = mixture()


def only_violation(text: str, model: ModelConfig | None = None, **setting: Any) -> str:
    broken = violations(parse(text), model, **setting)
    assert len(broken) == 1, broken
    assert "\n" not in broken[0]
    return broken[0]


@pytest.mark.parametrize(
    ("text", "neighbour", "words"),
    [
        ("sp", "sp tp2", ["only tp 1"]),
        ("dp6 dp_replicate4 zero1", "dp6 dp_replicate3 zero1", ["1, 2, 3 or 6"]),
        ("dp4 dp_replicate2", "dp4 dp_replicate2 zero1", ["zero1", "all 4 dp ranks"]),
        ("zero1", "dp2 zero1", ["dp_shard 1 x cp 1", "dp2"]),
        ("zero3 tp4", "zero3 tp4 ring2", ["dp_shard 1 x cp 1"]),
        ("zero1 dp4 dp_replicate4", "zero1 dp4 dp_replicate2", ["a smaller dp_replicate"]),
        ("vpp2 ga2", "vpp2 pp2 ga2", ["pp is 1"]),
        ("pp2 vpp2 ga2 schedule=gpipe", "pp2 ga2 schedule=gpipe", ["vpp is 2"]),
        ("pp4 vpp2 ga6", "pp4 vpp2 ga8", ["multiple of pp 4, not 6", "4 and 8"]),
        ("pp4 vpp2 ga3", "pp4 vpp2 ga4", ["multiple of pp 4, not 3"]),
        ("pp2 layers=4,4,4", "pp2 layers=4,4", ["3 stages", "pp 2 x vpp 1 is 2"]),
        ("tp4 etp2", "tp4 etp4", ["etp 2 is neither 1 nor tp 4", "1 or 4"]),
        ("tp4 etp2 ep3", "tp4 etp4 dp3 ep3", ["etp 2 is neither 1 nor tp 4", "1 or 4"]),
        ("tp2 dp4 ep3", "tp2 dp4 ep4", ["tp 2 x dp 4 = 8", "ep may be 1, 2, 4 or 8"]),
        ("ep2", "dp2 ep2", ["EP uses the ranks of DP and CP", "ep may be 1"]),
        ("tp2 etp2 dp4 ep8", "tp2 dp4 ep8", ["etp 2 x ep 8", "ep may be 1, 2 or 4"]),
        ("tp2 etp2 ep2", "tp2 etp2 ep2 ring2", ["ep may be 1"]),
        (
            "tp2 dp4 dp_replicate2 zero1 ep8",
            "tp2 dp4 dp_replicate2 zero1 ep4",
            ["tp 2 x dp_shard 2 = 4 ranks of one dp_replicate copy", "1, 2 or 4"],
        ),
    ],
)
def test_a_rule_about_the_layout_alone(text: str, neighbour: str, words: list[str]):
    message = only_violation(text)
    assert all(word in message for word in words), message
    assert violations(parse(neighbour)) == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=0), "tp must be 1 or more, not 0"),
        (Layout(accumulation=-1), "ga must be 1 or more, not -1"),
        (Layout(dp=0, dp_replicate=2), "dp must be 1 or more, not 0"),
        (Layout(zero=4), "0 to 3, not 4"),
        (Layout(recompute="all"), "none, selective or full"),
        (Layout(schedule="interleaved", pp=2, vpp=2), "gpipe, 1f1b, bfs, zb-h1"),
        (Layout(order=("tp", "dp")), "order=tp-dp"),
        (Layout(pp=2, layers=(8, 0)), "stage 1 0 layers"),
        (Layout(recompute_layers=2), "recompute=none takes no number of layers"),
        (Layout(recompute="full", recompute_layers=-1), "there is -1"),
    ],
)
def test_values_that_no_text_can_state_are_refused_too(layout: Layout, words: str):
    (message,) = violations(layout)
    assert words in message


@pytest.mark.parametrize(
    ("text", "neighbour", "model", "words"),
    [
        ("tp4", "tp5", PHI_4, ["10 kv heads", "1, 2, 5, 10, 20 or 40"]),
        ("tp8", "tp10", PHI_4, ["10 kv heads", "1, 2, 5, 10, 20 or 40"]),
        ("tp2", "tp71", FALCON_7B, ["71 attention heads", "tp may be 1 or 71"]),
        ("tp8", "tp4", dense(intermediate_size=172), ["MLP width 172", "1, 2 or 4"]),
        (
            "tp8",
            "tp4",
            mixture(shared_width=36),
            ["shared expert's width 36", "1, 2 or 4"],
        ),
        (
            "tp4",
            "tp2",
            mixture(dense_layers=1, intermediate_size=174),
            ["MLP width 174", "1 or 2"],
        ),
        ("tp4", "tp2", dense(vocab_size=5), ["2 rows", "5 tokens", "1 or 2"]),
        ("ulysses4", "ulysses5", PHI_4, ["40 heads and 10 kv heads", "1, 2, 5, 10, 20 or 40"]),
        ("tp5 ulysses16", "tp5 ulysses8", PHI_4, ["8 heads and 2 kv heads", "1, 2, 4 or 8"]),
        ("ulysses3", "ulysses8", TINY_D, ["8 heads and 4 kv heads", "1, 2, 4 or 8"]),
        ("tp8 ulysses2", "tp4 ulysses2", TINY_D, ["1 heads and 1 kv heads", "may be 1"]),
        ("pp4", "pp3", dense(num_layers=3), ["4 stages", "model has 3", "up to 3"]),
        ("pp4 vpp3 ga4", "pp4 vpp2 ga4", dense(num_layers=10), ["12 stages", "up to 10"]),
        (
            "pp2 layers=10,10",
            "pp2 layers=4,4",
            TINY_D,
            ["to 20", "8 layers", "layers=4,4"],
        ),
        ("dp2 ep2", "dp2", TINY_D, ["ep 2", "llama is a dense model"]),
        ("tp2 etp2", "tp2", TINY_D, ["etp 2", "dense model"]),
        ("dp16 ep16", "dp16 ep8", TINY_M, ["8 experts", "1, 2, 4 or 8"]),
        (
            "dp8 ep8",
            "dp6 ep6",
            QWEN15_MOE,
            ["60 experts", "1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60"],
        ),
        ("tp4 etp4", "tp4", mixture(expert_width=30), ["expert width 30", "etp1"]),
    ],
)
def test_a_rule_about_the_model(text: str, neighbour: str, model: ModelConfig, words: list[str]):
    message = only_violation(text, model)
    assert all(word in message for word in words), message
    assert violations(parse(neighbour), model) == []


@pytest.mark.parametrize(
    ("text", "length", "neighbour", "words"),
    [
        ("ulysses2", 1001, 1000, ["ulysses 2 = 2", "1000 or 1002"]),
        ("ring2", 1002, 1000, ["ring 2 x pieces a ring rank 2 = 4", "1000 or 1004"]),
        ("tp4 sp", 1002, 1000, ["tp (of sp) 4 = 4", "1000 or 1004"]),
        ("tp4 sp ulysses2 ring2", 1000, 992, ["= 32", "992 or 1024"]),
        ("ring8", 10, 16, ["= 16", "nearest is 16"]),
        ("dp1", 0, 1, ["0 is not", "nearest is 1"]),
    ],
)
def test_the_sequence_divides_over_its_ranks(
    text: str, length: int, neighbour: int, words: list[str]
):
    message = only_violation(text, sequence_length=length)
    assert all(word in message for word in words), message
    assert violations(parse(text), sequence_length=neighbour) == []


def test_the_vocabulary_and_a_sequence_without_sp_need_not_divide():
    assert violations(parse("tp4"), dense(vocab_size=127), sequence_length=63) == []


def test_dense_layers_of_a_model_without_any_do_not_limit_tp():
    assert violations(parse("tp4"), mixture(intermediate_size=173)) == []


def test_moe_tokens_of_a_micro_batch_divide_over_tp():
    message = only_violation("tp4 mb1", TINY_M, sequence_length=62)
    assert "mb 1 x 62 tokens" in message
    assert "mb may be 2" in message
    assert violations(parse("tp4 mb2"), TINY_M, sequence_length=62) == []
    assert violations(parse("tp4 mb1"), TINY_D, sequence_length=62) == []
    # Each of two ulysses ranks holds 31 of the 62 tokens.
    assert "mb may be 4 or 8" in only_violation("tp4 mb5 ulysses2", TINY_M, sequence_length=62)


def test_tp_degrees_that_a_model_allows():
    assert allowed_tp(PHI_4) == [1, 2, 5, 10, 20, 40]
    assert allowed_tp(FALCON_7B) == [1, 71]
    assert allowed_tp(QWEN3_30B) == [1, 2, 4, 8, 16, 32]
    assert allowed_tp(TINY_D) == [1, 2, 4, 8]


@pytest.mark.parametrize(("text", "model"), [("tp8", QWEN3_30B), ("tp16", GPT_OSS_120B)])
def test_kv_heads_are_repeated_where_there_are_fewer_than_tp_ranks(text: str, model: ModelConfig):
    check(parse(text), model)


@pytest.mark.parametrize("text", ["pp4", "pp3", "pp4 vpp2 ga4", "pp8 ga4", "pp4 ga1"])
def test_layers_need_not_divide_by_stages_nor_micro_batches_fill_them(text: str):
    check(parse(text), dense(num_layers=10))


@pytest.mark.parametrize(
    ("text", "world_size", "words"),
    [
        ("tp8", 12, ["tp 8 = 8 ranks", "1, 2, 3, 4, 6 or 12", "8 or 16 devices"]),
        ("tp2 pp2 ring2 dp2", 8, ["tp 2 x pp 2 x cp 2 x dp 2 = 16", "dp 1 would fit"]),
    ],
)
def test_the_ranks_must_be_the_devices(text: str, world_size: int, words: list[str]):
    message = only_violation(text, world_size=world_size)
    assert all(word in message for word in words), message
    layout = parse(text)
    assert violations(layout, world_size=layout.world_size) == []


def test_expert_ranks_are_no_factor_of_the_world_size():
    layout = parse("tp1 pp2 ep2 etp1", world_size=4)
    assert layout.dp == 2
    check(layout, TINY_M, sequence_length=64, world_size=4)


def test_a_layout_may_break_several_rules_and_check_names_the_first():
    layout = parse("tp4 dp2 ep16 zero1 dp_replicate2")
    broken = violations(layout, PHI_4, sequence_length=64, world_size=4)
    assert len(broken) == 5
    with pytest.raises(UserError) as error:
        check(layout, PHI_4, sequence_length=64, world_size=4)
    assert str(error.value) == broken[0]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("recompute=full:3", 2),
        ("pp2 recompute=full:2", 1),
        ("pp2 vpp1 layers=1,1 recompute=full:99", 1),
    ],
)
def test_no_more_layers_are_recomputed_than_a_stage_has(text: str, most: int):
    model = replace(TINY_M, num_layers=2, moe=None)
    (message,) = violations(parse(text), model)
    assert f"it may be up to full:{most}, or full for all" in message
    within = text.rpartition(":")[0] + f":{most}"
    assert violations(parse(within), model) == []


# Schedules with rules of their own


@pytest.mark.parametrize(
    ("text", "neighbour", "words"),
    [
        ("schedule=zb-h1", "schedule=zb-h1 pp2", ["zb-h1", "pp is 1"]),
        ("pp2 vpp2 schedule=zb-h1", "pp2 schedule=zb-h1", ["vpp 1, not vpp 2"]),
        ("pp2 schedule=zb-v", "pp2 vpp2 schedule=zb-v", ["vpp 2, not vpp 1"]),
        (
            "pp2 vpp2 ga3 schedule=dualpipe-v",
            "pp2 vpp2 ga5 schedule=dualpipe-v",
            ["2 x pp 2 = 4", "not 3", "ga4"],
        ),
        ("pp4 ga9 schedule=dualpipe", "pp4 ga10 schedule=dualpipe", ["ga 9 is odd", "ga10"]),
        ("pp3 ga8 schedule=dualpipe", "pp4 ga8 schedule=dualpipe", ["pp 3", "pp4 ga8"]),
        ("pp2 schedule=bfs", "pp2 vpp3 schedule=bfs", ["vpp is 1", "use vpp2", "schedule=gpipe"]),
        ("pp2 vpp2 schedule=gpipe", "pp2 vpp2 schedule=bfs", ["vpp is 2", "schedule=bfs"]),
    ],
)
def test_a_rule_of_a_schedule(text: str, neighbour: str, words: list[str]):
    (message,) = violations(parse(text), running=False)
    assert all(word in message for word in words), message
    assert violations(parse(neighbour), running=False) == []


def test_a_schedule_without_a_program_can_be_planned_and_is_refused_before_a_run():
    layout = parse("pp2 ga4 schedule=dualpipe")
    assert violations(layout, running=False) == []
    assert only_violation(str(layout)) == (
        "schedule=dualpipe can be planned, not run: it keeps two copies of the stages; "
        "the nearest that runs has one, schedule=dualpipe-v with vpp2"
    )


# Many layouts at once

SHARED_EXPERT = mixture(num_heads=12, num_kv_heads=4, shared_width=96, num_experts=12)
MODELS = [None, TINY_D, PHI_4, QWEN3_30B, SHARED_EXPERT]

SMALL = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8])
DRAWN = st.builds(
    Layout,
    tp=SMALL,
    sp=st.booleans(),
    pp=SMALL,
    vpp=st.sampled_from([1, 1, 2, 3]),
    dp=st.sampled_from([0, 1, 2, 4, 6, 8, 16]),
    dp_replicate=st.sampled_from([1, 1, 2, 3]),
    zero=st.sampled_from([0, 0, 1, 2, 3, 4]),
    ep=SMALL,
    etp=st.sampled_from([1, 1, 2, 4]),
    ulysses=SMALL,
    ring=SMALL,
    micro_batch=st.sampled_from([1, 2, 3]),
    accumulation=st.sampled_from([-1, 1, 4, 6, 8, 16]),
    recompute=st.sampled_from([*RECOMPUTE, "all"]),
    recompute_layers=st.sampled_from([0, 0, 0, 2]),
    schedule=st.sampled_from([*SCHEDULES, *PLANNED_SCHEDULES, "none"]),
)


@given(
    st.lists(DRAWN, min_size=1, max_size=20),
    st.sampled_from(MODELS),
    st.sampled_from([None, 60, 62, 64, 96]),
    st.sampled_from([None, None, 8]),
    st.booleans(),
    st.sampled_from([None, None, (4, 4), (3, 5, 0)]),
)
@settings(max_examples=200)
def test_many_layouts_are_legal_exactly_where_each_breaks_no_rule(
    layouts: list[Layout],
    model: ModelConfig | None,
    sequence_length: int | None,
    world_size: int | None,
    running: bool,
    layers: tuple[int, ...] | None,
):
    layouts = [replace(layout, layers=layers) for layout in layouts]
    setting = (model, sequence_length, world_size, running)
    verdicts = legal(LayoutBatch.of(layouts), *setting)
    assert verdicts.tolist() == [not violations(layout, *setting) for layout in layouts]


def test_a_fair_share_of_drawn_layouts_is_legal():
    """Otherwise the comparison above would hold for rules that refuse everything."""
    degrees = [(tp, pp, ep) for tp in (1, 2, 4) for pp in (1, 2, 4) for ep in (1, 2, 4, 5)]
    layouts = [Layout(tp=tp, pp=pp, ep=ep, dp=4, zero=1) for tp, pp, ep in degrees]
    assert legal(LayoutBatch.of(layouts), TINY_M, 64).sum() == 27


# Cases from the field, with their right answers


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_repeated_kv_heads_need_as_many_ranks_for_each(tp: int):
    assert violations(parse(f"tp{tp}"), QWEN3_30B) == []  # 4 kv heads


def test_refused_tp_degrees_name_the_nearest_that_work():
    for tp in (4, 8):
        assert "1, 2, 5, 10, 20 or 40" in only_violation(f"tp{tp}", PHI_4)
    assert "tp may be 1 or 71" in only_violation("tp2", FALCON_7B)
    assert 16 in allowed_tp(GPT_OSS_120B)


@pytest.mark.parametrize(
    ("text", "layers", "words"),
    [
        ("pp4", 3, ["up to 3"]),
        ("pp4 layers=24,24,24,22", 96, ["adds up to 94", "96 layers"]),
        ("pp2 layers=10,10", 21, ["adds up to 20", "21 layers"]),
    ],
)
def test_stages_that_drop_layers_or_are_empty_are_refused(text: str, layers: int, words: list[str]):
    message = only_violation(text, dense(num_layers=layers))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("text", "layers"), [("pp4 layers=24,24,24,22", 94), ("pp4", 30)])
def test_uneven_stages_are_legal(text: str, layers: int):
    check(parse(text), dense(num_layers=layers))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp2 dp4 ep3", ["ep 3", "ep may be 1, 2, 4 or 8"]),
        ("dp16 ep16", ["8 experts", "1, 2, 4 or 8"]),
    ],
)
def test_ep_needs_ranks_and_experts_to_share_out(text: str, words: list[str]):
    message = " ".join(violations(parse(text), TINY_M))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("pp4 vpp2 ga3", False),
        ("pp4 vpp2 ga4", True),
        ("pp4 vpp2 ga6", False),
        ("pp4 vpp2 ga8", True),
        ("pp8 ga4", True),
    ],
)
def test_the_verdict_on_micro_batches_comes_before_the_run(text: str, runs: bool):
    assert (violations(parse(text), dense(num_layers=10)) == []) is runs
