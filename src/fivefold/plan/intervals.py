"""How far predictions are from the truth: `errors.yaml`, from the published rows.

An interval holds the truth in `coverage` of the cases: its ends are quantiles of measured over
predicted on the rows of the same kind, a cluster of rows (one model on one GPU) counted once.
Kinds get wider until one has rows enough; for a device that no row is of, the interval is widened
by as much as makes it hold on each device when that device's rows are left out.
`benchmarks/accuracy.py --write` makes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from pathlib import Path
from typing import Any

from fivefold.files import read_yaml
from fivefold.layout.notation import Layout
from fivefold.plan.engines import Job

ERRORS = Path(__file__).with_name("errors.yaml")

Interval = tuple[float, float]


@lru_cache(maxsize=1)
def errors() -> dict[str, Any]:
    """What is known of the errors. Keys: see the top of the file itself."""
    found = read_yaml(ERRORS, "file of errors")
    assert isinstance(found, dict)
    return found


def kinds(job: Job, layout: Layout) -> tuple[str, ...]:
    """The kinds of a prediction, the narrowest first."""
    model = "MoE" if job.config.moe else "dense"
    one = layout.world_size <= job.cluster.tier_sizes[0]
    return f"{model}, {'one domain' if one else 'several domains'}", model, "all"


def step_interval(job: Job, layout: Layout, step_s: float) -> Interval:
    """Seconds between which the step lies, for a predicted one."""
    low, high = ratios(errors()["step_time"], kinds(job, layout), job.cluster.device.name)
    return step_s * low, step_s * high


def memory_interval(job: Job, layout: Layout, peak_bytes: float) -> Interval:
    """Bytes between which the peak lies, for a predicted one."""
    low, high = ratios(errors()["memory"], kinds(job, layout), job.cluster.device.name)
    return peak_bytes * low, peak_bytes * high


def ratios(known: dict[str, Any], names: Sequence[str], device: str) -> Interval:
    """Measured over predicted, lowest and highest, for the first of the kinds that is known."""
    kind = next(known["kinds"][name] for name in names if name in known["kinds"])
    width = 1.0 if device in known["devices"] else known["unseen_device"]
    return kind["low"] ** width, kind["high"] ** width


@dataclass(frozen=True)
class MeasurementCalibration:
    """What steps that were measured say of the other layouts of the same job."""

    factor: float  # what predicted steps are multiplied by
    kept: float  # share of the shared error that is still unknown, and with it of the usual bias
    narrower: float  # width of the interval over the one without a measurement, on a log scale

    def interval(self, job: Job, layout: Layout, step_s: float) -> Interval:
        """Seconds between which the step lies; `step_s` as predicted, without the factor."""
        low, high = step_interval(job, layout, step_s)
        low, high = self.ratios(low / step_s, high / step_s)
        return step_s * low, step_s * high

    def ratios(self, low: float, high: float) -> Interval:
        """Measured over predicted, lowest and highest, from those without a measurement."""
        middle, half = (log(low) + log(high)) / 2, (log(high) - log(low)) / 2
        middle, half = self.kept * middle, self.narrower * half
        return self.factor * exp(middle - half), self.factor * exp(middle + half)


def calibrate_with_measurements(measured: Sequence[tuple[float, float]]) -> MeasurementCalibration:
    """From (measured, predicted) seconds of layouts of one job.

    The logarithm of measured over predicted is what all layouts of a job share (the machine, the
    program, the model) plus what is the layout's own, two independent normal errors with the
    spreads in `errors.yaml`. So the shared part is the mean of k measurements, shrunk by
    k shared^2 / (k shared^2 + own^2): one measurement is not taken whole, for a part of it is the
    layout's own.
    """
    if not measured:
        return MeasurementCalibration(1.0, 1.0, 1.0)
    spread = errors()["step_time"]
    shared, own, k = spread["shared"] ** 2, spread["own"] ** 2, len(measured)
    trusted = k * shared / (k * shared + own)
    mean = sum(log(seconds / predicted) for seconds, predicted in measured) / k
    left = shared * (1 - trusted) + own
    return MeasurementCalibration(exp(trusted * mean), 1 - trusted, (left / (shared + own)) ** 0.5)
