"""Predictions of published rows: which of a row's possible layouts is meant, and its step time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from benchmarks.measurements import Case
from fivefold.layout.many import Layouts
from fivefold.layout.notation import Layout
from fivefold.plan.constants import Constants
from fivefold.plan.time import step_time, traffic

DEVICE_CONSTANTS = ("processors",)
"""Constants that are facts of a device and never fitted."""


def choose(cases: Sequence[Case], values: dict[str, float]) -> list[Layout]:
    """For every case the layout that is meant: of those that fit with the least recomputation,
    the one with the least predicted time, since published runs were tuned."""
    chosen = []
    for case in cases:
        least = [c for c in case.choices if c.recompute == case.choices[0].recompute]
        if len(least) == 1:
            chosen.append(least[0])
            continue
        steps = predict_steps([case] * len(least), least, values)
        chosen.append(least[int(np.argmin(steps))])
    return chosen


class Predictor:
    """Predicts the step times of cases under any constants. Rows of one job are computed together,
    and what they send is computed once."""

    def __init__(self, cases: Sequence[Case], chosen: Sequence[Layout]) -> None:
        alike = defaultdict(list)
        for index, (case, layout) in enumerate(zip(cases, chosen, strict=True)):
            alike[id_of(case), layout.order, layout.layers].append(index)
        self.measured = np.array([case.step_s or np.nan for case in cases])
        self.groups = []
        for indices in alike.values():
            job = cases[indices[0]].job
            layouts = Layouts.of([chosen[i] for i in indices])
            # Batches that the layout does not divide run partly filled micro-batches.
            batches = np.array([cases[i].job.global_batch for i in indices])
            share = batches / layouts.global_batch
            self.groups.append((indices, job, layouts, traffic(job, layouts), share))

    def steps(self, values: dict[str, float] | None = None) -> NDArray[np.float64]:
        """Seconds of each case's step; with the device's own constants if no values are given."""
        predicted = np.empty(len(self.measured))
        for indices, job, layouts, sent, share in self.groups:
            time = step_time(job, layouts, sent, constants(job, values))
            predicted[indices] = time.step * share
        return predicted

    def errors(self, values: dict[str, float] | None = None) -> NDArray[np.float64]:
        """log(predicted / measured) of each case's step time."""
        return np.log(self.steps(values) / self.measured)


def predict_steps(
    cases: Sequence[Case], chosen: Sequence[Layout], values: dict[str, float] | None = None
) -> NDArray[np.float64]:
    """Seconds of each case's step."""
    return Predictor(cases, chosen).steps(values)


def id_of(case: Case) -> tuple:
    """Equal for cases whose jobs differ in nothing but the global batch."""
    job = case.job
    cluster = (job.cluster.name, job.cluster.num_devices, job.cluster.system[-1].bandwidth)
    return (
        repr(job.config), cluster, job.sequence_length, job.precision, job.engine, job.mtp,
    )


def constants(job, values: dict[str, float] | None) -> Constants:
    own = Constants.of(job.cluster.device)
    if values is None:
        return own
    facts = {name: getattr(own, name) for name in DEVICE_CONSTANTS}
    known = {field.name for field in fields(Constants)}
    return Constants(**({k: v for k, v in values.items() if k in known} | facts))
