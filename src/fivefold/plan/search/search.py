"""The best layouts of a job: enumerated, checked against memory, timed, the winners in full.

The search goes best first. Every choice of degrees, chunks and micro-batch has a lower bound of its
step time (`lower_bound`); in that order they get their ZeRO stages and recompute modes, are checked
against the memory of a device, and what fits is timed in every rank order. Once the next bound is
above the worst of the best layouts found, none that is left can be among them, so they are skipped:
the result is the same as if all were tried (`ranking` says which are best).

Last, the winners get a list of layers per stage where that is faster (`layer_balance`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.plan.engines import Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.memory.states import FITS, find_fitting
from fivefold.plan.search.candidates import rank_orders, recompute_modes, with_states
from fivefold.plan.search.constraints import Choices, Constraints
from fivefold.plan.search.layer_balance import balanced
from fivefold.plan.search.least_memory import leanest
from fivefold.plan.search.lower_bound import Bound
from fivefold.plan.search.ranking import TIE_TOLERANCE, Best, in_order
from fivefold.plan.search.space import Space, shared_out, smaller_spaces
from fivefold.plan.time.stages import simulate
from fivefold.plan.time.step import estimate_time

SHAPES_AT_ONCE = 1024
"""Shapes (degrees, chunks, micro-batch) that are checked against memory at once."""
TIMED_AT_ONCE = 2048
USUAL_ORDER, OTHER_ORDERS = slice(0, 1), slice(1, None)
"""Of the rank orders that are open."""
SPARES = 5
"""Layouts beyond those asked for whose pipelines are simulated and balanced, which may change
their order."""


@dataclass(frozen=True)
class Search:
    """What a search found. Counts are of layouts."""

    counted: int  # candidates; one that breaks a rule by its degrees counts once
    legal: int
    fit: int  # that were found to fit
    skipped: int  # legal ones that cannot be among the best, by their lower bound
    seconds: float  # the search took
    limit_bytes: float  # of a device, which the best do not exceed
    best: list[Estimate]  # by the objective, best first; empty where nothing fits
    closest: list[Estimate]  # where nothing fits: those that take least memory
    notes: list[str] = field(default_factory=list)  # what was done otherwise than asked


@dataclass
class _Found:
    fit: int
    skipped: int
    best: list[Layout]


def search(job: Job, constraints: Constraints | None = None) -> Search:
    """The best layouts of the job.

    UserError for constraints that contradict each other or a rule. Where the devices cannot be
    shared out, the largest smaller number of them that can is used, and a note says so.
    """
    start = time.perf_counter()
    constraints = constraints or Constraints()
    constraints.check()
    space, notes = shared_out(job, constraints)
    limit = constraints.limit_bytes(job)
    found = _find(space, constraints, limit)
    if not found.best and constraints.headroom is None and constraints.max_memory_bytes is None:
        limit = float(job.cluster.device.memory_bytes)
        found = _find(space, constraints, limit)
        if found.best:
            notes.append(f"no layout leaves {1 - FITS:.0%} of the memory free: the fit is tight")
    searched = [(space, found)]
    if constraints.objective == "cost":
        smaller = smaller_spaces(space, constraints)
        searched += [(each, _find(each, constraints, limit)) for each in smaller]
    best = [
        each
        for a_space, result in searched
        for each in _in_full(a_space, result.best, constraints, limit)
        if each.peak_memory_bytes <= limit  # of every stage, where the search looked at three
    ]
    scores = [_score(each, constraints.objective) for each in best]
    best = in_order(job, best, [each.layout for each in best], scores)
    closest = [] if best else leanest(space, constraints.top)
    legal = sum(each.legal for each, _ in searched)
    return Search(
        counted=legal + sum(each.dropped for each, _ in searched),
        legal=legal,
        fit=sum(result.fit for _, result in searched),
        skipped=sum(result.skipped for _, result in searched),
        seconds=time.perf_counter() - start,
        limit_bytes=limit,
        best=best[: constraints.top],
        closest=[estimate(space.job, layout) for _, layout in closest],
        notes=notes,
    )


def count_fitting(job: Job, constraints: Constraints) -> tuple[int, int]:
    """How many layouts are legal and how many of them fit; none is timed."""
    space, _ = shared_out(job, constraints)
    limit, fit = constraints.limit_bytes(job), 0
    for first in range(0, len(space.shapes), SHAPES_AT_ONCE):
        shapes = space.shapes.take(slice(first, first + SHAPES_AT_ONCE))
        layouts = with_states(space.job, shapes, space.choices)
        fit += _fitting(space.job, layouts, space.choices, limit)[0]
    return space.legal, fit


def _in_full(
    space: Space, layouts: list[Layout], constraints: Constraints, limit: float
) -> list[Estimate]:
    """Those asked for of the layouts found, in the order that the simulated pipeline gives."""
    job = space.job
    if constraints.objective == "memory":
        return [estimate(job, layout) for layout in layouts]
    timed = list(zip(layouts, simulate(job, layouts), strict=True))
    if "layers" not in space.choices.fixed:
        timed = balanced(job, timed, limit, constraints.top)
    layouts, times = [layout for layout, _ in timed], [time.step_s for _, time in timed]
    chosen = in_order(job, timed, layouts, times)[: constraints.top]
    return [estimate(job, layout, time) for layout, time in chosen]


def _score(each: Estimate, objective: str) -> float:
    if objective == "memory":
        return each.peak_memory_bytes
    return each.step_time_s * (each.layout.world_size if objective == "cost" else 1)


def _find(space: Space, constraints: Constraints, limit: float) -> _Found:
    """The best layouts that take at most `limit` bytes, a few more than asked for."""
    if constraints.objective == "memory":
        fits = [each for peak, each in leanest(space, constraints.top) if peak <= limit]
        return _Found(len(fits), space.legal - len(fits), fits)
    job, choices = space.job, space.choices
    timing = _Timing(space, Best(job, constraints.top + SPARES, TIE_TOLERANCE))
    floor = timing.bound.of(space.shapes)
    ranking = np.argsort(floor, kind="stable")
    fit, looked_at = 0, 0
    timed: list[LayoutBatch] = []
    waiting: list[LayoutBatch] = []
    for first in range(0, len(ranking), SHAPES_AT_ONCE):
        here = ranking[first : first + SHAPES_AT_ONCE]
        here = here[floor[here] <= timing.best.worst]
        if not len(here):
            break
        looked_at += int(space.variants[here].sum())
        layouts = with_states(job, space.shapes.take(here), choices)
        number, fitting = _fitting(job, layouts, choices, limit)
        fit += number
        waiting += fitting
        if sum(map(len, waiting)) >= TIMED_AT_ONCE:
            timing.add(waiting, USUAL_ORDER)
            timed, waiting = timed + waiting, []
    timing.add(waiting, USUAL_ORDER)
    # The other orders of the ranks come when it is known how good a layout must be.
    timing.add(timed + waiting, OTHER_ORDERS)
    best = [layout for _, layout in timing.best.ranked()]
    return _Found(fit, space.legal - looked_at, best)


def _fitting(
    job: Job, layouts: LayoutBatch, choices: Choices, limit: float
) -> tuple[int, list[LayoutBatch]]:
    """How many layouts fit, in all modes and rank orders; and of each the modes that may be best.

    A mode that recomputes more is slower. So of the modes none and full:N, ascending, to full,
    the first that fits is best; selective, which is not among these, may be better than full.
    """
    orders = sum(changed.astype(np.int64) for _, changed in rank_orders(layouts, choices))
    orders = np.broadcast_to(orders, len(layouts))
    modes = recompute_modes(job, layouts, choices)
    most = modes[-1]
    if most.name == "full" and most.open.all():  # takes least: what does not fit in it never does
        left = _fits(job, [most.of(layouts, most.open)], limit)[0]
        layouts, orders = layouts.take(left), orders[left]
        modes = [replace(m, layers=m.layers[left], open=m.open[left]) for m in modes]
    open_in = [np.flatnonzero(mode.open) for mode in modes]
    parts = [mode.of(layouts, here) for mode, here in zip(modes, open_in, strict=True)]
    fit, chosen = 0, []
    settled = np.zeros(len(layouts), bool)
    unneeded = np.zeros(len(layouts), bool)  # fits without recomputation
    for mode, part, here, fits in zip(modes, parts, open_in, _fits(job, parts, limit), strict=True):
        fit += int(orders[here[fits]].sum())
        done = unneeded if mode.name == "selective" else settled
        chosen.append(part.take(fits & ~done[here]))
        if mode.name != "selective":
            settled[here[fits]] = True
        if mode.name == "none":
            unneeded[here[fits]] = True
    return fit, [each for each in chosen if len(each)]


def _fits(job: Job, parts: list[LayoutBatch], limit: float) -> list[NDArray[np.bool_]]:
    """Which layouts of each part fit."""
    if not sum(map(len, parts)):
        return [np.zeros(0, bool) for _ in parts]
    fits = find_fitting(job, LayoutBatch.concatenate(parts), limit)
    return np.split(fits, np.cumsum([len(part) for part in parts])[:-1])


class _Timing:
    """Step times of layouts, as far as their bound lets them be among the best."""

    def __init__(self, space: Space, best: Best) -> None:
        self.job, self.choices, self.best = space.job, space.choices, best
        self.constants = space.job.cluster.device.constants
        self.bound = Bound(space.job, self.constants, space.shapes)

    def add(self, layouts: Sequence[LayoutBatch], orders: slice) -> None:
        """Times the layouts in some of the rank orders."""
        if not layouts:
            return
        together = LayoutBatch.concatenate(layouts)
        floor = self.bound.of(together)
        ranking = np.argsort(floor, kind="stable")
        together, floor = together.take(ranking), floor[ranking]
        every_order = rank_orders(together, self.choices)
        for order, changed in islice(every_order, orders.start, orders.stop):
            for first in range(0, len(together), TIMED_AT_ONCE):
                here = np.arange(first, min(first + TIMED_AT_ONCE, len(together)))
                here = here[changed[here] & (floor[here] <= self.best.worst)]
                if len(here):
                    placed = replace(together.take(here), order=order)
                    step_s = estimate_time(self.job, placed, self.constants).step
                    self.best.add(placed, step_s)
