from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.legality import check
from fivefold.layout.notation import ORDER, Layout, parse
from fivefold.layout.ranks import (
    AXES,
    coordinates,
    dense_ranks,
    group,
    groups,
    sparse_ranks,
)
from fivefold.text import divisors


@st.composite
def legal_layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout of up to 288 ranks."""
    degree = st.sampled_from([1, 2, 3])
    tp, pp, ulysses, ring = (draw(degree) for _ in range(4))
    dp = draw(st.sampled_from([1, 2, 4] if tp * pp * ulysses * ring <= 36 else [1, 2]))
    has_shards = dp * ulysses * ring > 1
    dp_replicate = draw(st.sampled_from(divisors(dp)))
    if dp // dp_replicate * ulysses * ring == 1:
        dp_replicate = 1
    etp = draw(st.sampled_from([1, tp]))
    ranks = tp * ulysses * ring * dp // dp_replicate
    layout = Layout(
        tp=tp,
        pp=pp,
        ulysses=ulysses,
        ring=ring,
        dp=dp,
        dp_replicate=dp_replicate,
        zero=1 if has_shards else 0,
        etp=etp,
        ep=draw(st.sampled_from(divisors(ranks // etp))),
        order=tuple(draw(st.permutations(ORDER))),
    )
    check(layout)
    return layout


def pairs(text: str, axis: str) -> set[tuple[int, ...]]:
    return {tuple(row) for row in groups(parse(text), axis).tolist()}


# Tables written by hand


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("tp", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("dp", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        ("pp", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        ("ep", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("edp", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        ("stage", {(0, 1, 2, 3), (4, 5, 6, 7)}),
    ],
)
def test_two_of_each_in_the_default_order(axis: str, expected: set[tuple[int, ...]]):
    assert pairs("dp2 tp2 pp2 ep2", axis) == expected


@pytest.mark.parametrize(
    ("text", "axis", "expected"),
    [
        # Experts split like the other matrices: ep lives on dp, and tp stays tp.
        ("tp2 dp4 etp2 ep2", "etp", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("tp2 dp4 etp2 ep2", "ep", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        ("tp2 dp4 etp2 ep2", "edp", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        # Whole experts spread over the tp ranks first, then over dp.
        ("tp2 dp4 ep4", "ep", {(0, 1, 2, 3), (4, 5, 6, 7)}),
        # "ep" after "dp": the copies of an expert are neighbours, ep reaches far.
        ("dp4 ep2 order=tp-cp-dp-ep-pp", "ep", {(0, 2), (1, 3)}),
        ("dp4 ep2 order=tp-cp-dp-ep-pp", "edp", {(0, 1), (2, 3)}),
        ("tp2 dp2 ep2 order=tp-cp-dp-ep-pp", "ep", {(0, 2), (1, 3)}),
        # The order nests pp innermost, tp outermost.
        ("tp2 dp2 pp2 order=pp-dp-ep-cp-tp", "pp", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("tp2 dp2 pp2 order=pp-dp-ep-cp-tp", "tp", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        ("tp2 dp2 pp2 ep2 order=pp-dp-cp-tp-ep", "ep", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        ("tp2 dp2 pp2 ep2 order=pp-ep-dp-cp-tp", "ep", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        # cp: a ring of ulysses groups.
        ("ulysses2 ring2 dp2", "ulysses", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("ulysses2 ring2 dp2", "ring", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        ("ulysses2 ring2 dp2", "cp", {(0, 1, 2, 3), (4, 5, 6, 7)}),
        ("ulysses2 ring2 dp2", "dp", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        # dp_replicate is the outer part of dp, and ep stays inside one replica, even where the
        # order would have it reach across.
        ("dp4 dp_replicate2 zero1", "dp_shard", {(0, 1), (2, 3)}),
        ("dp4 dp_replicate2 zero1", "dp_replicate", {(0, 2), (1, 3)}),
        ("dp4 dp_replicate2 zero1 ep2 order=tp-cp-dp-ep-pp", "ep", {(0, 1), (2, 3)}),
        ("dp4 dp_replicate2 zero1 ep2", "edp", {(0, 2), (1, 3)}),
        ("tp2 dp2 ring2", "dp_cp", {(0, 2, 4, 6), (1, 3, 5, 7)}),
        ("ring2 dp4 dp_replicate2 zero1", "dp_shard_cp", {(0, 1, 2, 3), (4, 5, 6, 7)}),
    ],
)
def test_groups_written_by_hand(text: str, axis: str, expected: set[tuple[int, ...]]):
    assert pairs(text, axis) == expected


def test_coordinates_written_by_hand():
    layout = parse("tp2 ring2 dp4 dp_replicate2 zero1 pp2 ep4")
    # 13 = tp 1 + 2 * ring 0 + 4 * dp 3; in its replica, ranks 8 to 15, it is the sixth.
    assert coordinates(layout, 13) == {
        "pp": 0,
        "dp": 3,
        "dp_replicate": 1,
        "dp_shard": 1,
        "cp": 0,
        "ring": 0,
        "ulysses": 0,
        "tp": 1,
        "edp": 3,
        "edp_shard": 1,
        "ep": 1,
        "etp": 0,
    }


# What holds for every layout


@given(legal_layouts())
def test_both_arrays_hold_every_rank_once_and_agree_on_stages_and_replicas(layout: Layout):
    dense, sparse = dense_ranks(layout), sparse_ranks(layout)
    everyone = list(range(layout.world_size))
    assert sorted(dense.ravel().tolist()) == sorted(sparse.ravel().tolist()) == everyone
    rows = (layout.pp * layout.dp_replicate, -1)
    np.testing.assert_array_equal(
        np.sort(dense.reshape(rows), axis=1), np.sort(sparse.reshape(rows), axis=1)
    )


@given(legal_layouts())
def test_shapes_are_the_degrees(layout: Layout):
    assert dense_ranks(layout).shape == (
        layout.pp,
        layout.dp_replicate,
        layout.dp_shard,
        layout.ring,
        layout.ulysses,
        layout.tp,
    )
    edp_shard = layout.edp // layout.dp_replicate
    assert sparse_ranks(layout).shape == (
        layout.pp,
        layout.dp_replicate,
        edp_shard,
        layout.ep,
        layout.etp,
    )


@given(legal_layouts(), st.sampled_from(sorted(AXES)))
def test_the_groups_of_an_axis_are_ascending_and_hold_every_rank_once(layout: Layout, axis: str):
    rows = groups(layout, axis)
    assert sorted(rows.ravel().tolist()) == list(range(layout.world_size))
    assert (np.diff(rows, axis=1) > 0).all()


@given(legal_layouts(), st.data())
def test_a_member_of_a_group_differs_from_the_others_in_that_axis_only(
    layout: Layout, data: st.DataObject
):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    dense, sparse = {"pp", "dp", "cp", "tp"}, {"pp", "edp", "ep", "etp"}
    for axis, axes in [(axis, dense) for axis in dense] + [("ep", sparse), ("etp", sparse)]:
        members = [coordinates(layout, member) for member in group(layout, axis, rank)]
        assert [member[axis] for member in members] == list(range(getattr(layout, axis)))
        assert all(m[name] == members[0][name] for m in members for name in axes - {axis})


@given(legal_layouts(), st.data())
def test_the_copies_of_an_experts_weights_are_the_ranks_with_its_pp_ep_and_etp(
    layout: Layout, data: st.DataObject
):
    rank = data.draw(st.integers(0, layout.world_size - 1))

    def experts_of(member: int) -> tuple[int, int, int]:
        place = coordinates(layout, member)
        return place["pp"], place["ep"], place["etp"]

    holders = [m for m in range(layout.world_size) if experts_of(m) == experts_of(rank)]
    assert tuple(holders) == group(layout, "edp", rank)
    assert len(holders) == layout.edp


@given(legal_layouts(), st.data())
def test_an_ep_group_stays_in_one_stage_and_replica(layout: Layout, data: st.DataObject):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    members = [coordinates(layout, member) for member in group(layout, "ep", rank)]
    assert len({(member["pp"], member["dp_replicate"]) for member in members}) == 1
    if layout.etp > 1:
        assert len({member["tp"] for member in members}) == 1


@given(legal_layouts())
def test_experts_split_by_tp_use_the_tp_groups(layout: Layout):
    if layout.etp > 1:
        assert sorted(groups(layout, "etp").tolist()) == sorted(groups(layout, "tp").tolist())


def test_a_rank_outside_the_layout_is_refused():
    for rank in (-1, 8):
        with pytest.raises(UserError, match="they are 0 to 7"):
            coordinates(parse("dp8"), rank)
        with pytest.raises(UserError, match="they are 0 to 7"):
            group(parse("dp8"), "dp", rank)


def test_the_arrays_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        dense_ranks(parse("dp8"))[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        sparse_ranks(parse("dp8"))[0] = 1
