"""What a layer takes, from the list of its operations: what it keeps, and its peaks.

Forward, a tensor lives until its last reader is over, or on if it is saved. Backward the list is
reversed: an operation allocates the gradients of its inputs and weights, then frees those of its
outputs and what only it still needed. Recomputation reverses what follows the last operation that
saves anything, runs forward to that one again and reverses the rest.

Which tensors are alive when depends on the structure of a layout alone, so it is found once per
structure: a matrix of moments by tensors. The bytes of many layouts are its product with their
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fivefold.plan.operations.operation import INPUT, Operation

Floats = NDArray[np.float64]

GRADIENT, OUTPUT = "gradient", "out"
ROUTED = "grad experts."
"""Begins the names of gradients that are reduced as soon as the experts are through."""
REGION = -1
"""Stands for recomputation itself among those who have saved a tensor."""


@dataclass(frozen=True)
class Phase:
    """A part of a pass. Bytes [layout] above what was there before the layer's forward pass."""

    peak: Floats
    old: Floats  # of the peak, what the forward pass kept
    end: Floats  # alive when the phase is over
    old_end: Floats  # of that, what the forward pass kept
    experts: bool  # does it need the experts' weights?


@dataclass
class Alive:
    """Tensors alive at each moment: rows of indices into the names of sizes."""

    rows: list[list[str]] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    experts: bool = False


class Machine:
    """Runs the operations of a layer forward and backward with names for tensors."""

    def __init__(
        self, operations: list[Operation], region: range, recompute: str, split: bool
    ) -> None:
        """`split`: are the gradients of weights deferred?"""
        self.operations, self.split = operations, split
        all_ = range(len(operations))
        self.region = {"none": range(0), "selective": region, "full": all_}[recompute]
        self.uses: dict[str, int] = {}  # holders of each tensor that is alive
        self.variables: set[str] = set()  # tensors that the program has names for
        self.savers: dict[str, set[int]] = {}  # operations whose backward pass needs a tensor
        self.phases = [Alive()]
        self.gradients: dict[str, str] = {}  # of a tensor, the storage that holds it
        self.deferred: list[tuple[Operation, list[str]]] = []
        self.last_use = {
            name: number
            for number, each in enumerate(operations)
            for name in (*each.makes, *each.keeps, *each.reads, *each.holds)
        }
        self.last_use[OUTPUT] = len(operations)

    # Tensors

    def take(self, *names: str) -> None:
        for name in names:
            self.uses[name] = self.uses.get(name, 0) + 1

    def drop(self, *names: str) -> None:
        for name in names:
            self.uses[name] -= 1
            if not self.uses[name]:
                del self.uses[name]

    def moment(self, *passing: str) -> None:
        """What is alive now, with tensors that are there for a moment."""
        self.phases[-1].rows.append([*self.uses, *passing])

    def enter(self, experts: bool, gone: str = "-") -> None:
        """Begin a phase that does or does not need the experts' weights, unless this is one,
        without the tensors whose names begin with `gone`."""
        if experts != self.phases[-1].experts:
            self.phases[-1].end = list(self.uses)
            self.phases.append(Alive(experts=experts))
            self.drop(*[name for name in self.uses if name.startswith(gone)])
            self.moment()

    def begin(self) -> None:
        """Begin a pass: no phase so far counts."""
        self.phases = [Alive()]
        self.moment()

    def finish(self) -> list[Alive]:
        self.phases[-1].end = list(self.uses)
        return self.phases

    # Forward

    def forward(self) -> None:
        self.take(INPUT)
        self.variables = {INPUT}
        self.begin()
        for name in self.inputs_of(self.region):
            self.savers.setdefault(name, set()).add(REGION)
        first, last = self.experts_of(self.operations)
        for number in range(len(self.operations)):
            self.enter(first <= number <= last)
            self.run(number, saving=number not in self.region)
            if number == last:
                self.enter(False)

    def experts_of(self, operations: list[Operation]) -> tuple[int, int]:
        """The first and the last operation of routed experts; none is a range of nothing."""
        numbers = [number for number, each in enumerate(operations) if each.is_routed]
        return (numbers[0], numbers[-1]) if numbers else (len(operations), -1)

    def inputs_of(self, region: range) -> set[str]:
        made = {name for n in region for name in self.operations[n].makes}
        return {name for n in region for name in self.operations[n].reads} - made

    def run(self, number: int, saving: bool, stops: bool = False) -> None:
        """One operation. `stops`: nothing after it runs, and all variables go."""
        each = self.operations[number]
        for index in range(len(each.peaks)):
            self.moment(f"{each.name}:peak{index}")
        self.take(*each.makes, *each.keeps)
        self.moment(f"{each.name}:workspace")
        for name in each.saved if saving else each.lasting:
            self.savers.setdefault(name, set()).add(number)
        self.variables.update(each.makes, each.keeps)
        over = {name for name in self.variables if stops or self.last_use[name] <= number}
        self.variables -= over
        self.drop(*(name for name in over if not self.savers.get(name)))

    # Backward

    def backward(self) -> None:
        self.drop(OUTPUT)
        self.variables = set()
        self.begin()
        self.take(GRADIENT)
        self.moment()
        self.gradients = {OUTPUT: GRADIENT}
        savers = [n for n in self.region if self.operations[n].saved]
        first, last = self.experts_of(self.operations)
        for number in reversed(range(len(self.operations))):
            if savers and number == savers[-1]:
                self.again(range(self.region.start, number + 1))
            self.enter(first <= number <= last)
            self.reverse(number)
            if number == first:
                self.enter(False, gone=ROUTED)

    def again(self, region: range) -> None:
        first, last = self.experts_of(self.operations)
        for number in region:
            self.enter(first <= number <= last and last in region)
            self.run(number, saving=True, stops=number == region[-1])
        for name in self.inputs_of(self.region):
            self.release(name, REGION)

    def release(self, name: str, saver: int) -> None:
        savers = self.savers.get(name, set())
        if saver in savers:
            savers.remove(saver)
            if not savers:
                self.drop(name)

    def reverse(self, number: int) -> None:
        each = self.operations[number]
        incoming = [self.gradients.pop(name) for name in each.makes if name in self.gradients]
        if number in self.region:
            for name in each.replaced:
                self.release(name, number)
        for index in range(len(each.backward_peaks)):
            self.moment(f"{each.name}:backward{index}")
        made = {name: f"d {name} by {each.name}" for name in each.reads if name not in each.passes}
        self.take(*made.values())
        beside = [f"{each.name}:backward"]
        deferred = bool(self.split and each.weights)
        if each.weights and not deferred:
            beside.append(f"{each.name}:gathered")
        self.moment(*beside)
        if deferred:
            held = [*incoming, *(name for name in each.saved if name in self.uses)]
            self.take(*held)
            self.deferred.append((each, held))
        else:
            self.weights(each, beside)
        made |= {name: incoming[0] for name in each.passes}
        self.take(*(made[name] for name in each.passes))
        self.drop(*incoming)
        for name in each.saved:
            self.release(name, number)
        self.drop(*(name for name in each.lasting if name in self.uses))  # of the first run
        for name, storage in made.items():
            self.accumulate(name, storage, each)

    def accumulate(self, name: str, storage: str, each: Operation) -> None:
        """Autograd adds the gradients of a tensor with several readers."""
        if name in self.gradients:
            total = f"d {name} to {each.name}"
            self.take(total)
            self.moment()
            self.drop(storage, self.gradients[name])
            storage = total
        self.gradients[name] = storage

    def weights(self, each: Operation, beside: Iterable[str]) -> None:
        """An operation hands the gradients of all its weights over together."""
        made: list[str] = []
        for weight in each.weights:
            self.moment(*beside, *made, f"make {weight}")
            self.take(f"grad {weight}")
            made.append(f"hold {weight}")

    def weight_pass(self) -> None:
        """What was deferred, in its order."""
        self.begin()
        for each, held in self.deferred:
            self.moment(f"{each.name}:gathered")
            self.weights(each, [f"{each.name}:gathered"])
            self.drop(*held)


@dataclass(frozen=True)
class Matrix:
    """The moments of a phase: which names are alive, [moment, name]. The last one is the end."""

    alive: Floats
    old: NDArray[np.bool_]  # of the names: kept from the forward pass
    experts: bool

    @classmethod
    def of(cls, rows: Floats, end: Floats, old: NDArray[np.bool_], experts: bool) -> Matrix:
        """Without the moments at which no more is alive than at another one."""
        rows = np.array([*{row.tobytes(): row for row in rows}.values()])
        below = np.array([np.sum(np.all(row <= rows, axis=1)) for row in rows])
        return cls(np.vstack([rows[below == 1], end]), old, experts)

    def phase(self, sizes: Floats, without: Floats | float = 0.0) -> Phase:
        """The phase for `sizes` [name, layout], not counting `without` [name]."""
        alive = self.alive * (1 - without)
        totals = alive @ sizes
        most = totals[:-1].argmax(axis=0)
        old = np.einsum("ln,nl->l", (alive * self.old)[most], sizes)
        old_end = (alive[-1] * self.old) @ sizes
        peak = totals[most, np.arange(sizes.shape[1])]
        return Phase(peak, old, totals[-1], old_end, self.experts)


@dataclass(frozen=True)
class Folded:
    """The fold of one list of operations: which of its sizes are alive when."""

    kept: Floats  # [name]
    forward: tuple[Matrix, ...]
    backward: tuple[Matrix, ...]
    left: Floats  # at the end of the backward pass, but for the input's gradient: [name]
    closing: bool  # is the gradient that came in among what is left?
    given: Floats  # the gradient that came in: [name]
    weights: Matrix | None  # the pass for deferred gradients


def fold(
    operations: list[Operation], region: range, recompute: str, split: bool, sizes: Iterable[str]
) -> Folded:
    """The passes of a layer that is recomputed so: "none", "selective" or "full". `sizes`: the
    names of all sizes, in their order."""
    machine = Machine(operations, region, recompute, split)
    machine.forward()
    machine.drop(OUTPUT)
    kept = list(machine.uses)
    machine.take(OUTPUT)
    forward = machine.finish()
    machine.backward()
    machine.drop(machine.gradients[INPUT])
    left = list(machine.uses)
    machine.take(machine.gradients[INPUT])
    backward = machine.finish()
    weights = None
    if split:
        machine.drop(machine.gradients[INPUT])
        machine.weight_pass()
        (weights,) = machine.finish()
    names = {name: index for index, name in enumerate(sizes)}

    def vector(alive: Iterable[str]) -> Floats:
        row = np.zeros(len(names))
        for name in alive:
            row[names[name]] += 1
        return row

    def matrices(phases: list[Alive], old: list[str]) -> tuple[Matrix, ...]:
        mask = vector(dict.fromkeys(old)) > 0
        return tuple(
            Matrix.of(
                np.array([vector(row) for row in each.rows]), vector(each.end), mask, each.experts
            )
            for each in phases
        )

    return Folded(
        vector(kept),
        matrices(forward, []),
        matrices(backward, [*kept, *left] if split else kept),
        vector(left),
        GRADIENT in left,
        vector([GRADIENT]),
        matrices([weights], left)[0] if weights else None,
    )
