from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster.load import load_cluster
from fivefold.layout.notation import parse
from fivefold.model.huggingface.presets import load_preset
from fivefold.plan import intervals
from fivefold.plan.engines import Job
from fivefold.plan.estimate import estimate
from fivefold.plan.intervals import (
    calibrate_with_measurements,
    kinds,
    memory_interval,
    ratios,
    step_interval,
)

KNOWN = {
    "kinds": {"all": {"low": 0.8, "high": 1.25}, "MoE": {"low": 0.5, "high": 2.0}},
    "devices": ["H100 SXM"],
    "unseen_device": 2.0,
}


def job(model: str = "llama-3.1-8b", cluster: str = "dgx-h100", gpus: int = 16) -> Job:
    return Job(load_preset(model), load_cluster(cluster, gpus), 4096, 256)


def test_the_prediction_lies_inside_its_interval():
    for each in (job(), job("mixtral-8x7b"), job(cluster="mi300x"), job(gpus=8)):
        layout = parse("zero1", each.cluster.num_devices)
        low, high = step_interval(each, layout, 2.0)
        assert 0 < low <= 2.0 <= high
        low, high = memory_interval(each, layout, 70e9)
        assert 0 < low <= 70e9 <= high


def test_an_interval_is_in_proportion_to_what_is_predicted():
    layout = parse("zero1", 16)
    low, high = step_interval(job(), layout, 1.0)
    assert step_interval(job(), layout, 3.0) == pytest.approx((3 * low, 3 * high))


def test_the_narrowest_kind_that_is_known_is_taken():
    assert ratios(KNOWN, ("MoE, one domain", "MoE", "all"), "H100 SXM") == (0.5, 2.0)
    assert ratios(KNOWN, ("dense, one domain", "dense", "all"), "H100 SXM") == (0.8, 1.25)


def test_kinds_tell_a_mixture_from_a_dense_model_and_one_domain_from_several():
    assert kinds(job(gpus=8), parse("dp8"))[0] == "dense, one domain"
    assert kinds(job("mixtral-8x7b"), parse("dp16"))[0] == "MoE, several domains"
    assert kinds(job(cluster="gb200-nvl72", gpus=64), parse("dp64"))[0] == "dense, one domain"


def test_the_interval_of_a_device_without_rows_is_wider():
    assert ratios(KNOWN, ("all",), "new") == pytest.approx((0.8**2, 1.25**2))
    assert intervals.errors()["step_time"]["unseen_device"] >= 1


def test_estimates_carry_their_intervals():
    layout = parse("dp16 zero1 ga16")
    each = estimate(job(), layout)
    assert (each.step_time_low_s, each.step_time_high_s) == step_interval(
        job(), layout, each.step_time_s
    )
    assert (each.peak_memory_low_bytes, each.peak_memory_high_bytes) == memory_interval(
        job(), layout, each.peak_memory_bytes
    )


def test_without_a_measurement_nothing_changes():
    nothing = calibrate_with_measurements([])
    assert nothing.factor == nothing.narrower == 1
    layout = parse("zero1", 16)
    assert nothing.interval(job(), layout, 2.0) == pytest.approx(step_interval(job(), layout, 2.0))


def test_a_measured_step_moves_the_others_part_of_the_way_and_more_of_them_further():
    one, four = (
        calibrate_with_measurements([(1.2, 1.0)]),
        calibrate_with_measurements([(1.2, 1.0)] * 4),
    )
    assert 1 < one.factor < four.factor < 1.2
    assert 1 > one.narrower > four.narrower > 0


def test_measured_steps_that_contradict_each_other_cancel():
    assert calibrate_with_measurements([(1.2, 1.0), (1.0, 1.2)]).factor == pytest.approx(1.0)


def test_the_shrinkage_is_what_least_squares_says(monkeypatch):
    """Simulated jobs with a shared and an own error: no other share of the measured error to take
    for shared does better."""
    shared, own = 0.1, 0.05
    spread = {"step_time": {"shared": shared, "own": own}}
    monkeypatch.setattr(intervals, "errors", lambda: spread)
    random = np.random.default_rng(0)
    common = random.normal(0, shared, 20_000)
    first, second = common + random.normal(0, own, (2, 20_000))
    taken = np.log(calibrate_with_measurements([(float(np.exp(0.1)), 1.0)]).factor) / 0.1

    def left(share: float) -> float:
        return float(np.mean((second - share * first) ** 2))

    assert left(taken) <= min(left(taken - 0.05), left(taken + 0.05))
    narrower = calibrate_with_measurements([(1.0, 1.0)]).narrower
    assert left(taken) ** 0.5 == pytest.approx(narrower * (shared**2 + own**2) ** 0.5, rel=0.02)
