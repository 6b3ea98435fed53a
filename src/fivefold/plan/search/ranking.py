"""Which layouts are best, and which of those that are as good is the simplest.

Of layouts that differ only in how the same degrees are used (micro-batch, chunks, ZeRO, recompute,
rank order, schedule) the best one stands for all, so a list shows what there is to choose.

A step that is longer by less than `TIE_TOLERANCE` is no reason for a more intricate layout. Among
layouts that close to the best, of the same degrees and then for the first place of the list, the
simplest is taken: tp inside the scale-up domain, fewer kinds of splits (HSDP's replicas are one), a
usual schedule, the default rank order, less recomputation, chunks of equal size, a lower ZeRO
stage, smaller degrees. The others follow by their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.plan.engines import Job
from fivefold.plan.search.candidates import ORDERS

T = TypeVar("T")

TIE_TOLERANCE = 0.005
"""Share of a step that does not pay for a more intricate layout: of step times that are closer to
each other than this, the simpler layout's is better."""
DISTINCT = ("tp", "pp", "dp", "ep", "etp", "ulysses", "ring")
"""Degrees in which the layouts of a list differ."""


class Best:
    """The layouts with the lowest scores: at most one for each choice of the distinct degrees, the
    simplest of those whose score is within a share `near` of that choice's lowest."""

    def __init__(self, job: Job, top: int, near: float) -> None:
        self.job, self.top, self.near = job, top, near
        self.lowest: dict[tuple[int, ...], float] = {}  # score by distinct degrees
        self.parts: list[tuple[LayoutBatch, NDArray[np.float64]]] = []  # all that may be chosen

    @property
    def worst(self) -> float:
        """A layout with a higher score is not among the best."""
        if len(self.lowest) < self.top:
            return np.inf
        return sorted(self.lowest.values())[self.top - 1] * (1 + self.near)

    def add(self, layouts: LayoutBatch, scores: ArrayLike) -> None:
        """Takes in those of the layouts that may be among the best; scores [n]."""
        scores = _rounded(scores)
        low = np.flatnonzero(scores <= self.worst)
        layouts, scores = layouts.take(low), scores[low]
        ranking = np.argsort(scores, kind="stable")
        _, first = np.unique(codes(layouts, DISTINCT)[ranking], return_index=True)
        for index in ranking[np.sort(first)[: self.top]]:
            key = _key(layouts, index)
            self.lowest[key] = min(float(scores[index]), self.lowest.get(key, np.inf))
        parts = [*self.parts, (layouts, scores)]
        kept = [(layouts, scores, scores <= self.worst) for layouts, scores in parts]
        self.parts = [(a.take(low), scores[low]) for a, scores, low in kept if low.any()]

    def ranked(self) -> list[tuple[float, Layout]]:
        """Each with its own score, in the order of the lowest of their degrees."""
        chosen: dict[tuple[int, ...], tuple[tuple[int, ...], float, Layout]] = {}
        for layouts, scores in self.parts:
            _, first, number = np.unique(
                codes(layouts, DISTINCT), return_index=True, return_inverse=True
            )
            keys = [_key(layouts, index) for index in first]
            lowest = np.array([self.lowest.get(key, 0.0) for key in keys])[number]
            near = np.flatnonzero(scores <= lowest * (1 + self.near))
            columns = np.array(_intricacy(self.job, layouts.take(near)))
            ranking = np.lexsort((scores[near], *columns[::-1]))
            _, simplest = np.unique(number[near][ranking], return_index=True)
            for place in ranking[simplest]:
                index, rank = near[place], tuple(columns[:, place].tolist())
                key, score = keys[number[index]], float(scores[index])
                if key not in chosen or (rank, score) < chosen[key][:2]:
                    chosen[key] = rank, score, layouts[int(index)]
        order = sorted(chosen, key=lambda key: (self.lowest[key], chosen[key][0]))
        return [chosen[key][1:] for key in order[: self.top]]


def codes(layouts: LayoutBatch, names: Sequence[str]) -> NDArray[np.int64]:
    """A number [n] for each combination of these degrees."""
    code = np.zeros(len(layouts), np.int64)
    for name in names:
        _, number = np.unique(getattr(layouts, name), return_inverse=True)
        code = code * (number.max(initial=0) + 1) + number
    return code


def _key(layouts: LayoutBatch, index: int) -> tuple[int, ...]:
    return tuple(int(getattr(layouts, name)[index]) for name in DISTINCT)


def _rounded(scores: ArrayLike) -> NDArray[np.float64]:
    """To nine digits, so the order of a sum's terms does not decide."""
    scores = np.asarray(scores, float)
    size = 10.0 ** np.floor(np.log10(np.maximum(scores, 1e-300)))
    return np.round(scores / size, 9) * size


def _intricacy(job: Job, layouts: LayoutBatch) -> list[NDArray[np.int64]]:
    """What makes a layout less simple or less usual, the most telling first (see the module)."""
    domain = job.cluster.tiers[0].size or 1
    splits = [layouts.tp, layouts.pp, layouts.cp, layouts.ep, layouts.vpp, layouts.dp_replicate]
    used = np.sum([np.asarray(degree) > 1 for degree in splits], axis=0)
    order = ORDERS.index(layouts.order) if layouts.order in ORDERS else len(ORDERS)
    inside_tp = layouts.cp if layouts.order.index("cp") < layouts.order.index("tp") else 1
    every_layer = (layouts.recompute == "full") & (layouts.recompute_layers == 0)
    columns = [
        (layouts.tp > 1) & (layouts.tp * inside_tp > domain),
        used,
        layouts.schedule != "1f1b",
        np.full(np.shape(used), order),
        layouts.recompute != "none",
        np.where(every_layer, job.config.num_layers, layouts.recompute_layers),
        job.config.num_layers % layouts.stages != 0,
        layouts.zero,
        *splits,
        layouts.ulysses,
        layouts.etp,
        layouts.micro_batch,
    ]
    return [np.asarray(column).astype(np.int64) for column in columns]


def intricacy(job: Job, layout: Layout) -> tuple[int, ...]:
    """The less, the simpler or more usual the layout."""
    return tuple(int(column[0]) for column in _intricacy(job, LayoutBatch.of([layout])))


def in_order(job: Job, found: Sequence[T], layouts: list[Layout], scores: list[float]) -> list[T]:
    """By score; but the simplest of those that are near the lowest comes first."""
    keys = [(float(_rounded(s)), intricacy(job, x)) for s, x in zip(scores, layouts, strict=True)]
    ranking = sorted(range(len(keys)), key=keys.__getitem__)
    near = [i for i in ranking if scores[i] <= min(scores) * (1 + TIE_TOLERANCE)]
    first = min(near, key=lambda i: keys[i][1], default=None)
    ranking.sort(key=lambda i: i != first)
    return [found[i] for i in ranking]
