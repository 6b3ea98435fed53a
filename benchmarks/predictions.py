"""Predictions of published rows: which of a row's possible layouts is meant, and its step time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.measurements import Case
from fivefold.cluster.constants import CONSTANTS, Constants
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.plan.engines import Job
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.time.step import step_time, traffic

ENTRIES = yaml.safe_load(CONSTANTS.read_text(encoding="utf-8"))
"""constants.yaml, whole."""


def choose(cases: Sequence[Case], values: dict[str, float] | None) -> list[Layout]:
    """For every case the layout that is meant: of those that fit with the least recomputation,
    the one with the least predicted time, since published runs were tuned."""
    chosen = []
    for case in cases:
        open_choices = _least_recomputation(case)
        steps = [0.0]
        if len(open_choices) > 1:
            steps = predict_steps([case] * len(open_choices), open_choices, values)
        chosen.append(open_choices[int(np.argmin(steps))])
    return chosen


@cache
def _least_recomputation(case: Case) -> list[Layout]:
    """Of the layouts that a row leaves open, those that fit with the least recomputation; those
    of the smallest micro-batch with the most recomputation where none fits."""
    if len(case.choices) == 1:
        return list(case.choices)
    memory = estimate_memory(case.job, LayoutBatch.of(case.choices))
    # Runs that were published did fit, with whatever room for fragmentation was left.
    needed = memory.peak_bytes - memory.kinds["overhead"]
    fits = needed <= case.job.cluster.device.memory_bytes
    if not np.any(fits):
        smallest = min(choice.micro_batch for choice in case.choices)
        most = case.choices[-1].recompute
        return [c for c in case.choices if c.micro_batch == smallest and c.recompute == most]
    fitting = [choice for choice, fit in zip(case.choices, fits, strict=True) if fit]
    least = (fitting[0].recompute, fitting[0].recompute_layers)
    return [c for c in fitting if (c.recompute, c.recompute_layers) == least]


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
            layouts = LayoutBatch.of([chosen[i] for i in indices])
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
        repr(job.config),
        cluster,
        job.sequence_length,
        job.precision,
        job.engine,
        job.mtp,
    )


def constants(job: Job, values: dict[str, float] | None) -> Constants:
    """The constants of a job's device, with `values` in their place: "name" stands for the default
    and "architecture.name" for an architecture's own."""
    own = job.cluster.device.constants
    if values is None:
        return own
    owner = dict.fromkeys(ENTRIES["default"], "")
    for architecture in ENTRIES["architectures"].get(job.cluster.device.key, ()):
        owner |= dict.fromkeys(ENTRIES.get(architecture, ()), f"{architecture}.")
    changed = {name: values.get(prefix + name) for name, prefix in owner.items()}
    return own.model_copy(update={n: value for n, value in changed.items() if value is not None})
