"""Seconds as sums of terms: so many of each unit of work, and what one of it takes."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def least_relative_squares(work: Floats, seconds: Floats, to: Floats | None = None) -> Floats:
    """The x of 0 or more with the least sum of ((work x - seconds) / to)^2, `to` the seconds
    themselves where nothing is given.

    work [points, units], seconds and to [points] -> [units]. With few units every choice of those
    that are not zero can be tried: the best that comes out without a negative one is the minimum.
    """
    to = seconds if to is None else to
    relative, wanted = work / to[:, None], seconds / to
    units = work.shape[1]
    best, least = np.zeros(units), float((wanted**2).sum())
    for kept in itertools.product((False, True), repeat=units):
        chosen = np.flatnonzero(kept)
        if not len(chosen) or len(chosen) > len(seconds):
            continue
        scale = np.abs(relative[:, chosen]).max(axis=0)
        scale[scale == 0] = 1.0
        solution, *_ = np.linalg.lstsq(relative[:, chosen] / scale, wanted)
        if (solution < 0).any():
            continue
        x = np.zeros(units)
        x[chosen] = solution / scale
        squares = float(((relative @ x - wanted) ** 2).sum())
        if squares < least - 1e-12:
            best, least = x, squares
    return best
