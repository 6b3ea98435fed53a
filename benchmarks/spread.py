"""The spread of the errors: what `fivefold.plan.intervals` knows, and whether its intervals hold.

The truth's logarithm over the prediction's is taken. A cluster of rows has the weight of one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measurements import Case
from benchmarks.scores import Scored
from fivefold.cluster.constants import constants_of
from fivefold.plan.intervals import calibrate_with_measurements, kinds, ratios

COVERAGE = 0.8
"""The share of cases whose truth an interval should hold."""
ENOUGH = 8
"""Clusters that a kind must have."""
ENOUGH_OF_A_DEVICE = 3
"""Clusters from which on a device counts as one that rows are of."""
WIDEST = 4.0
"""Times an interval of a device that no row is of is widened at most."""

DEFAULT_CONSTANTS = constants_of("")
"""Of a device that has none of its own."""


@dataclass(frozen=True)
class Point:
    """One row: what its interval depends on, and how far the truth was from the prediction."""

    cluster: str
    program: str  # source and cluster: runs that share machine, program and model
    layout: str
    device: str
    kinds: tuple[str, ...]
    error: float  # log(measured / predicted)


def points(scored: Sequence[Scored], what: str) -> list[Point]:
    """Of "step_time" or "memory"."""
    found = []
    for each in scored:
        error = each.step_error if what == "step_time" else each.memory_error
        if error is not None:
            case = each.case
            found.append(
                Point(
                    case.cluster,
                    f"{case.source} {case.cluster}",
                    str(each.layout),
                    case.job.cluster.device.name,
                    kinds(case.job, each.layout),
                    -float(np.log1p(error)),
                )
            )
    return found


def known(rows: Sequence[Point]) -> dict[str, Any]:
    """A part of errors.yaml: the interval of each kind with rows enough, and the devices."""
    names = dict.fromkeys(name for row in rows for name in row.kinds)
    of_kind = {name: [row for row in rows if name in row.kinds] for name in names}
    intervals = {
        name: _interval(rows_of)
        for name, rows_of in of_kind.items()
        if name == "all" or _clusters(rows_of) >= ENOUGH
    }
    devices = dict.fromkeys(row.device for row in rows)
    return {
        "kinds": intervals,
        "devices": sorted(
            device
            for device in devices
            if _clusters([row for row in rows if row.device == device]) >= ENOUGH_OF_A_DEVICE
        ),
        "unseen_device": 1.0,
    }


def errors_file(scored: Sequence[Scored], as_unseen: Sequence[Scored]) -> dict[str, Any]:
    """What errors.yaml holds; `as_unseen`: the same rows, predicted as if nothing had been measured
    on their devices."""
    result: dict[str, Any] = {"coverage": COVERAGE}
    for what in ("step_time", "memory"):
        rows = points(scored, what)
        result[what] = known(rows) | {"unseen_device": widening(rows, points(as_unseen, what))}
    shared, own = shared_and_own(points(scored, "step_time"))
    result["step_time"] |= {"shared": shared, "own": own}
    return _rounded(result)


def _clusters(rows: Sequence[Point]) -> int:
    return len({row.cluster for row in rows})


def _weights(rows: Sequence[Point]) -> NDArray[np.float64]:
    count = defaultdict(int)
    for row in rows:
        count[row.cluster] += 1
    return np.array([1 / count[row.cluster] for row in rows])


def _interval(rows: Sequence[Point]) -> dict[str, Any]:
    """The quantiles that hold one more cluster with the probability COVERAGE: of n + 1 clusters,
    one of which may be anywhere. The prediction itself always lies inside."""
    order = np.argsort([row.error for row in rows])
    errors, weights = np.array([row.error for row in rows])[order], _weights(rows)[order]
    clusters = weights.sum()
    outside = (1 - COVERAGE) / 2 * (clusters + 1)
    middle = np.cumsum(weights) - weights / 2
    low = np.interp(outside, middle + 0.5, errors)
    high = np.interp(clusters + 1 - outside, middle + 0.5, errors)
    return {
        "clusters": round(float(clusters)),
        "low": float(np.exp(min(low, 0.0))),
        "high": float(np.exp(max(high, 0.0))),
    }


def _inside(row: Point, file: dict[str, Any]) -> bool:
    low, high = ratios(file, row.kinds, row.device)
    return bool(np.log(low) <= row.error <= np.log(high))


def unseen(case: Case) -> Case:
    """The case on a device of which only the data sheet is known."""
    cluster = case.job.cluster
    device = replace(cluster.device, measured={}, constants=DEFAULT_CONSTANTS)
    return replace(case, job=replace(case.job, cluster=replace(cluster, device=device)))


def held_out(
    rows: Sequence[Point],
    tried: Sequence[Point],
    group: Callable[[Point], str],
    width: float = 1.0,
) -> list[tuple[Point, bool]]:
    """Of every one of `tried` whether the truth lies in the interval that the rows of all other
    groups give, `width` times as wide if they are of other devices."""
    result = []
    for name in dict.fromkeys(group(row) for row in tried):
        others = [row for row in rows if group(row) != name]
        if others:
            file = known(others) | {"unseen_device": width}
            result += [(row, _inside(row, file)) for row in tried if group(row) == name]
    return result


def widening(rows: Sequence[Point], as_unseen: Sequence[Point]) -> float:
    """By how much intervals must be wider to hold COVERAGE of the clusters where the rows of their
    device are left out, and its measured speeds with them; a cluster counted once."""
    for width in np.arange(1.0, WIDEST, 0.05):
        held = held_out(rows, as_unseen, _device, float(width))
        if not held or _share(held) >= COVERAGE:
            return round(float(width), 2)
    return WIDEST


def _device(row: Point) -> str:
    return row.device


def _cluster(row: Point) -> str:
    return row.cluster


def _share(held: list[tuple[Point, bool]]) -> float:
    """Inside, a cluster counted once."""
    inside = [ok for _, ok in held]
    return float(np.average(inside, weights=_weights([row for row, _ in held])))


def coverage(scored: Sequence[Scored], as_unseen: Sequence[Scored]) -> dict[str, Any]:
    """How often the truth lay inside where its cluster (its device) was left out."""
    result: dict[str, Any] = {}
    for what in ("step_time", "memory"):
        rows, tried = points(scored, what), points(as_unseen, what)
        if not rows:
            continue
        file, width = known(rows), widening(rows, tried)
        result[what] = {
            "clusters_left_out": _covered(held_out(rows, rows, _cluster), file),
            "devices_left_out": _covered(held_out(rows, tried, _device, width), file),
            "unseen_device": width,
            "kinds": file["kinds"],
        }
    return result


def _covered(held: list[tuple[Point, bool]], file: dict[str, Any]) -> dict[str, Any]:
    """By the kind whose interval is used, and in all."""
    by = defaultdict(list)
    for row, inside in held:
        kind = next(name for name in row.kinds if name in file["kinds"])
        by[kind].append((row, inside))
    by["in all"] = list(held)
    return {
        name: {
            "rows": len(rows),
            "clusters": _clusters([row for row, _ in rows]),
            "inside": _share(rows) if rows else None,
        }
        for name, rows in by.items()
    }


# --- One measured step of one's own.


def _programs(rows: Sequence[Point]) -> list[dict[str, float]]:
    """By program, the mean error of each layout; of programs with two layouts or more."""
    by: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by[row.program][row.layout].append(row.error)
    means = [{k: float(np.mean(v)) for k, v in layouts.items()} for layouts in by.values()]
    return [layouts for layouts in means if len(layouts) > 1]


def shared_and_own(rows: Sequence[Point]) -> tuple[float, float]:
    """Standard deviations of the error that the layouts of a program share, and of each layout's
    own: analysis of variance with a program counted once, by medians, which a few odd programs
    do not move (1.48 times the median deviation is a normal's standard deviation)."""
    programs = _programs(rows)
    if not programs:
        return 0.0, 1.0
    variances = [np.var(list(each.values()), ddof=1) for each in programs]
    means = np.array([np.mean(list(each.values())) for each in programs])
    own = float(np.mean(np.minimum(variances, np.percentile(variances, 90))))
    around = 1.4826 * float(np.median(np.abs(means - np.median(means))))
    layouts = np.array([len(each) for each in programs])
    shared = max(around**2 - own * float(np.mean(1 / layouts)), 0.0)
    return shared**0.5, own**0.5


def sharpened(scored: Sequence[Scored]) -> dict[str, Any]:
    """Each layout of a program measured in turn, the others predicted without and with it."""
    rows = points(scored, "step_time")
    file = known(rows) | {"unseen_device": 1.0}
    interval = {row.program: ratios(file, row.kinds, row.device) for row in rows}
    by: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by[row.program][row.layout].append(row.error)
    before, after, inside = [], [], []
    for program, layouts in by.items():
        if len(layouts) < 2:
            continue
        errors = [float(np.mean(each)) for each in layouts.values()]
        mine, others = [], []
        for i, measured in enumerate(errors):
            known_step = calibrate_with_measurements([(float(np.exp(measured)), 1.0)])
            for other in (e for j, e in enumerate(errors) if j != i):
                left = other - np.log(known_step.factor)
                mine.append((abs(np.expm1(-other)), abs(np.expm1(-left))))
                low, high = known_step.ratios(*interval[program])
                others.append(low <= np.exp(other) <= high)
        before.append(float(np.median([b for b, _ in mine])))
        after.append(float(np.median([a for _, a in mine])))
        inside.append(float(np.mean(others)))
    return {
        "programs": len(before),
        "before": _spread(before),
        "after": _spread(after),
        "inside": float(np.mean(inside)) if inside else None,
        "narrower": calibrate_with_measurements([(1.0, 1.0)]).narrower,
    }


def _spread(errors: list[float]) -> dict[str, float | None]:
    if not errors:
        return {"median_abs_error": None, "p90_abs_error": None}
    return {
        "median_abs_error": float(np.median(errors)),
        "p90_abs_error": float(np.percentile(errors, 90)),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
