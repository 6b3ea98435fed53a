"""cost and run are bound: arithmetic gives the very transfers that the program makes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fivefold.layout import legality
from fivefold.layout.notation import SCHEDULES, Layout, parse
from fivefold.layout.ranks import coordinates
from fivefold.ledger import Ledger
from fivefold.model.config import ModelConfig
from fivefold.parallel.cost import ledger
from tests.parallel.dry import (
    SEQUENCE_LENGTH,
    dry_trainer,
    fake_world,
    tiny_dense,
    tiny_mixture,
    tiny_shared,
)

MODELS = {
    "dense": tiny_dense(),
    "tied": tiny_dense(tie_word_embeddings=True),
    "two kv heads": tiny_dense(num_key_value_heads=2),
    "one kv head": tiny_dense(num_key_value_heads=1),
    "mixture": tiny_mixture(),
    "tied mixture": tiny_mixture(tie_word_embeddings=True),
    "shared expert": tiny_shared(),
}


def measured(config: ModelConfig, layout: Layout, rank: int, precision: str = "fp32") -> Ledger:
    """The ledger of the second step, when nothing happens for the first time any more."""
    with fake_world(rank, layout.world_size):
        trainer = dry_trainer(config, layout, rank, precision)
        for step in range(2):
            trainer.step(step, lr=1e-3)
        return trainer.ledger


def assert_same(config: ModelConfig, layout: Layout, rank: int, precision: str = "fp32") -> None:
    legality.check(layout, config, SEQUENCE_LENGTH)
    predicted = ledger(config, layout, SEQUENCE_LENGTH, rank, precision)
    differences = predicted.differences(measured(config, layout, rank, precision))
    assert not differences, f"{layout} rank {rank} {precision}: (plan, run) {differences}"


FIXED = [
    ("dense", "dp2 ga2"),
    ("dense", "dp4 zero1 ga2"),
    ("dense", "tp2 sp ulysses2 pp2 ga2 recompute=full:1"),
    ("mixture", "tp2 dp2 ep2 ring2 ga2 recompute=full:2"),
    ("dense", "dp3 zero2 ga3"),
    ("tied", "dp2 zero3 ga2"),
    ("dense", "dp4 dp_replicate2 zero3 ga2"),
    ("dense", "tp2 ga2"),
    ("dense", "tp4 sp ga2"),
    ("two kv heads", "tp4 sp dp2 ga2"),
    ("one kv head", "tp2 sp dp2 zero3 ga2"),
    ("tied", "pp4 ga4 tp2 sp"),
    ("tied", "pp2 vpp2 ga4 dp3 zero3 tp2 sp recompute=full"),
    ("dense", "ulysses4 ga2"),
    ("two kv heads", "ulysses4 ring2 ga2 recompute=selective"),
    ("dense", "ring4 ga2 zero2"),
    ("mixture", "dp2 ep2 ga2"),
    ("mixture", "dp2 tp2 etp2 ep2 ga2 recompute=full"),
    ("tied mixture", "dp2 tp2 sp pp2 ep2 ring2 ga2 mb2"),
    ("shared expert", "dp4 tp2 etp2 ep2 sp zero3 ga2 recompute=full"),
    ("shared expert", "dp4 dp_replicate2 zero1 tp2 ep2 ga2"),
    ("tied", "pp2 vpp2 ga4 dp2 zero1 schedule=dualpipe-v"),
    ("tied mixture", "pp2 vpp2 ga3 dp2 ep2 tp2 sp zero2 recompute=full schedule=zb-v"),
    ("tied", "pp4 ga4 dp2 zero3 schedule=zb-h1"),
    ("mixture", "pp2 vpp2 ga2 tp2 etp2 schedule=bfs"),
]


@pytest.mark.parametrize(("model", "text"), FIXED, ids=[f"{m}: {t}" for m, t in FIXED])
def test_every_rank_sends_what_the_cost_says(model: str, text: str) -> None:
    layout = parse(text)
    for rank in range(layout.world_size):
        assert_same(MODELS[model], layout, rank)


def test_bf16_halves_activations_and_gathered_weights_and_nothing_else() -> None:
    assert_same(MODELS["dense"], parse("dp2 zero3 tp2 sp pp2 ga2"), rank=5, precision="bf16")
    assert_same(MODELS["mixture"], parse("dp2 ep2 ulysses2 ga2"), rank=1, precision="bf16")


@st.composite
def layouts(draw: st.DrawFn, largest_world: int) -> tuple[str, Layout, int, str]:
    """A model, a legal layout for it, one of its ranks, and a precision."""
    name = draw(st.sampled_from(sorted(MODELS)))
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    tp, pp = pick(1, 1, 2, 3, 4), pick(1, 1, 2, 4)
    vpp = pick(1, 1, 2) if pp == 2 else 1
    dp = pick(1, 2, 3, 4, 6)
    ulysses, ring = pick(1, 1, 2, 3), pick(1, 1, 2, 3)
    ep = pick(1, 2, 3, 4, 6) if MODELS[name].moe else 1
    etp = pick(1, tp) if MODELS[name].moe else 1
    recompute = pick("none", "selective", "full")
    layout = Layout(
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        pp=pp,
        vpp=vpp,
        dp=dp,
        dp_replicate=pick(1, 1, 2),
        zero=pick(0, 0, 1, 2, 3),
        ep=ep,
        etp=etp,
        ulysses=ulysses,
        ring=ring,
        micro_batch=pick(1, 2),
        accumulation=pick(1, 2, 3, 4),
        recompute=recompute,
        recompute_layers=pick(0, 0, 1, 3) if recompute == "full" else 0,
        schedule=pick("1f1b", *SCHEDULES),
        order=tuple(draw(st.permutations(("tp", "cp", "ep", "dp", "pp")))),
        layers=pick(None, (1, 3), None) if pp * vpp == 2 else None,
    )
    assume(layout.world_size <= largest_world)
    assume(not legality.violations(layout, MODELS[name], SEQUENCE_LENGTH))
    rank = draw(st.integers(0, layout.world_size - 1))
    return name, layout, rank, pick("fp32", "fp32", "bf16")


def check_drawn(drawn: tuple[str, Layout, int, str]) -> None:
    name, layout, rank, precision = drawn
    assert_same(MODELS[name], layout, rank, precision)


COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}


@given(layouts(largest_world=64))
@settings(max_examples=60, **COMMON)
def test_any_legal_layout_sends_what_the_cost_says(drawn: tuple[str, Layout, int, str]) -> None:
    check_drawn(drawn)


@pytest.mark.slow
@given(layouts(largest_world=512))
@settings(max_examples=600, **COMMON)
def test_many_legal_layouts_send_what_the_cost_says(drawn: tuple[str, Layout, int, str]) -> None:
    check_drawn(drawn)


def test_ranks_of_one_stage_differ_at_most_where_the_vocabulary_is_uneven() -> None:
    layout = parse("tp4 sp dp2 pp2 ga2")
    config = MODELS["dense"]
    ledgers = [
        ledger(config, layout, SEQUENCE_LENGTH, rank, "fp32")
        for rank in range(layout.world_size)
        if coordinates(layout, rank)["pp"] == 0
    ]
    rows = {t for ledger in ledgers for t in ledger}
    uneven = {t for t in rows if not all(t in set(ledger) for ledger in ledgers)}
    assert {(t.split, t.op) for t in uneven} == {("dp", "all_reduce")}
