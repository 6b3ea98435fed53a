from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.train.learning_rate import learning_rate
from fivefold.train.runfile import Run


def run(steps: int = 1000, lr: float = 3e-4, **schedule) -> Run:
    return Run.model_validate(
        {
            "model": "config.json",
            "data": {"sequence_length": 8},
            "global_batch": 4,
            "steps": steps,
            "optimizer": {"lr": lr},
            "lr_schedule": {"warmup_steps": 100, **schedule},
            "folder": Path(),
        }
    )


def test_the_cosine_of_field_case_81():
    """Cosine 3e-4 to 3e-5, warm-up 100: what a resumed run must find again at step 500."""
    assert learning_rate(500, run(steps=1000)) == pytest.approx(1.8844e-4, abs=5e-9)
    assert learning_rate(500, run(steps=2000)) == pytest.approx(2.7153e-4, abs=5e-9)


def test_the_warm_up_rises_from_the_first_step_to_the_peak_without_a_jump():
    rates = [learning_rate(step, run()) for step in range(102)]
    assert rates[0] == pytest.approx(3e-6)  # the first step is not wasted at rate 0
    assert rates[:100] == sorted(rates[:100])
    assert rates[99] == rates[100] == pytest.approx(3e-4)
    assert rates[101] < rates[100]


@pytest.mark.parametrize(
    ("decay", "middle", "end"), [("linear", 1.65e-4, 3e-5), ("constant", 3e-4, 3e-4)]
)
def test_the_other_decays_in_the_middle_and_at_the_end(decay, middle, end):
    assert learning_rate(550, run(decay=decay)) == pytest.approx(middle)
    assert learning_rate(1000, run(decay=decay)) == pytest.approx(end)


def test_steps_after_the_last_keep_the_final_rate():
    assert learning_rate(5000, run(final_fraction=0)) == 0
    assert learning_rate(1000, run()) == learning_rate(10**9, run()) == pytest.approx(3e-5)


def test_a_run_that_is_all_warm_up_ends_at_the_peak():
    assert learning_rate(99, run(steps=100)) == pytest.approx(3e-4)


def test_a_run_without_warm_up_starts_at_the_peak():
    assert learning_rate(0, run(warmup_steps=0)) == 3e-4
