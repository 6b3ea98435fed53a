"""Many layouts at once: the fields of `Layout`, each an array with an entry a layout.

The planner looks at hundreds of thousands of layouts, so what it computes about one it computes
about all, elementwise: the degrees (`Degrees`), the rules, the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Bools, Ints
from fivefold.layout.actions import ActionTable
from fivefold.layout.degrees import Degrees
from fivefold.layout.notation import Layout

SHARED = ("order", "layers", "table")
"""The fields that all layouts of one `LayoutBatch` have in common."""
TYPES = {"sp": np.bool_, "recompute": np.str_, "schedule": np.str_}
"""The types of the arrays that are not int64."""
ARRAYS = tuple(field.name for field in fields(Layout) if field.name not in SHARED)


@dataclass(frozen=True, eq=False)
class LayoutBatch(Degrees):
    """n layouts; every field but the last three is an array [n]. See `Layout` for their meaning."""

    tp: Ints
    sp: Bools
    pp: Ints
    vpp: Ints
    dp: Ints
    dp_replicate: Ints
    zero: Ints
    ep: Ints
    etp: Ints
    ulysses: Ints
    ring: Ints
    micro_batch: Ints
    accumulation: Ints
    recompute: NDArray[np.str_]
    recompute_layers: Ints
    schedule: NDArray[np.str_]
    order: tuple[str, ...]
    layers: tuple[int, ...] | None
    table: ActionTable | None = None

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutBatch:
        """These layouts, in their order. ValueError unless order and layers are the same in all."""
        if not layouts:
            raise ValueError("no layouts were given")
        shared = {name: getattr(layouts[0], name) for name in SHARED}
        for layout in layouts:
            if any(getattr(layout, name) != value for name, value in shared.items()):
                raise ValueError(f"{layout} and {layouts[0]} differ in order= or layers=")
        arrays = {
            name: np.array([getattr(each, name) for each in layouts], TYPES.get(name, np.int64))
            for name in ARRAYS
        }
        return cls(**arrays, **shared)

    @classmethod
    def concatenate(cls, parts: Sequence[LayoutBatch]) -> LayoutBatch:
        """The layouts of all parts. ValueError unless order and layers are the same in all."""
        if not parts:
            raise ValueError("no layouts were given")
        shared = {name: getattr(parts[0], name) for name in SHARED}
        for part in parts:
            if any(getattr(part, name) != value for name, value in shared.items()):
                raise ValueError("layouts that differ in order= or layers= cannot be joined")
        arrays = {name: np.concatenate([getattr(each, name) for each in parts]) for name in ARRAYS}
        return cls(**arrays, **shared)

    def __len__(self) -> int:
        return len(self.tp)

    def __getitem__(self, index: int) -> Layout:
        values: dict[str, Any] = {name: getattr(self, name)[index].item() for name in ARRAYS}
        return Layout(**values, order=self.order, layers=self.layers, table=self.table)

    def take(self, chosen: NDArray[np.bool_ | np.int64] | slice) -> LayoutBatch:
        """The layouts that a mask [n], an array of indices or a slice chooses."""
        arrays: dict[str, Any] = {name: getattr(self, name)[chosen] for name in ARRAYS}
        return LayoutBatch(**arrays, order=self.order, layers=self.layers, table=self.table)


def alike(layouts: Sequence[Layout]) -> list[list[int]]:
    """Indices of those that one `LayoutBatch` can hold together: with the same order and layers."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, layout in enumerate(layouts):
        key = tuple(getattr(layout, name) for name in SHARED)
        groups.setdefault(key, []).append(index)
    return list(groups.values())
