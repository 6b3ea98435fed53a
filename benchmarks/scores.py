"""Published rows with what is predicted for them, and figures of their errors.

An error is predicted / measured - 1. A cluster (rows of one model on one GPU) counts once: by the
median of its rows' |errors|, and by the median of its errors for the bias.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measurements import Case
from benchmarks.predictions import choose, predict_steps
from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.plan.memory.states import estimate_memory

FAILURES = (UserError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a row that makes no sense may raise."""


@dataclass(frozen=True)
class Scored:
    """A row and its prediction."""

    case: Case
    layout: Layout  # the one that is meant
    step_s: float | None  # predicted, where the row says what was measured
    memory_bytes: float | None  # likewise: what the source would print

    @property
    def step_error(self) -> float | None:
        return _error(self.step_s, self.case.step_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.memory_bytes, self.case.memory_bytes)

    @property
    def splits(self) -> list[str]:
        """The splits that the layout has."""
        layout = self.layout
        degrees = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep}
        used = [name for name, degree in degrees.items() if degree > 1]
        used += ["ZeRO-3"] if layout.zero == 3 else []
        return used or ["DP only"]


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def score(cases: Sequence[Case]) -> tuple[list[Scored], list[tuple[str, str]]]:
    """Predictions of all cases, and (id, reason) of those for which there is none."""
    try:
        return _together(cases), []
    except FAILURES as error:
        if len(cases) == 1:
            return [], [(cases[0].id, f"no prediction: {error}")]
    # Halving finds the few that fail in a few steps.
    half = len(cases) // 2
    (first, first_failed), (second, second_failed) = score(cases[:half]), score(cases[half:])
    return first + second, first_failed + second_failed


def _together(cases: Sequence[Case]) -> list[Scored]:
    layouts = choose(cases, None)
    timed = [i for i, case in enumerate(cases) if case.step_s is not None]
    predicted = predict_steps([cases[i] for i in timed], [layouts[i] for i in timed])
    steps = dict(zip(timed, predicted.tolist(), strict=True))
    scored = [
        Scored(case, layout, steps.get(i), _memory_bytes(case, layout))
        for i, (case, layout) in enumerate(zip(cases, layouts, strict=True))
    ]
    for each in scored:
        for value in (each.step_s, each.memory_bytes):
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ValueError(f"{each.layout} is predicted to take {value}")
    return scored


def _memory_bytes(case: Case, layout: Layout) -> float | None:
    if case.memory_bytes is None:
        return None
    memory = estimate_memory(case.job, LayoutBatch.of([layout]))
    printed = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "device": memory.peak_bytes,
    }[case.printed_memory]
    return float(np.ravel(printed)[0])


def figures(errors: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Of (cluster, error): rows, clusters, median and 90th percentile of |error|, and bias."""
    by_cluster = defaultdict(list)
    for cluster, error in errors:
        by_cluster[cluster].append(error)
    if not by_cluster:
        return dict.fromkeys(("median_abs_error", "p90_abs_error", "bias")) | {
            "rows": 0,
            "clusters": 0,
        }
    once = [float(np.median(np.abs(each))) for each in by_cluster.values()]
    return {
        "rows": sum(map(len, by_cluster.values())),
        "clusters": len(by_cluster),
        "median_abs_error": float(np.median(once)),
        "p90_abs_error": float(np.percentile(once, 90)),
        "bias": float(np.median([np.median(each) for each in by_cluster.values()])),
    }


def both(scored: Iterable[Scored]) -> dict[str, dict[str, Any]]:
    """The figures of step time and of peak memory."""
    rows = list(scored)
    steps = ((r.case.cluster, r.step_error) for r in rows if r.step_error is not None)
    memory = ((r.case.cluster, r.memory_error) for r in rows if r.memory_error is not None)
    return {"time": figures(steps), "memory": figures(memory)}
