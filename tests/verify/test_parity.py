from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.ledger import Ledger
from fivefold.parallel.data.memory import StateBytes
from fivefold.train.trainer import StepResult
from fivefold.verify.parity import Piece, RankRecord, assemble, compare

NO_STATE = StateBytes(0, 0, 0)

# --- putting tensors together --------------------------------------------------------------------


def piece(offset: tuple[int, ...], values: Any, shape: tuple[int, ...] = (4,)) -> Piece:
    return Piece(offset, shape, np.array(values, np.float32))


def test_pieces_become_whole_tensors() -> None:
    ranks = [{"w": piece((0, 1), [[1], [2]], (2, 2))}, {"w": piece((0, 0), [[3], [4]], (2, 2))}]
    wholes, differing = assemble(ranks)
    assert wholes["w"].tolist() == [[3, 1], [4, 2]] and not differing


def test_copies_that_differ_in_their_last_bit_are_named() -> None:
    same = [{"w": piece((0,), [1, 2, 3, 4])}, {"w": piece((2,), [3, 4])}]
    assert assemble(same)[1] == set()
    for other in (np.nextafter(np.float32(4), np.float32(5)), math.nan):
        assert assemble([*same, {"w": piece((3,), [other])}])[1] == {"w"}
    # Zero and minus zero are equal and have different bits.
    assert assemble([{"w": piece((0,), [0.0])}, {"w": piece((0,), [-0.0])}])[1] == {"w"}


def record_of(gradient: list[float], weight: list[float], norm: float = 1.0) -> RankRecord:
    result = StepResult(loss=2.0, balance_loss=0.0, grad_norm=norm, tokens=8, skipped=False)
    gradients = {"g": piece((0,), gradient), "tiny": piece((0,), [1e-9, 0, 0, 0])}
    return RankRecord([result], gradients, {"w": piece((0,), weight)}, Ledger(), NO_STATE, [{}])


ONE = record_of([1, 2, 3, 4], [0, 0, 0, 0])


def test_a_gradient_is_compared_relative_to_its_own_largest() -> None:
    split = record_of([1, 2, 3.00002, 4], [0, 0, 0, 1e-6])
    comparison = compare([ONE], [split])
    assert comparison.ok and comparison.worst_gradient == "g"
    assert comparison.max_grad_abs_diff == pytest.approx(2e-5, rel=0.02)
    assert comparison.max_grad_rel_diff == pytest.approx(5e-6, rel=0.02)
    assert comparison.max_weight_abs_diff == pytest.approx(1e-6)
    assert not compare([ONE], [record_of([1, 2, 3.0001, 4], [0, 0, 0, 0])]).ok


def test_a_gradient_of_almost_nothing_is_compared_relative_to_the_floor() -> None:
    split = record_of([1, 2, 3, 4], [0, 0, 0, 0])
    other = replace(split, gradients=split.gradients | {"tiny": piece((0,), [2e-9, 0, 0, 0])})
    comparison = compare([ONE], [other])
    assert comparison.worst_gradient == "tiny"
    assert comparison.max_grad_rel_diff == pytest.approx(1e-9 / 4e-4, rel=1e-3)


@pytest.mark.parametrize(
    "split",
    [
        record_of([1, 2, 3, math.nan], [0, 0, 0, 0]),
        record_of([1, 2, 3, 4], [0, 0, 0, math.inf]),
        record_of([1, 2, 3, 4], [0, 0, 0, 0], norm=math.nan),
        record_of([1, 2, 3, 4], [0, 0, 0, 2e-5]),
        record_of([1, 2, 3, 4], [0, 0, 0, 0], norm=1.0001),
        replace(ONE, gradients={"g": ONE.gradients["g"]}),  # a parameter is missing
        replace(ONE, weights={"w": piece((0,), [0, 0, 0])}),  # a part of one is missing
    ],
)
def test_what_is_not_finite_or_missing_or_too_far_is_not_the_same(split: RankRecord) -> None:
    assert compare([ONE], [ONE]).ok
    assert not compare([ONE], [split]).ok


def test_ranks_that_report_different_steps_are_not_the_same() -> None:
    other = record_of([1, 2, 3, 4], [0, 0, 0, 0], norm=1.0 + 1e-12)
    assert compare([ONE], [ONE, other]).differing_replicas == ["step results"]
