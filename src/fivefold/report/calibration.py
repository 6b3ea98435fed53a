"""What `fivefold calibrate` prints: how well what it fitted agrees with what it measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table

from fivefold.calibrate.fit import Fit


def calibration_table(fits: Sequence[Fit]) -> Table:
    """A line for each kind of operation: its points, the fits they were made into, and the errors
    of the fits that could be wrong, for they have more points than terms."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("relative errors of", "points", "fits", "median", "9 of 10 within"):
        table.add_column(column, justify="left" if not table.columns else "right")
    kinds: dict[str, list[Fit]] = defaultdict(list)
    for fit in fits:
        by = f", {fit.clock} seconds" if fit.what == "message" else ""
        kinds[f"{fit.what.replace('_', ' ')}{by}"].append(fit)
    for name, members in kinds.items():
        errors = [e for fit in members if len(fit.errors) > len(fit.seconds) for e in fit.errors]
        points = sum(len(fit.errors) for fit in members)
        shares = [f"{np.median(errors):.1%}", f"{np.quantile(errors, 0.9):.1%}"] if errors else []
        table.add_row(name, str(points), str(len(members)), *shares)
    return table
