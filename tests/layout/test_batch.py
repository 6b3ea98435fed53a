from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Degrees, Layout, parse
from tests.layout.drawn import layouts

DEGREES = st.integers(1, 300)
SEVERAL = st.lists(layouts(DEGREES, pp=st.sampled_from([1, 1, 4, 16])), min_size=1, max_size=6)


@given(SEVERAL)
def test_each_layout_comes_back_as_it_was(several: list[Layout]):
    many = LayoutBatch.of(several)
    assert len(many) == len(several)
    assert [many[index] for index in range(len(many))] == several


DERIVED = [name for name, value in vars(Degrees).items() if isinstance(value, property)]


@given(SEVERAL)
def test_what_follows_from_the_degrees_is_the_same_for_many_as_for_one(several: list[Layout]):
    many = LayoutBatch.of(several)
    assert len(DERIVED) >= 8
    for name in DERIVED:
        assert getattr(many, name).tolist() == [getattr(each, name) for each in several], name


def test_layouts_are_chosen_by_mask_index_or_slice_and_joined():
    three = [parse(text) for text in ("tp2", "dp4 zero1", "pp2 recompute=full:3")]
    many = LayoutBatch.of(three)
    for chosen in (np.array([True, False, True]), np.array([0, 2]), slice(0, 3, 2)):
        part = many.take(chosen)
        assert [part[0], part[1]] == [three[0], three[2]]
    joined = LayoutBatch.concatenate([many, many.take(slice(1, 2))])
    assert [joined[index] for index in range(4)] == [*three, three[1]]


def test_order_and_layers_are_one_for_all():
    assert LayoutBatch.of([parse("pp2 layers=3,5"), parse("pp2 tp2 layers=3,5")]).layers == (3, 5)
    with pytest.raises(ValueError, match="differ in order= or layers="):
        LayoutBatch.of([parse("pp2 layers=3,5"), parse("pp2")])
    with pytest.raises(ValueError, match="cannot be joined"):
        LayoutBatch.concatenate([LayoutBatch.of([Layout()]), LayoutBatch.of([Layout(layers=(3,))])])
