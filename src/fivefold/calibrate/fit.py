"""From points to a few numbers: seconds a call, and seconds a unit of work.

Each kind of operation gets a sum of terms, none of them negative: what a call costs, and what a
floating-point operation, a byte or an element costs. The sum of squares of the *relative* errors is
least, so that small operations count as much as large ones. Needs no torch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.calibrate.points import Point, rounded
from fivefold.ledger import Transfer
from fivefold.plan.job import PRODUCT_BYTES

Floats = NDArray[np.float64]

CPU_KEYS_AT_A_TIME = 512
"""PyTorch's attention on CPUs takes keys in blocks of so many, and passes over the blocks that a
causal mask hides altogether (kvSplitSize in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
LARGE_BYTES = 2**20
"""Where an all-reduce on CPUs changes its algorithm (LARGE of fivefold.parallel.comm, in fp32)."""
NEAR_BYTES = 2**21
"""Larger arrays are given back to the system when they are freed and come back page by page, and
they leave the cache of a core. The size between fits best on the machines that were measured."""


@dataclass(frozen=True)
class Fit:
    """What was fitted to the points of one kind."""

    what: str  # as in the points
    names: Mapping[str, int | str]  # which of them: part, op, size, ...
    seconds: Mapping[str, float]  # by unit: "call", "flop", "byte", "element", ...
    clock: str  # "cpu" or "wall"
    errors: tuple[float, ...]  # of the points, relative

    def record(self) -> dict[str, Any]:
        """As a cluster file keeps it."""
        per_unit = {f"{unit}_s": rounded(value) for unit, value in self.seconds.items()}
        return {
            "what": self.what,
            **self.names,
            "clock": self.clock,
            **per_unit,
            "points": len(self.errors),
            "median_error": rounded(float(np.median(self.errors))),
            "p90_error": rounded(float(np.quantile(self.errors, 0.9))),
        }

    def at(self, **work: float) -> float:
        """Seconds of one call with so much work of each unit."""
        return self.seconds["call"] + sum(self.seconds[unit] * n for unit, n in work.items())


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


Work = dict[str, float]
"""How much of each unit a point does, a call not counted."""


def fit(
    points: Sequence[Point],
    what: str,
    names: Mapping[str, int | str],
    work: Callable[[Point], Work],
    clock: str,
) -> Fit:
    """Fit points of one kind, of which there is at least one."""
    works = [work(point) for point in points]
    units = list(works[0])
    matrix = np.array([[1.0, *(w[unit] for unit in units)] for w in works])
    seconds = np.array([getattr(point, f"{clock}_s") for point in points])
    x = least_relative_squares(matrix, seconds)
    errors = np.abs(matrix @ x / seconds - 1)
    return Fit(
        what,
        names,
        dict(zip(("call", *units), x.tolist(), strict=True)),
        clock,
        tuple(errors.tolist()),
    )


def fit_operations(points: Iterable[Point], device: str) -> list[Fit]:
    """One fit for each kind of operation of a process; by processor seconds on a CPU, whose cores
    the processes share, and by the wall clock on a GPU."""
    clock = "cpu" if device == "cpu" else "wall"
    kinds: dict[tuple, list[Point]] = defaultdict(list)
    for point in points:
        if point.what in WORK:
            names = {key: point.sizes[key] for key in ("op", "part") if key in point.sizes}
            names |= {"precision": point.precision}
            kinds[point.what, tuple(names.items())].append(point)
    return [
        fit(members, what, dict(names), lambda p: WORK[p.what](p, device), clock)
        for (what, names), members in kinds.items()
    ]


def fit_messages(points: Iterable[Point], device: str) -> list[Fit]:
    """One fit for each collective and group size (and, of all-reduces on CPUs, on either side of
    `LARGE_BYTES`), by each of the clocks: processor seconds of a rank, and the wall clock with all
    groups of the size at work."""
    kinds: dict[tuple, list[Point]] = defaultdict(list)
    for point in points:
        if point.what != "message" or not point.sizes["bytes"]:
            continue
        sizes = dict(point.sizes)
        size_bytes = sizes.pop("bytes")
        if device == "cpu" and sizes["op"] == "all_reduce":
            sizes["from_bytes"] = LARGE_BYTES if _number(size_bytes) >= LARGE_BYTES else 0
        kinds[tuple(sizes.items())].append(point)
    return [
        fit(members, "message", dict(names), _message_work, clock)
        for names, members in kinds.items()
        for clock in ("wall", "cpu")
    ]


def _number(value: int | str) -> float:
    return float(value)


def _message_work(point: Point) -> Work:
    return {"byte": wire_bytes(point)}


def wire_bytes(point: Point) -> float:
    """What leaves a rank in one call, as the ledger counts it."""
    op = {"shift": "send", "all_to_all_rows": "all_to_all"}.get(str(point.sizes["op"]))
    op = op or str(point.sizes["op"])
    transfer = Transfer("world", "forward", op, point.sizes["size"], point.sizes["bytes"], 1)
    return float(transfer.wire_bytes)


# --- work, by kind of point --------------------------------------------------------------------


def _product_work(point: Point, device: str) -> Work:
    """Its floating-point operations, and the bytes it reads and writes: a gradient that is added to
    an fp32 sum is read and written in fp32."""
    m, n, k = (_number(point.sizes[name]) for name in "mnk")
    groups = _number(point.sizes.get("groups", 1))
    element = PRODUCT_BYTES[point.precision]
    moved = element * (m * n + n * k + m * k)
    if point.sizes["part"] == "weight":
        moved = element * (m * n + m * k) + 2 * 4.0 * n * k
    work = {"flop": 2 * groups * m * n * k, "byte": groups * moved}
    return work if point.what == "product" else {"group": groups, **work}


def _attention_work(point: Point, device: str) -> Work:
    """Products over the scores that are computed: two forward, five backward (FlashAttention-2,
    arXiv:2307.08691, section 4.1)."""
    b, h, d, s = (_number(point.sizes[name]) for name in ("batch", "heads", "head_dim", "sequence"))
    scores = s * s if point.what == "attention_block" else causal_scores(s, device)
    products = 2 if point.sizes["part"] == "forward" else 5
    return {"flop": products * 2 * b * h * d * scores}


def causal_scores(sequence: float, device: str) -> float:
    """Scores that causal attention computes for each head: all that are not masked, on CPUs also
    the masked ones in a block of keys that is not masked as a whole."""
    block = min(sequence, CPU_KEYS_AT_A_TIME) if device == "cpu" else 1
    return sequence * (sequence + block) / 2


def _light_work(point: Point, device: str) -> Work:
    rows, width = _number(point.sizes["rows"]), _number(point.sizes["width"])
    elements = rows * width
    if device == "cuda":
        return {"element": elements}
    return {"element": elements, "far_element": max(0.0, elements - NEAR_BYTES / 4)}


def _memory_work(point: Point, device: str) -> Work:
    size = _number(point.sizes["bytes"])
    if device == "cuda":
        return {"byte": size}
    return {"byte": size, "far_byte": max(0.0, size - NEAR_BYTES)}


def _optimizer_work(point: Point, device: str) -> Work:
    tensors = _number(point.sizes["tensors"])
    return {"tensor": tensors, "element": tensors * _number(point.sizes["elements"])}


def _nothing(point: Point, device: str) -> Work:
    return {}


WORK: dict[str, Callable[[Point, str], Work]] = {
    "product": _product_work,
    "grouped": _product_work,
    "attention": _attention_work,
    "attention_block": _attention_work,
    "light": _light_work,
    "memory": _memory_work,
    "optimizer": _optimizer_work,
    "host": _nothing,
}
"""The kinds that are fitted; layers and their parts are kept to check the fits with."""
