"""A run compared with its plan: the arithmetic. Whole runs are in train/test_loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.cluster.load import load_cluster
from fivefold.layout.notation import Layout, parse
from fivefold.ledger import Ledger
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.step_trace import PARTS
from fivefold.train.outcome import RankOutcome
from fivefold.verify.plan_vs_run import measured_imbalance, predicted_seconds
from tests.parallel.dry import tiny_mixture


def planned(layout: Layout) -> Estimate:
    cluster = load_cluster("dgx-h100", layout.world_size)
    return estimate(Job(tiny_mixture(), cluster, 48, 8, "bf16", ENGINES["fivefold"]), layout)


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
    assert (parts["bubble"] > 1e-9) == (layout.pp > 1)  # it is a difference, so may round to more
    assert "data" not in parts and set(parts) < {*PARTS, "other"}


def test_a_part_of_the_plan_that_has_no_counterpart_is_other() -> None:
    made = planned(Layout(dp=2, accumulation=4))
    more = replace(made, seconds={**made.seconds, "weather": 3.0})
    assert predicted_seconds(more)["other"] == predicted_seconds(made)["other"] + 3.0


def test_the_imbalance_is_of_the_busiest_rank_of_each_group_and_layer() -> None:
    rows = [[30, 10], [10, 10], [20, 40], [20, 0]]  # two groups of two ranks, two layers
    outcomes = [RankOutcome({}, Ledger(), 0, 0, each) for each in rows]
    assert measured_imbalance(parse("dp4 ep2"), outcomes) == pytest.approx((1.5 + 1 + 1 + 2) / 4)
    assert measured_imbalance(parse("dp4"), outcomes) is None


def test_a_layer_without_tokens_is_even() -> None:
    outcomes = [RankOutcome({}, Ledger(), 0, 0, [0]) for _ in range(2)]
    assert measured_imbalance(parse("dp2 ep2"), outcomes) == 1.0
