from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.stages import rank_stages, split_layers, split_layers_many, stage_ranges


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [
        (30, 4, (8, 8, 7, 7)),
        (46, 4, (12, 12, 11, 11)),
        (94, 4, (24, 24, 23, 23)),
        (61, 8, (8, 8, 8, 8, 8, 7, 7, 7)),
        (10, 3, (4, 3, 3)),
        (7, 2, (4, 3)),
        (5, 1, (5,)),
    ],
)
def test_without_costs_the_split_is_even_and_larger_stages_come_first(
    num_layers: int, stages: int, expected: tuple[int, ...]
):
    assert split_layers(num_layers, stages, embedding_cost=0.0, head_cost=0.0) == expected


def test_embedding_and_head_counted_as_layers_give_the_published_split_of_llama_3_405b():
    assert split_layers(126, 16) == (7,) + (8,) * 14 + (7,)
    assert split_layers(30, 4) == (7, 8, 8, 7)


def test_the_even_split_stands_where_weighting_does_not_help_the_slowest_stage():
    assert split_layers(32, 4) == (8, 8, 8, 8)
    assert split_layers(7, 2) == (4, 3)
    assert split_layers(4, 4) == (1, 1, 1, 1)
    assert split_layers(30, 4, embedding_cost=0.0, head_cost=0.5) == (8, 8, 7, 7)


def test_a_head_that_costs_many_layers_empties_the_last_stage_down_to_one_layer():
    assert split_layers(26, 4, embedding_cost=0.0, head_cost=3.0) == (7, 7, 7, 5)
    assert split_layers(10, 3, embedding_cost=0.0, head_cost=20.0) == (5, 4, 1)


def test_among_equally_slow_stages_the_one_with_fewer_layers_and_then_the_earlier_gets_more():
    assert split_layers(61, 8) == (7, 8, 8, 8, 8, 8, 7, 7)
    assert split_layers(100, 16) == (6,) + (7,) * 4 + (6,) * 11


@st.composite
def models(draw: st.DrawFn) -> tuple[int, int]:
    stages = draw(st.integers(1, 128))
    return draw(st.integers(stages, 400)), stages


costs = st.floats(0.0, 8.0)


@given(models(), costs, costs)
def test_every_layer_is_on_exactly_one_stage_and_no_stage_is_empty(
    model: tuple[int, int], embedding_cost: float, head_cost: float
):
    num_layers, stages = model
    layers = split_layers(num_layers, stages, embedding_cost, head_cost)
    ranges = stage_ranges(layers)
    assert [layer for held in ranges for layer in held] == list(range(num_layers))
    assert all(len(held) >= 1 for held in ranges) and len(ranges) == stages


@given(models())
def test_counting_embedding_and_head_as_a_layer_keeps_sizes_within_one_and_enlarges_none(
    model: tuple[int, int],
):
    even = split_layers(*model, embedding_cost=0.0, head_cost=0.0)
    weighted = split_layers(*model)
    assert max(even) - min(even) <= 1
    assert max(weighted) - min(weighted) <= 1
    assert max(weighted) <= max(even)


@given(st.integers(1, 4), st.integers(0, 6), costs, costs)
def test_no_other_split_has_a_cheaper_slowest_stage(
    stages: int, further: int, embedding_cost: float, head_cost: float
):
    num_layers = stages + further

    def slowest(layers: tuple[int, ...]) -> float:
        loads = [float(count) for count in layers]
        loads[0] += embedding_cost
        loads[-1] += head_cost
        return max(loads)

    every_split = (
        split
        for split in product(range(1, num_layers + 1), repeat=stages)
        if sum(split) == num_layers
    )
    best = min(map(slowest, every_split))
    chosen = split_layers(num_layers, stages, embedding_cost, head_cost)
    assert slowest(chosen) == pytest.approx(best)


def test_a_pipeline_with_fewer_layers_than_stages_is_refused_naming_the_largest_that_works():
    message = r"3 layers cannot fill 4 pipeline stages .* largest pp \* vpp that works is 3$"
    with pytest.raises(UserError, match=message):
        split_layers(3, 4)


def test_stages_hold_layers_in_model_order():
    assert stage_ranges((24, 24, 24, 22)) == [
        range(24),
        range(24, 48),
        range(48, 72),
        range(72, 94),
    ]


@given(models())
def test_stages_of_many_layouts_are_split_by_the_same_rule(model: tuple[int, int]):
    num_layers, stages = model
    begins, ends = split_layers_many(num_layers, np.full(stages, stages), np.arange(stages))
    ranges = stage_ranges(split_layers(num_layers, stages))
    assert [range(a, b) for a, b in zip(begins, ends, strict=True)] == ranges


def test_stages_of_every_small_model_are_split_by_the_same_rule():
    for num_layers in range(1, 40):
        for stages in range(1, num_layers + 1):
            begins, ends = split_layers_many(num_layers, np.full(stages, stages), np.arange(stages))
            assert tuple((ends - begins).tolist()) == split_layers(num_layers, stages)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(pp=3), [[0], [1], [2]]),
        (Layout(pp=3, vpp=2), [[0, 3], [1, 4], [2, 5]]),
        (Layout(pp=3, vpp=2, schedule="dualpipe-v"), [[0, 5], [1, 4], [2, 3]]),
        (Layout(pp=2, vpp=2, schedule="zb-v"), [[0, 3], [1, 2]]),
        (Layout(pp=4, schedule="dualpipe"), [[0, 3], [1, 2], [2, 1], [3, 0]]),
    ],
)
def test_the_schedule_says_which_rank_holds_which_stages(layout: Layout, ranks: list[list[int]]):
    assert [rank_stages(layout, rank) for rank in range(layout.pp)] == ranks


@pytest.mark.parametrize(
    ("num_layers", "stages"), [(30, 4), (10, 3), (7, 2), (61, 8), (46, 4), (94, 4), (3, 3)]
)
def test_every_layer_is_placed_once_and_sizes_differ_by_at_most_one(num_layers: int, stages: int):
    layers = split_layers(num_layers, stages)
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
