"""The learning rate of a step: a linear warm-up, then a decay to a fraction of the peak."""

from __future__ import annotations

import math

from fivefold.train.runfile import Run


def learning_rate(step: int, run: Run) -> float:
    """The rate of the update that follows `step` finished updates (0 for the first).

    It is a function of the step and the run file alone: no layout, number of ranks or resume
    changes it. The warm-up rises from `lr / warmup_steps` and is at the peak at its last step;
    cosine and linear decay would reach `lr_schedule.final_fraction * lr` at step `run.steps`.
    The cosine is that of Loshchilov and Hutter, SGDR (2017), equation 5, without restarts.
    """
    peak, schedule = run.optimizer.lr, run.lr_schedule
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if step >= run.steps:
        progress = 1.0
    else:
        progress = (step - schedule.warmup_steps) / (run.steps - schedule.warmup_steps)
    height = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
    }[schedule.decay]
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * height)
