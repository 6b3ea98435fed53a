from __future__ import annotations

import numpy as np
import pytest

from fivefold.calibrate.fit import least_relative_squares


def test_what_made_the_points_comes_back() -> None:
    work = np.array([[1, n, n * n] for n in (1, 3, 10, 50, 200, 1000)], dtype=float)
    truth = np.array([2e-6, 3e-9, 5e-12])
    assert least_relative_squares(work, work @ truth) == pytest.approx(truth)


def test_noise_moves_it_by_as_much() -> None:
    random = np.random.default_rng(0)
    work = np.array([[1, n] for n in np.geomspace(1, 1e6, 200)])
    truth = np.array([1e-4, 1e-9])
    seconds = work @ truth * random.normal(1, 0.05, 200)
    assert least_relative_squares(work, seconds) == pytest.approx(truth, rel=0.02)


def test_no_term_is_negative_and_the_best_of_the_others_is_kept() -> None:
    n = np.array([1.0, 2.0, 3.0])
    work = np.stack([np.ones(3), n], axis=1)
    # Free least squares would take a negative cost of a call.
    x = least_relative_squares(work, n - 0.5)
    assert x[0] == 0
    slope = (n / (n - 0.5)).sum() / ((n / (n - 0.5)) ** 2).sum()  # the minimum without it
    assert x[1] == pytest.approx(slope)


def test_a_term_that_no_point_has_is_zero() -> None:
    work = np.array([[1.0, 5.0, 0.0], [1.0, 10.0, 0.0]])
    assert least_relative_squares(work, np.array([6.0, 11.0])) == pytest.approx([1, 1, 0])
