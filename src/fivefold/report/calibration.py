"""What `fivefold calibrate` prints: how well the fitted constants agree with the measurements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from fivefold.report.text import make_table


def calibration_table(errors: Mapping[str, NDArray[np.float64]]) -> Table:
    """One row per kind of pass: the number of layers and heads measured, and the relative errors
    of the constants fitted to them."""
    table = make_table(
        "fit", ">points", ">median error", ">90% within", title="Relative errors of the fit"
    )
    for part, found in errors.items():
        shares = f"{np.median(found):.1%}", f"{np.quantile(found, 0.9):.1%}"
        table.add_row(f"{part} passes", str(len(found)), *shares)
    return table
