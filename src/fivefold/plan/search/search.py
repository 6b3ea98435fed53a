"""The best layouts of a job: enumerated, held against memory and time, the winners in full.

The search goes best first. Every choice of degrees, chunks and micro-batch has a lower bound of its
step time (`bound`); in that order they get their ZeRO stages and recompute modes, are held against
the memory of a device, and what fits is timed in every rank order. Once the next bound is above the
worst of the best layouts found, none that is left can be among them, so they are not looked at:
the result is the same as if all were.

Of layouts that differ only in how the same degrees are used (micro-batch, chunks, ZeRO, recompute,
rank order, schedule) the best one stands for all, so that the list shows what there is to choose.

A step that is longer by less than half a per cent (`TIE_TOLERANCE`) is no reason for a more
intricate layout. Among layouts as near to the best, of the same degrees and then for the first
place of the list, the simplest is taken: tp inside the scale-up domain, fewer kinds of splits
(HSDP's replicas are one), a usual schedule, the default rank order, less recomputation, chunks of
equal size, a lower ZeRO stage, smaller degrees (see `_preferences`). The others follow by their
time.

Last, the winners get a list of layers a stage where that is faster (`balance`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import ORDER, Layout
from fivefold.plan.engines import Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.memory.states import FITS, estimate_memory
from fivefold.plan.search.candidates import (
    ORDERS,
    Choices,
    degrees,
    rank_orders,
    recompute_modes,
    state_options,
    with_micro_batches,
    with_states,
)
from fivefold.plan.search.layer_balance import TIE_TOLERANCE, balanced
from fivefold.plan.search.lower_bound import Bound
from fivefold.plan.time.constants import Constants
from fivefold.plan.time.operations import Numbers
from fivefold.plan.time.stages import simulate
from fivefold.plan.time.step import estimate_time

T = TypeVar("T")

OBJECTIVES = ("time", "memory", "cost")
SHAPES_AT_ONCE = 1024
"""Shapes (degrees, chunks, micro-batch) that are held against memory at once."""
TIMED_AT_ONCE = 2048
USUAL_ORDER, OTHER_ORDERS = slice(0, 1), slice(1, None)
"""Of the rank orders that are open."""
SPARES = 5
"""Layouts beyond those asked for whose pipelines are simulated and balanced, for that may change
their order."""
SMALLER_TRIED = 256
"""Numbers of devices tried where the one asked for cannot be shared out."""
SIZES_TRIED = 4
"""For the objective cost: the devices, half of them, and so on."""
DISTINCT = ("tp", "pp", "dp", "ep", "etp", "ulysses", "ring")
"""Degrees in which the layouts of a list differ."""


@dataclass(frozen=True)
class Constraints:
    """What is asked of a search, beside the job."""

    fix: str = ""  # tokens of the layout notation that the layout must have: "tp8 zero1"
    forbid: str = ""  # that it must not have; a name alone forbids the split: "pp tp16"
    top: int = 5
    objective: str = "time"  # memory: least peak; cost: fewest device-hours, on fewer devices too
    max_memory_bytes: float | None = None  # in place of the device's memory
    headroom: float | None = None  # share of the memory that stays free; None: see limit_bytes
    planned_schedules: bool = False  # also schedules that nothing runs yet


@dataclass(frozen=True)
class Search:
    """What a search found. Counts are of layouts."""

    counted: int  # candidates; one that breaks a rule by its degrees counts once
    legal: int
    fit: int  # that were found to fit
    skipped: int  # legal ones not looked at, since they cannot be among the best
    seconds: float  # the search took
    limit_bytes: float  # of a device, to which the best are held
    best: list[Estimate]  # by the objective, best first; empty where nothing fits
    closest: list[Estimate]  # where nothing fits: those that take least memory
    notes: list[str] = field(default_factory=list)  # what was done otherwise than asked


@dataclass(frozen=True)
class _Space:
    """The shapes to look at, with what came before."""

    job: Job
    choices: Choices
    shapes: LayoutBatch
    variants: NDArray[np.int64]  # [shapes] ZeRO stages times recompute modes times rank orders
    dropped: int  # candidates that broke a rule

    @property
    def legal(self) -> int:
        return int(self.variants.sum())


def limit_bytes(job: Job, wishes: Constraints) -> float:
    """What a layout may take of a device's memory. Without a wish, as much as still counts as
    fitting, not as tight (`memory.FITS`)."""
    if wishes.max_memory_bytes is not None:
        return wishes.max_memory_bytes * (1 - (wishes.headroom or 0.0))
    share = FITS if wishes.headroom is None else 1 - wishes.headroom
    return job.cluster.device.memory_bytes * share


def search(job: Job, wishes: Constraints | None = None) -> Search:
    """The best layouts of the job.

    UserError for wishes that contradict each other or a rule. Where the devices cannot be shared
    out, the largest smaller number of them that can is used, and a note says so.
    """
    start = time.perf_counter()
    wishes = wishes or Constraints()
    _check(wishes)
    choices = Choices.read(wishes.fix, wishes.forbid)
    space, notes = _shared_out(job, choices, wishes)
    limit = limit_bytes(job, wishes)
    found = _find(space, wishes, limit)
    if not found.best and wishes.headroom is None and wishes.max_memory_bytes is None:
        limit = float(job.cluster.device.memory_bytes)
        found = _find(space, wishes, limit)
        if found.best:
            notes.append("no layout leaves the usual headroom: those listed are tight")
    spaces, results = [space], [found]
    if wishes.objective == "cost":
        for smaller in _smaller(space, wishes):
            spaces.append(smaller)
            results.append(_find(smaller, wishes, limit))
    best = [
        each
        for a_space, result in zip(spaces, results, strict=True)
        for each in _in_full(a_space, result, wishes, limit)
        if each.peak_memory_bytes <= limit  # of every stage, where the search looked at three
    ]
    scores = [_score(each, wishes.objective) for each in best]
    best = _in_order(job, best, [each.layout for each in best], scores)
    closest = (
        [] if best else [estimate(space.job, layout) for _, layout in _leanest(space, wishes.top)]
    )
    legal = sum(each.legal for each in spaces)
    return Search(
        counted=legal + sum(each.dropped for each in spaces),
        legal=legal,
        fit=sum(each.fit for each in results),
        skipped=sum(each.skipped for each in results),
        seconds=time.perf_counter() - start,
        limit_bytes=limit,
        best=best[: wishes.top],
        closest=closest,
        notes=notes,
    )


def smallest_gpus(
    job: Job, wishes: Constraints | None = None, limit: float | None = None, at_most: int = 2**20
) -> int | None:
    """The fewest devices of the job's cluster, of full nodes, on which some layout takes at most
    `limit` bytes of each (None: as `limit_bytes` says).

    By doubling from one node and bisection between; taken for granted is that more devices do not
    need more memory. None where the machine ends before, or `at_most` devices do not do.
    """
    wishes = wishes or Constraints()
    choices = Choices.read(wishes.fix, wishes.forbid)
    limit = limit_bytes(job, wishes) if limit is None else limit
    node = job.cluster.system[0].size or 1

    def fits(nodes: int) -> bool:
        try:
            devices = job.cluster.with_devices(nodes * node)
            space = _space(replace(job, cluster=devices), choices, wishes)
        except UserError:  # the machine ends before, or what is fixed needs other devices
            return False
        return any(peak <= limit for peak, _ in _leanest(space, 1))

    nodes = 1
    while not fits(nodes):
        nodes *= 2
        if nodes * node > at_most:
            return None
    too_few = nodes // 2
    while nodes - too_few > 1:
        middle = (nodes + too_few) // 2
        if fits(middle):
            nodes = middle
        else:
            too_few = middle
    return nodes * node


def count_fitting(job: Job, wishes: Constraints | None = None) -> tuple[int, int]:
    """How many layouts are legal and how many of them fit: all held against memory, none timed."""
    wishes = wishes or Constraints()
    space, _ = _shared_out(job, Choices.read(wishes.fix, wishes.forbid), wishes)
    limit, fit = limit_bytes(job, wishes), 0
    for first in range(0, len(space.shapes), SHAPES_AT_ONCE):
        shapes = space.shapes.take(slice(first, first + SHAPES_AT_ONCE))
        layouts = with_states(space.job, shapes, space.choices)
        fit += _fitting(space.job, layouts, space.choices, limit)[0]
    return space.legal, fit


def least_memory(job: Job, wishes: Constraints | None = None) -> tuple[float, Layout] | None:
    """The peak memory, in bytes, of the layout that takes least; None where no layout is legal."""
    wishes = wishes or Constraints()
    space, _ = _shared_out(job, Choices.read(wishes.fix, wishes.forbid), wishes)
    leanest = _leanest(space, 1)
    return leanest[0] if leanest else None


def _check(wishes: Constraints) -> None:
    if wishes.objective not in OBJECTIVES:
        raise UserError(f"objective {wishes.objective!r} is not known: {', '.join(OBJECTIVES)} are")
    if wishes.top < 1:
        raise UserError(f"the list must have 1 layout or more, not {wishes.top}")


def _in_full(space: _Space, found: _Found, wishes: Constraints, limit: float) -> list[Estimate]:
    """Those asked for of the layouts found, in the order that the simulated pipeline gives."""
    job, layouts = space.job, [layout for _, layout in found.best]
    if wishes.objective == "memory":
        return [estimate(job, layout) for layout in layouts]
    timed = list(zip(layouts, simulate(job, layouts), strict=True))
    if "layers" not in space.choices.fixed:
        timed = balanced(job, timed, limit, wishes.top)
    layouts, times = [layout for layout, _ in timed], [time.step_s for _, time in timed]
    chosen = _in_order(job, timed, layouts, times)[: wishes.top]
    return [estimate(job, layout, time) for layout, time in chosen]


# What there is to look at


def _space(job: Job, choices: Choices, wishes: Constraints) -> _Space:
    split, tried = degrees(job, choices)
    split_tried = tried - len(split)
    shapes, tried = with_micro_batches(job, split, choices, wishes.planned_schedules)
    modes = sum(mode.open.astype(np.int64) for mode in recompute_modes(job, shapes, choices))
    states = state_options(job, shapes, choices)[0].sum(axis=1)
    orders = sum(changed.astype(np.int64) for _, changed in rank_orders(shapes, choices))
    dropped = split_tried + tried - len(shapes)
    return _Space(job, choices, shapes, states * modes * orders, dropped)


def _shared_out(job: Job, choices: Choices, wishes: Constraints) -> tuple[_Space, list[str]]:
    """The candidates on all devices, or else on as many as can be shared out."""
    asked = job.cluster.num_devices
    space = _space(job, choices, wishes)
    if space.legal:
        return space, []
    fewer = _fewer(asked, job.cluster.system[0].size or 1)
    for devices in islice(fewer, SMALLER_TRIED):
        smaller = replace(job, cluster=job.cluster.with_devices(devices))
        space = _space(smaller, choices, wishes)
        if space.legal:
            note = (
                f"{asked} devices cannot be shared out with a global batch of {job.global_batch}: "
                f"{devices} of them are used"
            )
            return space, [note]
    what = f"a global batch of {job.global_batch} sequences of {job.sequence_length} tokens"
    if not wishes.fix and not wishes.forbid:
        cure = f"a batch that is a multiple of {asked} would do"
        raise UserError(f"no layout of {asked} devices or fewer has {what}: {cure}")
    kept = f" that keeps {wishes.fix!r}" if wishes.fix else ""
    kept += f" without {wishes.forbid!r}" if wishes.forbid else ""
    raise UserError(
        f"no layout of {asked} devices{kept} has {what}: leave out some of what is fixed or "
        "forbidden"
    )


def _fewer(devices: int, node: int) -> Iterator[int]:
    """Smaller numbers of devices: full nodes, then parts of one."""
    yield from range((devices - 1) // node * node, 0, -node)
    yield from range(min(devices - 1, node - 1), 0, -1)


def _smaller(space: _Space, wishes: Constraints) -> Iterator[_Space]:
    """The same job on half of the devices, and so on."""
    devices = space.job.cluster.num_devices
    for _ in range(SIZES_TRIED - 1):
        if devices % 2:
            return
        devices //= 2
        cluster = space.job.cluster.with_devices(devices)
        try:
            smaller = _space(replace(space.job, cluster=cluster), space.choices, wishes)
        except UserError:  # what is fixed needs more devices
            return
        if smaller.legal:
            yield smaller


# The search


@dataclass
class _Found:
    fit: int
    skipped: int
    best: list[tuple[float, Layout]]


def _find(space: _Space, wishes: Constraints, limit: float) -> _Found:
    """The best layouts that take at most `limit` bytes, a few more than asked for."""
    if wishes.objective == "memory":
        leanest = [each for each in _leanest(space, wishes.top) if each[0] <= limit]
        return _Found(len(leanest), space.legal - len(leanest), leanest)
    job, choices = space.job, space.choices
    constants = Constants.of(job.cluster.device)
    bound = Bound(job, constants, space.shapes)
    floor = bound.of(space.shapes)
    ranking = np.argsort(floor, kind="stable")
    best = _Best(job, wishes.top + SPARES, TIE_TOLERANCE)
    fit, looked_at = 0, 0
    timed: list[LayoutBatch] = []
    waiting: list[LayoutBatch] = []
    for first in range(0, len(ranking), SHAPES_AT_ONCE):
        here = ranking[first : first + SHAPES_AT_ONCE]
        here = here[floor[here] <= best.worst]
        if not len(here):
            break
        looked_at += int(space.variants[here].sum())
        layouts = with_states(job, space.shapes.take(here), choices)
        number, fitting = _fitting(job, layouts, choices, limit)
        fit += number
        waiting += fitting
        if sum(map(len, waiting)) >= TIMED_AT_ONCE:
            _time_orders(job, constants, bound, choices, USUAL_ORDER, waiting, best)
            timed, waiting = timed + waiting, []
    _time_orders(job, constants, bound, choices, USUAL_ORDER, waiting, best)
    # The other orders of the ranks come when it is known how good a layout must be.
    _time_orders(job, constants, bound, choices, OTHER_ORDERS, timed + waiting, best)
    return _Found(fit, space.legal - looked_at, best.ranked())


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
    fits = estimate_memory(job, LayoutBatch.concatenate(parts)).peak_bytes <= limit
    return np.split(fits, np.cumsum([len(part) for part in parts])[:-1])


def _time_orders(
    job: Job,
    constants: Constants,
    bound: Bound,
    choices: Choices,
    orders: slice,
    layouts: list[LayoutBatch],
    best: _Best,
) -> None:
    """Times the layouts in some of the rank orders, as far as they can be among the best."""
    if not layouts:
        return
    together = LayoutBatch.concatenate(layouts)
    floor = bound.of(together)
    ranking = np.argsort(floor, kind="stable")
    together, floor = together.take(ranking), floor[ranking]
    every_order = rank_orders(together, choices)
    for order, changed in islice(every_order, orders.start, orders.stop):
        for first in range(0, len(together), TIMED_AT_ONCE):
            here = np.arange(first, min(first + TIMED_AT_ONCE, len(together)))
            here = here[changed[here] & (floor[here] <= best.worst)]
            if len(here):
                placed = replace(together.take(here), order=order)
                best.add(placed, estimate_time(job, placed, constants).step)


def _leanest(space: _Space, top: int) -> list[tuple[float, Layout]]:
    """Peak bytes of the layouts that take least memory, different in their degrees.

    Least are the smallest micro-batch and the most recomputation that are left.
    """
    shapes = space.shapes
    if not len(shapes):
        return []
    smallest = shapes.micro_batch == _smallest_micro_batch(shapes)
    layouts = with_states(space.job, shapes.take(smallest), space.choices)
    modes = [m for m in recompute_modes(space.job, layouts, space.choices) if m.open.any()]
    best = _Best(space.job, top, 0.0)
    order = next(iter(rank_orders(layouts, space.choices)), (ORDER, None))[0]
    for mode in {mode.name: mode for mode in modes}.values():
        for first in range(0, len(layouts), 2 * TIMED_AT_ONCE):
            here = np.zeros(len(layouts), bool)
            here[first : first + 2 * TIMED_AT_ONCE] = True
            part = replace(mode.of(layouts, here & mode.open), order=order)
            if len(part):
                best.add(part, estimate_memory(space.job, part).peak_bytes)
    return best.ranked()


def _smallest_micro_batch(shapes: LayoutBatch) -> NDArray[np.int64]:
    """For each shape, the smallest micro-batch among those with the same other degrees."""
    code = _code(shapes, (*DISTINCT, "vpp"))
    _, number = np.unique(code, return_inverse=True)
    smallest = np.full(number.max(initial=0) + 1, np.iinfo(np.int64).max)
    np.minimum.at(smallest, number, shapes.micro_batch)
    return smallest[number]


# Which are best


class _Best:
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

    def add(self, layouts: LayoutBatch, scores: Numbers) -> None:
        """Takes in those of the layouts that may be among the best."""
        scores = np.asarray(_rounded(scores))
        low = np.flatnonzero(scores <= self.worst)
        layouts, scores = layouts.take(low), scores[low]
        ranking = np.argsort(scores, kind="stable")
        _, first = np.unique(_code(layouts, DISTINCT)[ranking], return_index=True)
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
                _code(layouts, DISTINCT), return_index=True, return_inverse=True
            )
            keys = [_key(layouts, index) for index in first]
            lowest = np.array([self.lowest.get(key, 0.0) for key in keys])[number]
            near = np.flatnonzero(scores <= lowest * (1 + self.near))
            columns = np.array([*_preferences(self.job, layouts.take(near))])
            ranking = np.lexsort((scores[near], *columns[::-1]))
            _, simplest = np.unique(number[near][ranking], return_index=True)
            for place in ranking[simplest]:
                index, rank = near[place], tuple(columns[:, place].tolist())
                key, score = keys[number[index]], float(scores[index])
                if key not in chosen or (rank, score) < chosen[key][:2]:
                    chosen[key] = rank, score, layouts[int(index)]
        order = sorted(chosen, key=lambda key: (self.lowest[key], chosen[key][0]))
        return [chosen[key][1:] for key in order[: self.top]]


def _key(layouts: LayoutBatch, index: Any) -> tuple[int, ...]:
    return tuple(int(getattr(layouts, name)[index]) for name in DISTINCT)


def _rounded(scores: Numbers) -> NDArray[np.float64]:
    """To nine digits, so that sums in another order do not decide."""
    scores = np.asarray(scores, float)
    size = 10.0 ** np.floor(np.log10(np.maximum(scores, 1e-300)))
    return np.round(scores / size, 9) * size


def _preferences(job: Job, layouts: LayoutBatch) -> list[NDArray[np.int64]]:
    """What makes a layout simpler or more usual, the most telling first (see the module)."""
    domain = job.cluster.tiers[0].size or 1
    splits = [layouts.tp, layouts.pp, layouts.cp, layouts.ep, layouts.vpp, layouts.dp_replicate]
    used = np.sum([np.asarray(degree) > 1 for degree in splits], axis=0)
    order = ORDERS.index(layouts.order) if layouts.order in ORDERS else len(ORDERS)
    inside_tp = layouts.cp if layouts.order.index("cp") < layouts.order.index("tp") else 1
    every_layer = (layouts.recompute == "full") & (layouts.recompute_layers == 0)
    recomputed = np.where(every_layer, job.config.num_layers, layouts.recompute_layers)
    columns = [
        (layouts.tp > 1) & (layouts.tp * inside_tp > domain),
        used,
        layouts.schedule != "1f1b",
        np.full(np.shape(used), order),
        layouts.recompute != "none",
        recomputed,
        job.config.num_layers % layouts.stages != 0,
        layouts.zero,
        *splits,
        layouts.ulysses,
        layouts.etp,
        layouts.micro_batch,
    ]
    return [np.asarray(column).astype(np.int64) for column in columns]


def _preference(job: Job, layout: Layout) -> tuple[int, ...]:
    return tuple(int(column[0]) for column in _preferences(job, LayoutBatch.of([layout])))


def _in_order(job: Job, found: Sequence[T], layouts: list[Layout], scores: list[float]) -> list[T]:
    """By score; but the simplest of those that are near the lowest comes first."""
    keys = [(float(_rounded(s)), _preference(job, x)) for s, x in zip(scores, layouts, strict=True)]
    ranking = sorted(range(len(keys)), key=keys.__getitem__)
    near = [i for i in ranking if scores[i] <= min(scores) * (1 + TIE_TOLERANCE)]
    first = min(near, key=lambda i: keys[i][1], default=None)
    ranking.sort(key=lambda i: i != first)
    return [found[i] for i in ranking]


def _code(layouts: LayoutBatch, names: tuple[str, ...]) -> NDArray[np.int64]:
    """A number for each combination of these degrees."""
    code = np.zeros(len(layouts), np.int64)
    for name in names:
        _, number = np.unique(getattr(layouts, name), return_inverse=True)
        code = code * (number.max(initial=0) + 1) + number
    return code


def _score(each: Estimate, objective: str) -> float:
    if objective == "memory":
        return each.peak_memory_bytes
    devices = each.layout.world_size if objective == "cost" else 1
    return each.step_time_s * devices
