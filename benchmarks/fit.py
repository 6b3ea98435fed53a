"""Derives the fitted constants of cluster/constants.yaml from published step times.

    python benchmarks/fit.py                 fit on all clusters, print the values
    python benchmarks/fit.py --write         fit on all clusters and write constants.yaml

A cluster (rows of one model on one GPU) counts once, however many rows it has. The loss is that of
`soft_l1` on the logarithm of predicted over measured, so that rows which nothing explains do not
bend the constants. No constant belongs to a row or a source.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

if __package__ in (None, ""):  # run as a script: make the packages importable
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

from benchmarks.measurements import MEASUREMENTS, Case, read
from benchmarks.predictions import Predictor, choose
from benchmarks.scores import figures
from fivefold.cluster.constants import CONSTANTS
from fivefold.files import atomic_write

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

PRIOR = 0.2
"""What it costs to move a constant from one end of its range to the other, as the error of a
cluster (0.2 is 20 %). It keeps a constant that few rows know in the middle of what is possible;
fits on half of the clusters predict the other half better with it."""


def fit(cases: list[Case], known: dict[str, float], verbose: int = 0) -> dict[str, float]:
    """The constants under which the cases' step times are predicted best.

    `known` has all constants; it chooses among the layouts that rows leave open, and has those that
    are not fitted. The search begins in the middle of what is possible.
    """
    names = list(BOUNDS)
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    rows = Counter(case.cluster for case in cases)
    weight = np.array([rows[case.cluster] ** -0.5 for case in cases])
    predictor = Predictor(cases, choose(cases, known))
    middle = np.full(len(names), 0.5)

    def values(x: NDArray[np.float64]) -> dict[str, float]:
        return known | dict(zip(names, (low + x * (high - low)).tolist(), strict=True))

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([weight * predictor.errors(values(x)), PRIOR * (x - middle)])

    found = least_squares(
        residuals,
        middle,
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=0.03,
        diff_step=0.02,
        max_nfev=12,
        verbose=verbose,
    )
    return values(found.x)


def halves(cases: list[Case]) -> tuple[list[Case], list[Case]]:
    """Every other cluster, in the order of their names."""
    order = {name: i for i, name in enumerate(sorted({case.cluster for case in cases}))}
    return (
        [case for case in cases if order[case.cluster] % 2 == 0],
        [case for case in cases if order[case.cluster] % 2 == 1],
    )


def start_values(entries: dict) -> dict[str, float]:
    """The values of constants.yaml: "name" of the defaults, "architecture.name" of the others."""
    values = {name: entry["value"] for name, entry in entries["default"].items()}
    for owner in entries.keys() - {"default", "architectures"}:
        values |= {f"{owner}.{name}": entry["value"] for name, entry in entries[owner].items()}
    return values


def write_values(values: dict[str, float]) -> None:
    """Puts the fitted values into constants.yaml, and leaves all else as it is."""
    owner, lines = "", []
    for line in CONSTANTS.read_text().splitlines():
        if entry := re.match(r"(\w+):", line):
            owner = "" if entry[1] == "default" else f"{entry[1]}."
        if (constant := re.match(r"  (\w+): \{value: [^,]+", line)) is not None:
            name = owner + constant[1]
            if name in BOUNDS:
                value = float(f"{values[name]:.3g}")
                line = f"  {constant[1]}: {{value: {value!r}{line[constant.end() :]}"
        lines.append(line)
    atomic_write(CONSTANTS, "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cases = [case for case in read(arguments.measurements)[0] if case.step_s is not None]
    entries = yaml.safe_load(CONSTANTS.read_text())
    start = start_values(entries)
    values = fit(cases, start, verbose=2)
    for name in BOUNDS:
        print(f"{name:20s} {start[name]:10.4g} -> {values[name]:10.4g}   {BOUNDS[name]}")
    errors = np.expm1(Predictor(cases, choose(cases, values)).errors(values))
    for name, figure in figures(zip((c.cluster for c in cases), errors, strict=True)).items():
        print(f"{name:20s} {figure:.4g}")
    if arguments.write:
        write_values(values)


if __name__ == "__main__":
    main()
