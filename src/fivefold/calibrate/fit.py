"""Seconds as sums of terms: so many of each unit of work, and what one of it takes."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def least_relative_squares(work: Floats, seconds: Floats) -> Floats:
    """The x of 0 or more with the least sum of ((work x - seconds) / seconds)^2.

    work [points, units], seconds [points] -> [units]. With few units every choice of those that are
    not zero can be tried: the best that comes out without a negative one is the minimum.
    """
    relative = work / seconds[:, None]
    units = work.shape[1]
    best, least = np.zeros(units), np.inf
    for kept in itertools.product((False, True), repeat=units):
        chosen = np.flatnonzero(kept)
        if not len(chosen) or len(chosen) > len(seconds):
            continue
        scale = np.abs(relative[:, chosen]).max(axis=0)
        scale[scale == 0] = 1.0
        solution, *_ = np.linalg.lstsq(relative[:, chosen] / scale, np.ones(len(seconds)))
        if (solution < 0).any():
            continue
        x = np.zeros(units)
        x[chosen] = solution / scale
        squares = float(((relative @ x - 1) ** 2).sum())
        if squares < least - 1e-12:
            best, least = x, squares
    return best
