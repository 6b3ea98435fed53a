from __future__ import annotations

from fivefold.step_trace import StepTrace, Work
from fivefold.train.outcome import StepAverages


def step(total_s: float, data_s: float) -> StepTrace:
    return StepTrace(1.0, 1.0 + total_s, [Work("data", 1.0, 1.0 + data_s)])


def test_the_first_step_is_left_out_of_the_mean_if_there_is_another() -> None:
    averages = StepAverages()
    averages.add(step(9.0, 1.0))
    assert averages.mean()["compute"] == 8.0
    averages.add(step(2.0, 0.5))
    averages.add(step(3.0, 0.5))
    mean = averages.mean()
    assert (mean["compute"], mean["data"], averages.steps) == (2.0, 0.5, 2)
