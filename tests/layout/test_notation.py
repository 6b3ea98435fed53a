from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.notation import (
    LARGEST,
    ORDER,
    Layout,
    parse,
    stated,
)
from fivefold.text import nearest_choices, nearest_multiples
from tests.helpers import refusal
from tests.layout.drawn import layouts

DEGREES = st.integers(1, 64) | st.integers(1, LARGEST)
LAYOUTS = layouts(
    DEGREES,
    order=st.permutations(ORDER).map(tuple),
    layers=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=12).map(tuple),
)


# Reading and printing


@given(LAYOUTS)
def test_parsing_what_was_printed_gives_the_same_layout(layout: Layout):
    assert parse(str(layout)) == layout


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_tokens_are_read_in_any_order_and_in_capitals(layout: Layout, random):
    tokens = str(layout).upper().split()
    random.shuffle(tokens)
    assert parse("  ".join(tokens)) == layout


def test_every_token_of_the_full_line_reaches_its_field():
    layout = parse(
        "tp4 sp pp2 vpp3 dp8 dp_replicate2 zero1 ep16 etp4 ulysses2 ring5 mb6 ga7 "
        "recompute=selective schedule=gpipe order=pp-dp-ep-cp-tp layers=1,2*4,3"
    )
    assert layout == Layout(
        tp=4,
        sp=True,
        pp=2,
        vpp=3,
        dp=8,
        dp_replicate=2,
        zero=1,
        ep=16,
        etp=4,
        ulysses=2,
        ring=5,
        micro_batch=6,
        accumulation=7,
        recompute="selective",
        schedule="gpipe",
        order=("pp", "dp", "ep", "cp", "tp"),
        layers=(1, 2, 2, 2, 2, 3),
    )


def test_printing_leaves_out_defaults_and_keeps_one_order():
    text = "order=tp-cp-ep-dp-pp recompute=full schedule=1f1b ga16 mb1 dp8 zero0 sp tp4"
    assert str(parse(text)) == "tp4 sp dp8 ga16 recompute=full"


@pytest.mark.parametrize(
    "text, printed",
    [
        ("tp2 dp2 order=TP > CP > EP > DP > PP", "tp2 dp2"),
        ("tp2 dp2 order=TP>DP", "tp2 dp2"),
        ("tp2 pp2 dp2 order=TP > PP > DP", "tp2 pp2 dp2 order=tp-pp-dp-cp-ep"),
        ("order=PP > DP > EP > CP > TP pp2", "pp2 order=pp-dp-ep-cp-tp"),
        ("tp2 pp2 dp2 order=TP, PP, DP", "tp2 pp2 dp2 order=tp-pp-dp-cp-ep"),
        ("tp2 pp2 dp2 order=TP,PP,DP", "tp2 pp2 dp2 order=tp-pp-dp-cp-ep"),
    ],
)
def test_an_order_may_be_written_as_a_plan_prints_it(text: str, printed: str):
    assert str(parse(text)) == printed


def test_a_layout_of_defaults_prints_as_dp1():
    assert str(Layout()) == "dp1"
    assert parse("dp1") == parse("") == Layout()


@pytest.mark.parametrize(
    ("layers", "printed"),
    [
        ((7, *[8] * 14, 7), "layers=7,8*14,7"),
        ((8, 8), "layers=8,8"),
        ((10, 10), "layers=10*2"),
        ((1, 2, 1), "layers=1,2,1"),
    ],
)
def test_layers_print_as_runs_where_that_is_shorter(layers: tuple[int, ...], printed: str):
    assert str(Layout(layers=layers)) == printed
    assert parse(printed).layers == layers


def test_full_recomputation_may_name_the_first_layers_of_each_stage():
    assert parse("recompute=full:4") == Layout(recompute="full", recompute_layers=4)
    assert parse("recompute=full") == Layout(recompute="full", recompute_layers=0)
    assert str(parse("recompute=full:4")) == "recompute=full:4"


def test_schedules_that_are_planned_only_are_read_too():
    for name in ("zb-h1", "zb-v", "dualpipe", "dualpipe-v"):
        assert parse(f"pp2 schedule={name}").schedule == name


def test_interleaved_is_1f1b_with_chunks():
    assert parse("schedule=interleaved pp2 vpp2") == parse("pp2 vpp2 schedule=1f1b")
    assert "vpp2" in refusal(parse, "pp2 schedule=interleaved")


def test_stated_names_the_tokens_of_the_text_only():
    assert stated("tp2 SP zero0 mb1 recompute=none") == {"tp", "sp", "zero", "mb", "recompute"}
    assert stated("") == frozenset()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("uylsses2", "did you mean ulyssesN?"),
        ("replicate2", "did you mean dp_replicateN?"),
        ("selective", "did you mean recompute=selective?"),
        ("1f1b", "did you mean schedule=1f1b?"),
        ("recmpute=full", "did you mean recompute="),
        ("xyzzy", "known are tpN, sp, ppN"),
        ("tp4,dp2", "spaces, not commas"),
        ("tp2 dp2 tp2", "tp is stated twice"),
        ("sp tp2 sp", "sp is stated twice"),
        ("tp", "write it like tp2"),
        ("zero", "write it like zero2"),
        ("tp=4", "write it like tp2"),
        ("tp-", "write it like tp2"),
        ("tp0", "tp must be 1 or more, not 0"),
        ("ring-2", "ring must be 1 or more, not -2"),
        ("dp1000001", "the most is 1000000"),
        ("dp" + "9" * 5000, "the most is 1000000"),
        ("tp2 sp2", "sp takes its degree from tp"),
        ("zero4", "zero4 is not a ZeRO stage"),
        ("zero-1", "zero-1 is not a ZeRO stage"),
        ("cp4", "ulyssesN, ringN or both"),
        ("ep2 dp2 order=tp-cp-dp-pp", "each of tp, cp, ep, dp, pp once"),
        ("order=tp-cp-ep-dp-dp", "each of tp, cp, ep, dp, pp once"),
        ("recompute", "write it like recompute=none|selective|full"),
        ("recompute=all", "none, selective or full"),
        ("recompute=selective:4", "recompute=full:4"),
        ("recompute=full:x", "recompute=full:4"),
        ("recompute=full:0", "recomputed layers must be 1 or more, not 0"),
        (
            "schedule=dualpipes",
            "gpipe, 1f1b, bfs, zb-h1, zb-v, dualpipe-v, interleaved or dualpipe",
        ),
        ("layers=8,x", "'x' in layers=8,x"),
        ("layers=", "write 8 or 8*14"),
        ("layers=8,0", "layers of a stage must be 1 or more, not 0"),
        ("layers=8*0", "stages must be 1 or more, not 0"),
        ("layers=8*99999999999", "the most is 1000000"),
    ],
)
def test_text_that_is_no_layout_is_refused_in_one_sentence_with_the_cure(text: str, words: str):
    message = refusal(parse, text)
    assert words in message
    assert "\n" not in message
    assert len(message) < 400


# The number of devices


def test_dp_is_derived_from_the_number_of_devices():
    assert parse("tp2 pp2 ulysses2", world_size=32).dp == 4
    assert parse("tp2 pp2 ulysses2", world_size=8).dp == 1


def test_a_stated_dp_must_fit_the_number_of_devices():
    assert parse("tp2 dp4", world_size=8).dp == 4
    message = refusal(parse, "tp2 pp2 ulysses2 dp2", world_size=8)
    assert "tp 2 x pp 2 x cp 2 x dp 2 = 16 ranks" in message
    assert "devices is 8" in message
    assert "dp 1 would fit" in message


def test_degrees_that_do_not_divide_the_devices_are_refused_with_divisors_and_nearest_counts():
    message = refusal(parse, "tp8", world_size=12)
    assert "1, 2, 3, 4, 6 or 12" in message
    assert "8 or 16 devices" in message
    assert "8 devices" in refusal(parse, "tp8", world_size=4)


def test_no_devices_at_all_are_refused():
    assert "1 or more, not 0" in refusal(parse, "tp2", world_size=0)


# The textbook form


def test_edp_stands_in_place_of_dp():
    # Experts split like the other matrices: the textbook's DP 2 x EP 4 x TP 4.
    assert parse("tp4 etp4 edp2 ep4").dp == 8
    assert parse("tp2 edp4 ep4").dp == 8
    assert parse("dp8 ep4 edp2", world_size=8) == parse("dp8 ep4")


def test_an_edp_that_leaves_a_fraction_or_contradicts_dp_is_refused():
    assert "edp may be 2 or 4" in refusal(parse, "tp4 ep2 edp3")
    assert "dp 4 and edp 1 contradict each other" in refusal(parse, "dp4 ep2 edp1")


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("dp1", "1 device"),
        ("dp8 ep4", "8 devices = dp 8 (= edp 2 x ep 4)"),
        ("tp4 pp2 dp8 ep4 etp4", "64 devices = pp 2 x tp 4 x dp 8 (= edp 2 x ep 4)"),
        (
            "tp2 dp4 ep2",
            "8 devices = tp 2 x dp 4; for the experts tp 2 x dp 4 (= edp 4 x ep 2)",
        ),
        (
            "ulysses2 ring2 dp4 dp_replicate2 zero1",
            "16 devices = cp 4 (= ulysses 2 x ring 2) x dp 4 (= dp_replicate 2 x dp_shard 2)",
        ),
    ],
)
def test_describe_gives_both_products(text: str, described: str):
    assert parse(text).describe() == described


@given(LAYOUTS)
def test_the_products_that_describe_prints_are_right(layout: Layout):
    text = layout.describe().split("; for the experts")[0]
    ranks, _, product = re.sub(r"\(.*?\)", "", text).partition(" device")
    factors = 1
    for degree in re.findall(r" (\d+)", product):
        factors *= int(degree)
    assert int(ranks) == factors == layout.world_size


# The global batch


@pytest.mark.parametrize(("dp", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_accumulation_follows_from_the_global_batch(dp: int, accumulation: int):
    layout = with_global_batch(Layout(dp=dp, micro_batch=2), 8, {"dp", "mb"})
    assert layout.accumulation == accumulation
    assert layout.global_batch == 8


@pytest.mark.parametrize(
    ("text", "global_batch", "nearest"), [("dp4 mb2", 37, "32 or 40"), ("dp8", 4, "nearest is 8")]
)
def test_a_global_batch_that_leaves_a_remainder_is_refused(
    text: str, global_batch: int, nearest: str
):
    with pytest.raises(UserError, match=nearest) as error:
        with_global_batch(parse(text), global_batch, stated(text))
    assert "global_batch = dp x micro_batch x accumulation" in str(error.value)


def test_the_micro_batch_follows_where_accumulation_was_stated():
    layout = with_global_batch(parse("dp2 ga2"), 16, stated("dp2 ga2"))
    assert (layout.micro_batch, layout.accumulation) == (4, 2)
    with pytest.raises(UserError, match="accumulation 3 = 3"):
        with_global_batch(parse("ga3"), 8, stated("ga3"))


def test_three_numbers_must_agree():
    text = "dp2 mb2 ga3"
    assert with_global_batch(parse(text), 12, stated(text)) == parse(text)
    with pytest.raises(UserError, match="dp 2 x mb 2 x ga 3 = 12") as error:
        with_global_batch(parse(text), 16, stated(text))
    assert "global_batch = dp x micro_batch x accumulation" in str(error.value)


def test_accumulation_that_was_only_a_default_is_no_statement():
    assert with_global_batch(parse("dp2 mb2"), 16).accumulation == 4


def test_changing_dp_keeps_the_global_batch():
    steps = [with_global_batch(parse(f"dp{dp} tp{4 // dp} mb2"), 8) for dp in (1, 2, 4)]
    assert [layout.accumulation for layout in steps] == [4, 2, 1]
    assert [layout.world_size for layout in steps] == [4, 4, 4]
    assert {layout.global_batch for layout in steps} == {8}


def test_an_empty_global_batch_is_refused():
    with pytest.raises(UserError, match="1 or more sequences, not 0"):
        with_global_batch(Layout(), 0)


# Words


def test_the_nearest_multiples_are_never_zero():
    assert nearest_multiples(37, 8) == "32 or 40"
    assert nearest_multiples(3, 8) == "8"
    assert nearest_multiples(-3, 8) == "8"


def test_of_a_long_list_of_choices_the_nearest_are_named():
    assert nearest_choices([4, 2, 1], 3) == "1, 2 or 4"
    assert nearest_choices(range(1, 100), 50).startswith("42, 43")
