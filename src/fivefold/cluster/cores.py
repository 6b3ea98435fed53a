"""A machine whose devices are processes that share the cores of a CPU, as `fivefold calibrate`
measures it.

A core does one thing after the other, so that everything adds up: starting an operation, its
arithmetic, the bytes it reads and writes, and its part in the messages, which no other hardware
carries. Beside that a rank waits for messages to arrive; in that time its core is another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import UserError

Floats = NDArray[np.float64]

MESSAGES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")
"""Operations that are measured: those of the ledger, where a ring's sends are shifts."""


@dataclass(frozen=True)
class Pass:
    """Seconds of each unit of work of a forward or of a backward pass."""

    product_flop: float
    product_byte: float  # of a product's operands and result
    attention_flop: float
    light_byte: float  # read or written by light operations
    operation: float  # started

    def seconds(self, work: Floats) -> Any:
        """Of work [5, ...], in the order of the fields."""
        return np.tensordot(astuple(self), work, 1)


@dataclass(frozen=True)
class Core:
    """Seconds of what one core does."""

    forward: Pass
    backward: Pass
    copy_byte: float  # read or written by a copy
    optimizer_element: float  # of its norm and its update
    step: float  # once a step
    calls: Mapping[str, MessageSeconds]
    """What the program does around a message, beside the message, by kinds of messages (see
    `plan.sharing.kind_of`); nothing for a kind that is not among them."""
    resident: Mapping[str, ProcessOverhead]
    """What a process comes to hold beside its tensors: `alone` or with `messages`, and what `zero`
    and `recompute` add."""
    paces: Mapping[int, float]
    """How much longer what a process does takes in a whole step of so many processes than its parts
    by themselves. Where they share a core, each finds the caches full of others', for one thing."""

    def among(self, processes: int) -> Core:
        """As it works in a step of so many processes: between numbers of them that were measured,
        or as in the nearest."""
        if not self.paces:
            return self
        measured = sorted(self.paces)
        pace = float(np.interp(processes, measured, [self.paces[each] for each in measured]))
        forward, backward = (
            Pass(*(pace * rate for rate in astuple(each))) for each in (self.forward, self.backward)
        )
        return replace(
            self,
            forward=forward,
            backward=backward,
            copy_byte=pace * self.copy_byte,
            optimizer_element=pace * self.optimizer_element,
            step=pace * self.step,
            calls={kind: replace(each, busy=pace * each.busy) for kind, each in self.calls.items()},
        )


@dataclass(frozen=True)
class ProcessOverhead:
    """Bytes that a process holds beside its tensors: `bytes` and `share` of what
    `plan.memory` says."""

    bytes: float  # libraries, buffers of messages
    share: float
    """What lies idle: of the tensors; with ZeRO of the largest layer's weights; with recomputation
    of a micro-batch's hidden state."""


@dataclass(frozen=True)
class MessageSeconds:
    """One call on one rank, numbers or arrays [n] over layouts."""

    busy: Any  # of its core
    wait: Any  # in which its core is free


def core_of(operations: Sequence[Mapping[str, Any]], where: str) -> Core:
    """The core that was measured. UserError where the operations of file `where` lack a part."""
    records = {record.get("what"): record for record in operations}
    for record in operations:
        _check_known(record, "what", tuple(OPERATIONS), where)
        if kinds := OPERATIONS[record["what"]]:
            _check_known(record, "kind", kinds, where)

    def _number(record: Mapping[str, Any], name: str, what: str) -> float:
        return checked(record.get(name), f"{where} has cores but no {what}")

    def numbers(what: str, names: list[str]) -> list[float]:
        record = records.get(what, {})
        return [_number(record, name, f"{name} of {what!r} among its operations") for name in names]

    names = [field.name for field in fields(Pass)]
    forward, backward = (Pass(*numbers(what, names)) for what in ("forward", "backward"))
    for what, rates in (("forward", forward), ("backward", backward)):
        if not any(astuple(rates)):
            raise UserError(
                f"{where} has cores on which a {what} pass takes no time: measure it again with "
                "fivefold calibrate"
            )
    copy_byte, optimizer_element, step = numbers("rest", ["copy_byte", "optimizer_element", "step"])
    calls = {
        str(record.get("kind")): MessageSeconds(
            *(_number(record, name, f"{name} of a call") for name in ("busy_s", "wait_s"))
        )
        for record in operations
        if record.get("what") == "call"
    }
    resident = {
        str(record.get("kind")): ProcessOverhead(
            *(_number(record, name, f"{name} that is resident") for name in ("bytes", "share"))
        )
        for record in operations
        if record.get("what") == "resident"
    }
    paces = {
        int(_number(record, "processes", "processes of a pace")): _number(
            record, "factor", "factor of a pace"
        )
        for record in operations
        if record.get("what") == "pace"
    }
    if not all(paces.values()):
        raise UserError(f"{where} has a pace whose factor is 0: it must be above")
    return Core(forward, backward, copy_byte, optimizer_element, step, calls, resident, paces)


OPERATIONS = {
    "forward": (),
    "backward": (),
    "rest": (),
    "call": ("zero", "tp", "ulysses", "ring", "ep"),
    "resident": ("alone", "messages", "zero", "recompute"),
    "pace": (),
}
"""The records of a core's operations, by their `what`, and their kinds where they have some."""
MESSAGE_KEYS = ("ranks", "bytes", "busy_s", "wait_s")


def _check_known(record: Mapping[str, Any], key: str, known: tuple[str, ...], where: str) -> None:
    if record.get(key) not in known:
        raise UserError(
            f"{where} has operations whose {key} is {record.get(key)!r}: known are "
            f"{', '.join(known)}"
        )


def check_messages(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises UserError unless each says its operation and its numbers."""
    for record in messages:
        op = record.get("op")
        if op not in MESSAGES:
            raise UserError(f"{where} has a message {op!r}: known are {', '.join(MESSAGES)}")
        for name in record:
            if name not in ("op", *MESSAGE_KEYS):
                raise UserError(
                    f"{where} has {name!r} of a message {op}, which is not known: known are "
                    f"{', '.join(MESSAGE_KEYS)}"
                )
        for name in MESSAGE_KEYS:
            checked(record.get(name), f"{where} has no {name} of a message {op}")


def checked(value: Any, lacks: str) -> float:
    """A number of 0 or more. UserError for anything else, which `lacks` says what is missing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise UserError(
            f"{lacks} that is a number of 0 or more, below 1e18 ({value!r}): measure it again "
            "with fivefold calibrate"
        )
    return float(value)


def message_s(
    messages: Sequence[Mapping[str, Any]], op: str, size: ArrayLike, payload_bytes: ArrayLike
) -> MessageSeconds:
    """Seconds of one call of an operation on groups of `size` ranks, [n]; 0 for a group of one.

    Between the payloads and the group sizes that were measured by interpolation; beyond the largest
    payload in proportion, beyond the largest group as for that.
    UserError where the operation was not measured.
    """
    size, payload = np.broadcast_arrays(np.atleast_1d(size), np.atleast_1d(payload_bytes))
    by_size: dict[float, list[Mapping[str, Any]]] = defaultdict(list)
    for record in messages:
        if record.get("op") == op:
            by_size[record["ranks"]].append(record)
    if not by_size:
        raise UserError(
            f"the cluster has cores but no message {op}: measure it again with fivefold calibrate"
        )
    sizes = sorted(by_size)
    curves = [_curve(by_size[each], payload) for each in sizes]  # each [2, n]
    place = np.interp(size, sizes, np.arange(len(sizes)))
    below = np.minimum(place.astype(int), len(sizes) - 1)
    above = np.minimum(below + 1, len(sizes) - 1)
    here = np.arange(len(payload))
    stacked = np.array(curves)  # [sizes, 2, n]
    share = place - below
    busy, wait = (
        (1 - share) * stacked[below, part, here] + share * stacked[above, part, here]
        for part in range(2)
    )
    return MessageSeconds(np.where(size > 1, busy, 0.0), np.where(size > 1, wait, 0.0))


def _curve(records: Sequence[Mapping[str, Any]], payload: Floats) -> Floats:
    """Busy and waiting seconds [2, n] at payloads [n]."""
    records = sorted(records, key=lambda record: record["bytes"])
    at = [float(record["bytes"]) for record in records]
    beyond = np.maximum(payload / at[-1], 1.0)
    return np.array(
        [
            beyond * np.interp(payload, at, [float(record[name]) for record in records])
            for name in ("busy_s", "wait_s")
        ]
    )
