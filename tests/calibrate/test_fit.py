from __future__ import annotations

import itertools

import numpy as np
import pytest

from fivefold.calibrate.fit import (
    CPU_KEYS_AT_A_TIME,
    LARGE_BYTES,
    causal_scores,
    fit_messages,
    fit_operations,
    least_relative_squares,
)
from fivefold.calibrate.points import Point


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


def products() -> list[Point]:
    """Of a device with 100 GFLOP/s and 20 GB/s, and 2 us a call."""
    return [
        Point(
            "product",
            {"part": "forward", "m": m, "n": n, "k": k},
            1.0,  # on a CPU the wall clock says nothing
            2e-6 + 2 * m * n * k / 1e11 + 4 * (m * n + n * k + m * k) / 2e10,
        )
        for m, n, k in itertools.product((16, 64, 512), repeat=3)
    ]


def test_the_speeds_of_products_are_found() -> None:
    (fit,) = fit_operations(products(), "cpu")
    assert (fit.what, fit.names["part"], fit.clock) == ("product", "forward", "cpu")
    assert fit.seconds == pytest.approx({"call": 2e-6, "flop": 1e-11, "byte": 5e-11})
    assert max(fit.errors) < 1e-9
    assert fit.at(flop=1e9, byte=1e6) == pytest.approx(2e-6 + 1e-2 + 5e-5)


def test_on_a_gpu_the_wall_clock_counts() -> None:
    (fit,) = fit_operations(products(), "cuda")
    assert fit.seconds["call"] == pytest.approx(1.0)


def test_a_gradient_that_is_added_to_a_sum_is_read_and_written_in_fp32() -> None:
    points = [
        Point(
            "product",
            {"part": "weight", "m": m, "n": n, "k": k},
            0.0,
            2 * (m * n + m * k) + 8 * n * k,  # a second a byte
            "bf16",
        )
        for m, n, k in itertools.product((16, 64, 512), repeat=3)
    ]
    [fit] = fit_operations(points, "cpu")
    assert fit.seconds == pytest.approx({"call": 0, "flop": 0, "byte": 1}, abs=1e-6)


def test_the_errors_are_those_of_the_points() -> None:
    points = [Point("host", {"op": "node"}, 0, s) for s in (1.0, 3.0)]
    [fit] = fit_operations(points, "cpu")
    # The least squares of x - 1 and x / 3 - 1: x = (1 + 1/3) / (1 + 1/9) = 1.2
    assert fit.seconds == pytest.approx({"call": 1.2})
    assert fit.errors == pytest.approx((0.2, 0.6))
    assert fit.record()["median_error"] == pytest.approx(0.4)


@pytest.mark.parametrize("sequence", [64, 512, 768, 1024, 4096])
def test_scores_on_cpus_are_those_of_blocks_that_are_not_masked_as_a_whole(sequence: int) -> None:
    block = min(sequence, CPU_KEYS_AT_A_TIME)
    queries = np.arange(sequence)
    keys = (queries // block + 1) * block  # up to the end of the query's own block
    computed = np.minimum(keys, sequence).sum()
    assert causal_scores(sequence, "cpu") == pytest.approx(computed, rel=0.15)
    assert causal_scores(sequence, "cuda") == (np.arange(sequence) + 1).sum()


def message(op: str, size: int, size_bytes: int, cpu_s: float, wall_s: float) -> Point:
    sizes = {"op": op, "size": size, "groups": 2, "stride": 1, "bytes": size_bytes}
    return Point("message", sizes, wall_s, cpu_s)


def test_messages_are_fitted_by_what_goes_over_the_wire_and_by_both_clocks() -> None:
    points = [
        message("all_gather", 4, size, 1e-4 + 0.75 * size * 1e-9, 1e-3 + 0.75 * size * 2e-9)
        for size in (256, 65536, 10**7)
    ]
    wall, cpu = fit_messages(points, "cpu")
    assert (wall.clock, cpu.clock) == ("wall", "cpu")
    assert wall.seconds == pytest.approx({"call": 1e-3, "byte": 2e-9})
    assert cpu.seconds == pytest.approx({"call": 1e-4, "byte": 1e-9})
    assert cpu.names == {"op": "all_gather", "size": 4, "groups": 2, "stride": 1}


def test_large_all_reduces_on_cpus_are_another_algorithm() -> None:
    points = [
        message("all_reduce", 2, size, size * (1e-9 if size < LARGE_BYTES else 5e-9), 1.0)
        for size in (256, 4096, LARGE_BYTES, 4 * LARGE_BYTES)
    ]
    fits = {f.names["from_bytes"]: f for f in fit_messages(points, "cpu") if f.clock == "cpu"}
    assert fits[0].seconds["byte"] == pytest.approx(1e-9)
    assert fits[LARGE_BYTES].seconds["byte"] == pytest.approx(5e-9)
    assert all("from_bytes" not in fit.names for fit in fit_messages(points, "cuda"))
