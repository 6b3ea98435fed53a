"""Derives the fitted constants of cluster/constants.yaml from published step times.

    python benchmarks/fit.py                 fit on all clusters, print the values
    python benchmarks/fit.py --halves        fit on half of the clusters, score the other half
    python benchmarks/fit.py --write         fit on all clusters and write constants.yaml

A cluster (rows of one model on one GPU) counts once, however many rows it has. The loss is that of
`soft_l1` on the logarithm of predicted over measured, so that rows which nothing explains do not
bend the constants. No constant belongs to a row or a source.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.measurements import MEASUREMENTS, Case, read
from benchmarks.predictions import Predictor, choose
from fivefold.cluster.cluster import CONSTANTS

BOUNDS = {
    "sustained": (0.8, 1.1),
    "ampere.sustained": (0.8, 1.05),
    "blackwell.sustained": (0.65, 1.05),
    "sustained_fp8": (0.75, 1.15),
    "blackwell.sustained_fp8": (0.6, 1.05),
    "grace.sustained": (0.65, 1.05),
    "grace.sustained_fp8": (0.6, 1.05),
    "sustained_fp4": (0.4, 1.0),
    "wave_loss": (0.0, 1.0),
    "misaligned_loss": (0.0, 1.0),
    "grouped": (0.5, 1.0),
    "attention": (0.35, 0.7),
    "portable_attention": (0.35, 0.9),
    "unfused_attention": (0.15, 0.7),
    "score_passes": (2.0, 12.0),
    "light_backward": (1.0, 3.0),
    "unfused_light": (1.0, 5.0),
    "quantize": (0.5, 4.0),
    "blackwell.attention": (0.35, 0.7),
    "blackwell.quantize": (0.5, 3.0),
    "launch_s": (2e-6, 2e-5),
    "contention": (0.0, 0.5),
    "step_s": (0.0, 0.1),
    "straggler": (0.0, 0.03),
}
"""The fitted constants, each between what is physically possible."""

PRIOR = 0.15
"""How far, in shares of its range, a constant moves for what one row off by 10 % is worth."""


def fit(cases: list[Case], start: dict[str, float], verbose: int = 0) -> dict[str, float]:
    """The constants under which the cases' step times are predicted best."""
    names = list(BOUNDS)
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    rows = Counter(case.cluster for case in cases)
    weight = np.array([rows[case.cluster] ** -0.5 for case in cases])
    chosen = choose(cases, start)
    predictor = Predictor(cases, chosen)

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        values = start | dict(zip(names, low + x * (high - low), strict=True))
        return np.concatenate([weight * predictor.errors(values), 0.1 * PRIOR * (x - x0)])

    x0 = np.clip((np.array([start[n] for n in names]) - low) / (high - low), 0.01, 0.99)
    found = least_squares(
        residuals,
        x0,
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=0.03,
        diff_step=0.02,
        x_scale=1.0,
        max_nfev=12,
        verbose=verbose,
    )
    return start | dict(zip(names, (low + found.x * (high - low)).tolist(), strict=True))


def halves(cases: list[Case]) -> tuple[list[Case], list[Case]]:
    """Every other cluster, in the order of their names."""
    order = {name: i for i, name in enumerate(sorted({case.cluster for case in cases}))}
    return (
        [case for case in cases if order[case.cluster] % 2 == 0],
        [case for case in cases if order[case.cluster] % 2 == 1],
    )


def score(cases: list[Case], values: dict[str, float]) -> str:
    """Median and 90th percentile of |error|, a cluster counted once."""
    errors = np.expm1(Predictor(cases, choose(cases, values)).errors(values))
    by = defaultdict(list)
    for case, error in zip(cases, errors, strict=True):
        by[case.cluster].append(abs(error))
    each = np.array([np.median(e) for e in by.values()])
    return (
        f"{len(cases)} rows, {len(by)} clusters: median {np.median(each):.1%}, "
        f"90th percentile {np.percentile(each, 90):.1%}"
    )


def start_values(entries: dict) -> dict[str, float]:
    """The values of constants.yaml: "name" of the defaults, "architecture.name" of the others."""
    values = {name: entry["value"] for name, entry in entries["default"].items()}
    for owner in entries.keys() - {"default", "architectures"}:
        values |= {f"{owner}.{name}": entry["value"] for name, entry in entries[owner].items()}
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cases = [case for case in read(arguments.measurements)[0] if case.step_s is not None]
    entries = yaml.safe_load(CONSTANTS.read_text())
    start = start_values(entries)
    if arguments.halves:
        for mine, other in (halves(cases), halves(cases)[::-1]):
            values = fit(mine, start)
            print(f"fitted:  {score(mine, values)}\nheld out: {score(other, values)}")
        return
    values = fit(cases, start, verbose=2)
    for name in BOUNDS:
        print(f"{name:20s} {start[name]:10.4g} -> {values[name]:10.4g}   {BOUNDS[name]}")
    print(score(cases, values))
    if arguments.write:
        for name in BOUNDS:
            owner, _, own = name.rpartition(".")
            entries[owner or "default"][own]["value"] = float(f"{values[name]:.3g}")
        CONSTANTS.write_text(yaml.safe_dump(entries, sort_keys=False, width=100))


if __name__ == "__main__":
    main()
