"""What a search must respect besides the job: fixed and forbidden settings, memory, objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.actions import is_table_file
from fivefold.layout.notation import FIELDS, Layout, parse, stated
from fivefold.plan.engines import Job
from fivefold.plan.memory.states import FITS, verdict

T = TypeVar("T")

OBJECTIVES = ("time", "memory", "cost")

NEUTRAL: dict[str, object] = {
    **{each.name: each.default for each in fields(Layout)},
    "recompute": ("none", 0),
}
"""The value of each field that does without the split."""


@dataclass(frozen=True)
class Constraints:
    """What is asked of a search. UserError for an unknown objective or an empty list."""

    fix: str = ""  # tokens of the layout notation that the layout must have: "tp8 zero1"
    forbid: str = ""  # that it must not have; a name alone forbids the split: "pp tp16"
    top: int = 5  # layouts in the list
    objective: str = "time"  # memory: least peak; cost: fewest device-hours, on fewer devices too
    max_memory_bytes: float | None = None  # instead of the device's memory
    headroom: float | None = None  # share of the memory that stays free; None: 1 - FITS
    planned_schedules: bool = False  # also schedules that no engine runs yet

    @cached_property
    def choices(self) -> Choices:
        """`fix` and `forbid`, read once. UserError for what cannot be read or contradicts."""
        return Choices.read(self.fix, self.forbid)

    def check(self) -> None:
        """UserError for a value that no search can have."""
        if self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise UserError(f"objective {self.objective!r} is unknown: it may be {known}")
        if self.top < 1:
            raise UserError(f"the list must have 1 layout or more, not {self.top}")
        _ = self.choices

    def memory_bytes(self, job: Job) -> float:
        """The memory of a device that may be used."""
        return self.max_memory_bytes or float(job.cluster.device.memory_bytes)

    def limit_bytes(self, job: Job) -> float:
        """What a layout may take of it: without `headroom`, as much as counts as fitting."""
        if self.max_memory_bytes is not None:
            return self.max_memory_bytes * (1 - (self.headroom or 0.0))
        share = FITS if self.headroom is None else 1 - self.headroom
        return job.cluster.device.memory_bytes * share

    def verdict(self, job: Job, peak_bytes: float) -> str:
        """fits, tight or no."""
        if self.headroom is not None and peak_bytes > self.limit_bytes(job):
            return "no"
        return str(verdict(peak_bytes, self.memory_bytes(job)))


def parse_named(text: str, gpus: int | None = None) -> Layout:
    """A layout with a named schedule: the planner has no formulas for a table of actions."""
    layout = parse(text, gpus)
    if is_table_file(layout.schedule):
        raise UserError(
            f"schedule={layout.schedule} is a custom table, which runs but cannot be planned: "
            "`fivefold schedule` times it, and a layout to plan has a schedule with a name"
        )
    return layout


@dataclass(frozen=True)
class Choices:
    """Values of fields of `LayoutBatch` (and edp) that a layout must have, and must not have.

    A recompute mode is a pair, the mode and its number of layers; `forbidden` may also have a mode
    with any number.
    """

    fixed: Mapping[str, object] = field(default_factory=dict)
    forbidden: Mapping[str, frozenset[object]] = field(default_factory=dict)

    @classmethod
    def read(cls, fix: str = "", forbid: str = "") -> Choices:
        """Tokens of the layout notation: `fix` "tp8 zero1", `forbid` "pp tp16 recompute=full".

        In `forbid` a name alone, such as pp, forbids that split. UserError for a token that states
        nothing, and for one that is fixed and forbidden.
        """
        stated(fix)  # rejects a token stated twice
        fixed: dict[str, object] = {}
        tokens: dict[str, str] = {}  # by the field that is fixed
        forbidden: dict[str, set[object]] = {}
        for token in fix.lower().split():
            if token == "schedule=interleaved":
                forbidden["vpp"] = {1}
                name, value = "schedule", "1f1b"
            else:
                name, value = _value_of(token)
            fixed[name], tokens[name] = value, token
        for token in forbid.lower().split():
            name, values = _forbidden_by(token)
            if name in fixed and _is_forbidden(fixed[name], values, NEUTRAL.get(name)):
                known = tokens.get(name, name)
                raise UserError(f"{token} is forbidden, but {known} is fixed: leave out one")
            if values is None:
                fixed.setdefault(name, NEUTRAL[name])
            else:
                forbidden.setdefault(name, set()).update(values)
        return cls(fixed, {name: frozenset(values) for name, values in forbidden.items()})

    def value(self, name: str, default: T) -> T:
        """The value that a field is fixed at, or the default."""
        return cast(T, self.fixed.get(name, default))

    def of(self, name: str, values: Sequence[T]) -> list[T]:
        """The values of a field that are left, of those that a search would try."""
        if name in self.fixed:
            values = [cast(T, self.fixed[name])]
        return [value for value in values if value not in self.forbidden.get(name, ())]

    def allow(self, name: str, value: NDArray[np.generic]) -> NDArray[np.bool_]:
        """The same for an array: which values are left."""
        left = np.ones(value.shape, bool)
        if name in self.fixed:
            left &= np.asarray(value == self.fixed[name])
        for each in self.forbidden.get(name, ()):
            left &= np.asarray(value != each)
        return left


def _value_of(token: str) -> tuple[str, object]:
    """The field that one token states, and its value."""
    (name,) = stated(token)
    if name == "edp":  # edp alone: dp is what the experts leave, all of it
        return "edp", int(token[3:])
    name = FIELDS.get(name, name)
    layout = parse_named(token)
    if name == "recompute":
        return name, (layout.recompute, layout.recompute_layers)
    return name, getattr(layout, name)


def _forbidden_by(token: str) -> tuple[str, frozenset[object] | None]:
    """The field that a token of `forbid` is about and the values it forbids; None: all but the
    one that does without."""
    name = FIELDS.get(token, token)
    if name == "sp":
        return "sp", frozenset({True})
    if name in NEUTRAL and name not in ("schedule", "order"):
        return name, None
    if token == "recompute=full":
        return "recompute", frozenset({"full"})
    if token == "schedule=interleaved":
        return "vpp", None
    name, value = _value_of(token)
    return name, frozenset({value})


def _is_forbidden(value: object, forbidden: frozenset[object] | None, neutral: object) -> bool:
    if forbidden is None:
        return value != neutral
    return value in forbidden or (isinstance(value, tuple) and value[0] in forbidden)
