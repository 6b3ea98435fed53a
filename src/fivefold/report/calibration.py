"""What `fivefold calibrate` prints: how well what it fitted agrees with what it measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table


def calibration_table(errors: Mapping[str, NDArray[np.float64]]) -> Table:
    """A line for each kind of pass: the layers and heads that were measured, and the relative
    errors of what was fitted to them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("relative errors of", "points", "median", "9 of 10 within"):
        table.add_column(column, justify="left" if not table.columns else "right")
    for part, found in errors.items():
        shares = f"{np.median(found):.1%}", f"{np.quantile(found, 0.9):.1%}"
        table.add_row(f"{part} passes", str(len(found)), *shares)
    return table
