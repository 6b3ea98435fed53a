"""Allocations one after the other, and the most that was alive. Elementwise on arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.plan.time.operations import Numbers


@dataclass(frozen=True)
class Phase:
    """A part of a pass; bytes above what was there before the pass."""

    peak: Numbers
    old: Numbers  # of what the forward pass left behind, at the peak of the backward pass
    end: Numbers  # alive when it is over
    old_end: Numbers  # of that, what the forward pass left
    experts: bool  # does it need the experts' weights?


class Tape:
    """Tensors by name while a piece of a program runs, written down as the program makes them and
    lets them go. Sizes are bytes: numbers, or arrays [n] over layouts, 0 where there is no such
    tensor. With `saving`, operands of the backward pass outlive the variables that held them."""

    def __init__(self, saving: bool) -> None:
        self.saving = saving
        self.sizes: dict[str, Numbers] = {}
        self.alive: Numbers = 0.0
        self.peak: Numbers = 0.0
        self.old_at_peak: Numbers = 0.0
        self.phases: list[Phase] = []
        self._saved: set[str] = set()
        self._old: dict[str, Numbers] = {}

    def take(self, **sizes: Numbers) -> None:
        """Allocate these."""
        for name, size in sizes.items():
            self.sizes[name] = self.sizes.get(name, 0.0) + size
            self.alive = self.alive + size
        self.pass_by()

    def save(self, *names: str, always: bool = False) -> None:
        """Something of the backward pass needs these; `always`, even where nothing is saved for
        one, the object that holds them lives as long."""
        if self.saving or always:
            self._saved.update(names)

    def leave(self, *names: str) -> None:
        """The forward pass no longer refers to these: they go unless they are saved."""
        self.free(*(name for name in names if name not in self._saved))

    def free(self, *names: str) -> None:
        """These go."""
        for name in names:
            self.alive = self.alive - self.sizes.pop(name)
            self._saved.discard(name)
            self._old.pop(name, None)

    def keep(self, *names: str) -> None:
        """Their variables go, but something put off holds on to these: from now on they have names
        of their own."""
        for name in names:
            for sizes in (self.sizes, self._old):
                if name in sizes:
                    kept = f"put off: {name}"
                    sizes[kept] = sizes.get(kept, 0.0) + sizes.pop(name)
            self._saved.discard(name)

    def cut(self, **sizes: Numbers) -> None:
        """Of these so much goes, in layouts that do not have them so long."""
        for name, size in sizes.items():
            self.sizes[name] = self.sizes[name] - size
            self.alive = self.alive - size
            if name in self._old:
                self._old[name] = self._old[name] - size

    def pass_by(self, *sizes: Numbers) -> None:
        """These are there together for a moment."""
        now = self.alive + sum(sizes)
        self.old_at_peak = np.where(now > self.peak, sum(self._old.values()), self.old_at_peak)
        self.peak = np.maximum(self.peak, now)

    def end_phase(self, *gone: str, experts: bool = False) -> None:
        """Begin a new phase, with a peak of its own, once these have gone."""
        old = sum(self._old.values())
        self.phases.append(Phase(self.peak, self.old_at_peak, self.alive, old, experts))
        self.free(*gone)
        self.peak, self.old_at_peak = 0.0, 0.0
        self.pass_by()

    def turn(self) -> None:
        """The forward pass is over: all there is is old now, and the peak to come counts."""
        self._old, self.phases = dict(self.sizes), []
        self.peak, self.old_at_peak = 0.0, 0.0
        self.pass_by()
