"""What one layer of this program takes for one micro-batch, for many layouts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.model.config import LayerKind
from fivefold.parallel.workload import RankWorkload
from fivefold.plan.engines import Job
from fivefold.plan.memory.fold import GRADIENT, ROUTED, Floats, Folded, Phase, fold
from fivefold.plan.operations.layer import layer_operations
from fivefold.plan.operations.operation import INPUT, Bytes, Operation
from fivefold.plan.operations.sizes import Sizes, structures

NOTHING = Phase(*(np.zeros(1) for _ in range(4)), experts=False)


@dataclass(frozen=True)
class Passes:
    """Bytes [layout]. The peaks count from nothing: forward from before its input is there,
    backward from before all that it kept."""

    kept: Floats  # from its forward to its backward pass; its input is a part of that
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]
    given: tuple[Phase, ...]  # the backward pass where the output's gradient is not counted
    gradients: Floats  # of sharded weights, as autograd made them
    expert_gradients: Floats
    deferred_weight_grads: Floats  # from the backward pass for the input to that for the weights
    closing: Floats  # of that, the gradient that came in
    weights: Phase  # the pass for the weights, from nothing but what was deferred


class Gradients(NamedTuple):
    """How a backward pass treats the gradients of weights."""

    deferred: bool = False  # is it for the gradient of the input alone?
    accumulated: bool = False  # are there those of earlier micro-batches?


class LayerMemory:
    """The passes of layers of each kind, found once for all layouts of a batch."""

    def __init__(self, job: Job, layouts: LayoutBatch, work: RankWorkload) -> None:
        self.job, self.layouts, self.work = job, layouts, work
        self._known: dict[tuple[LayerKind, bool, Gradients], Passes] = {}

    @cached_property
    def groups(self) -> list[tuple[NDArray[np.int64], str, Sizes]]:
        """The layouts of one structure that recompute alike: their indices, how, and sizes."""
        found = []
        for structure, members in structures(self.job, self.layouts).items():
            modes = self.layouts.recompute[members]
            for mode in np.unique(modes):
                those = members[modes == mode]
                part = self.layouts.take(those)
                work = replace(self.work, layout=part)
                found.append((those, str(mode), Sizes(self.job, part, work, structure)))
        return found

    def passes(self, kind: LayerKind, recomputed: bool, gradients: Gradients) -> Passes:
        """Passes of one layer, [layout]; of one that is `recomputed` as a whole only in layouts
        that do so."""
        key = kind, recomputed, gradients
        if key not in self._known:
            parts = []
            for members, mode, sizes in self.groups:
                if not recomputed or mode == "full":
                    way = "full" if recomputed else "none" if mode == "full" else mode
                    parts.append((members, _passes(sizes, kind, way, gradients)))
            self._known[key] = _joined(parts, len(self.layouts))
        return self._known[key]


_FOLDS: dict[tuple[Any, ...], Folded] = {}


def _passes(s: Sizes, kind: LayerKind, recompute: str, gradients: Gradients) -> Passes:
    split, accumulated = gradients
    operations, region = layer_operations(s, kind)
    sizes = tensor_sizes(s, operations, accumulated)
    count = len(s.layouts)
    table = np.array([np.broadcast_to(size, count) for size in sizes.values()], float)
    # The list depends on these alone, but for its sizes.
    key = s.job.config, s.structure, kind.moe, recompute, split
    if key not in _FOLDS:
        _FOLDS[key] = fold(operations, region, recompute, split, sizes)
    folded = _FOLDS[key]
    left, none = folded.left @ table, np.zeros(count)
    experts = table[[name.startswith(ROUTED) for name in sizes]].sum(axis=0)
    return Passes(
        kept=folded.kept @ table,
        forward=tuple(phase.phase(table) for phase in folded.forward),
        backward=tuple(phase.phase(table) for phase in folded.backward),
        given=tuple(phase.phase(table, folded.given) for phase in folded.backward),
        gradients=none if split else left,
        expert_gradients=none if split else experts,
        deferred_weight_grads=left if split else none,
        closing=np.broadcast_to(sizes[GRADIENT] * folded.closing, count),
        weights=folded.weights.phase(table) if folded.weights else NOTHING,
    )


def tensor_sizes(s: Sizes, operations: list[Operation], accumulated: bool) -> dict[str, Bytes]:
    """Bytes of all that `memory.fold` has names for."""
    sizes: dict[str, Bytes] = {INPUT: s.hidden, GRADIENT: s.hidden}
    for each in operations:
        sizes |= {**each.makes, **each.keeps}
        sizes |= {f"{each.name}:peak{index}": size for index, size in enumerate(each.peaks)}
        backward = enumerate(each.backward_peaks)
        sizes |= {f"{each.name}:backward{index}": size for index, size in backward}
        sizes[f"{each.name}:workspace"] = each.workspace
        sizes[f"{each.name}:backward"] = each.backward_workspace
        sizes[f"{each.name}:gathered"] = each.gathered
        for name in each.reads:
            size = each.gradients.get(name, sizes[name])
            sizes[f"d {name} by {each.name}"] = sizes[f"d {name} to {each.name}"] = size
        for weight in each.weights:
            size = s.element * s.weight(weight)
            sharded = s.sharded(each.is_routed)
            # Products in fp32 are added to a buffer without a temporary.
            sizes[f"make {weight}"] = size * (sharded | s.structure.short)
            waits = s.waits(each.is_routed, accumulated)
            sizes[f"grad {weight}"] = size * waits
            sizes[f"hold {weight}"] = size * (sharded & ~waits)
    return sizes


def _joined(parts: list[tuple[NDArray[np.int64], Any]], count: int) -> Any:
    """One record of arrays [layout] from those of groups of layouts."""

    def join(*values: Any) -> Any:
        if isinstance(values[0], bool):
            return values[0]
        joined = np.zeros(count)
        for (members, _), value in zip(parts, values, strict=True):
            joined[members] = value
        return joined

    return map_records(join, *(value for _, value in parts))


def map_records(function: Callable[..., Any], *records: Any) -> Any:
    """The record of what `function` makes of the entries of records that are alike."""
    first = records[0]
    if isinstance(first, tuple):
        return tuple(map_records(function, *each) for each in zip(*records, strict=True))
    if is_dataclass(first):
        columns = ((getattr(each, f.name) for each in records) for f in fields(first))
        return type(first)(*(map_records(function, *column) for column in columns))  # pyright: ignore
    return function(*records)
