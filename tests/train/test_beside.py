"""The plan beside the run: the arithmetic of it. Runs that end with it are in test_loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.cluster.cluster import load_cluster
from fivefold.layout.notation import Layout
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.job import ENGINES, Job
from fivefold.spans import PARTS, Spans, Work
from fivefold.train.beside import Tally, predicted_seconds
from tests.parallel.dry import tiny_mixture


def planned(layout: Layout) -> Estimate:
    cluster = load_cluster("dgx-h100", layout.world_size)
    return estimate(Job(tiny_mixture(), cluster, 48, 8, "bf16", ENGINES["fivefold"]), layout)


def step(total_s: float, data_s: float) -> Spans:
    return Spans(1.0, 1.0 + total_s, [Work("data", 1.0, 1.0 + data_s)])


def test_the_first_step_is_left_out_of_the_mean_if_there_is_another() -> None:
    tally = Tally()
    tally.add(step(9.0, 1.0))
    assert tally.mean()["compute"] == 8.0
    tally.add(step(2.0, 0.5))
    tally.add(step(3.0, 0.5))
    mean = tally.mean()
    assert (mean["compute"], mean["data"], tally.steps) == (2.0, 0.5, 2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, accumulation=4),
        Layout(dp=2, tp=2, sp=True, pp=2, ep=2, accumulation=4),
        Layout(pp=4, accumulation=8),
    ],
)
def test_the_predicted_parts_are_the_predicted_step(layout: Layout) -> None:
    made = planned(layout)
    parts = predicted_seconds(made)
    assert sum(parts.values()) == pytest.approx(made.step_time_s)
    assert parts["compute"] > 0 and parts["optimizer"] > 0
    assert parts["pp"] == pytest.approx(0)  # no message of the pipeline's but those of stages
    assert (parts["bubble"] > 0) == (layout.pp > 1)
    assert "data" not in parts and set(parts) < {*PARTS, "other"}


def test_a_part_of_the_plan_that_has_no_counterpart_is_other() -> None:
    made = planned(Layout(dp=2, accumulation=4))
    more = replace(made, seconds={**made.seconds, "weather": 3.0})
    assert predicted_seconds(more)["other"] == predicted_seconds(made)["other"] + 3.0
