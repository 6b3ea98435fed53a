"""A machine whose devices are processes that share the cores of a CPU, as `fivefold calibrate`
measures it.

A core does one thing after the other, so everything adds up: starting an operation, its
arithmetic, the bytes it reads and writes, and its part in the messages, which no other hardware
carries. Besides, a rank waits for messages to arrive; in that time its core is another's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from fivefold.errors import UserError
from fivefold.schema import Count, NotNegative, Positive, Section

Floats = NDArray[np.float64]

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send"]
"""Operations that are measured: those of the ledger, where a ring's sends are shifts."""
Split = Literal["zero", "tp", "ulysses", "ring", "ep"]
"""Kinds of messages, see `plan.time.cpu.kind_of`."""
Cause = Literal["alone", "messages", "zero", "recompute"]
"""What a process holds more memory for than its tensors: by itself, or among others that it
exchanges messages with; and what ZeRO and recomputation add."""


class Pass(Section):
    """Seconds of each unit of work of a forward or of a backward pass."""

    matmul_flop: NotNegative
    matmul_byte: NotNegative  # of a product's operands and result
    attention_flop: NotNegative
    elementwise_byte: NotNegative  # read or written by memory-bound operations
    operation: NotNegative  # started

    @model_validator(mode="after")
    def _takes_time(self) -> Pass:
        if not self.rates.any():
            raise ValueError("a pass takes no time: measure it again with fivefold calibrate")
        return self

    @property
    def rates(self) -> Floats:
        """In the order of the fields [5]."""
        return np.array(list(self.model_dump().values()))

    def seconds(self, work: Floats) -> Floats:
        """Of work [5, ...], in the order of the fields."""
        return np.tensordot(self.rates, work, 1)


class CallSeconds(Section):
    """One call on one rank."""

    busy_s: NotNegative  # of its core
    wait_s: NotNegative  # in which its core is free


class ProcessOverhead(Section):
    """Bytes that a process holds besides its tensors: `bytes` and `share` of what `plan.memory`
    predicts."""

    bytes: NotNegative  # libraries, buffers of messages
    share: NotNegative
    """What lies idle: of the tensors; with ZeRO of the largest layer's weights; with recomputation
    of a micro-batch's hidden state."""


class MessageRecord(Section):
    """One call of an operation by groups of so many ranks, with so large a payload."""

    op: Op
    ranks: Count
    bytes: Positive
    busy_s: NotNegative
    wait_s: NotNegative


@dataclass(frozen=True)
class MessageSeconds:
    """Calls on one rank, arrays [n]."""

    busy: Floats
    wait: Floats


class Cpu(Section):
    """The cores that the devices of a machine share. Seconds are those of one core."""

    cores: Count
    forward: Pass
    backward: Pass
    copy_byte: NotNegative  # read or written by a copy
    optimizer_element: NotNegative  # of its norm and its update
    step: NotNegative = 0.0  # once a step
    calls: dict[Split, CallSeconds] = Field(default_factory=dict)
    """What the program does around a message besides the message; nothing for a kind that is not
    among them."""
    overhead: dict[Cause, ProcessOverhead] = Field(default_factory=dict)
    slowdown: dict[int, Positive] = Field(default_factory=dict)
    """By how many processes run a step: how much longer what they do takes in it than its parts by
    themselves. Where they share a core, each finds the caches full of others', for one thing."""
    messages: list[MessageRecord] = Field(default_factory=list)

    def among(self, processes: int) -> Cpu:
        """As a core works in a step of so many processes: between numbers of them that were
        measured, or as in the nearest."""
        if not self.slowdown:
            return self
        measured = sorted(self.slowdown)
        factor = float(np.interp(processes, measured, [self.slowdown[each] for each in measured]))

        def slower(values: Section, *names: str) -> dict[str, float]:
            return {name: factor * getattr(values, name) for name in names}

        passes = {
            name: getattr(self, name).model_copy(
                update=slower(getattr(self, name), *Pass.model_fields)
            )
            for name in ("forward", "backward")
        }
        calls = {
            kind: each.model_copy(update=slower(each, "busy_s"))
            for kind, each in self.calls.items()
        }
        rest = slower(self, "copy_byte", "optimizer_element", "step")
        return self.model_copy(update={**passes, **rest, "calls": calls})

    def message_s(self, op: str, size: ArrayLike, payload_bytes: ArrayLike) -> MessageSeconds:
        """Seconds of one call of an operation on groups of `size` ranks, [n]; 0 for a group of one.

        Between the payloads and the group sizes that were measured by interpolation; beyond the
        largest payload in proportion, beyond the largest group as for that.
        UserError where the operation was not measured.
        """
        size, payload = np.broadcast_arrays(np.atleast_1d(size), np.atleast_1d(payload_bytes))
        by_size: dict[int, list[MessageRecord]] = defaultdict(list)
        for record in self.messages:
            if record.op == op:
                by_size[record.ranks].append(record)
        if not by_size:
            raise UserError(
                f"the cluster has a CPU but no message {op}: measure it again with fivefold "
                "calibrate"
            )
        sizes = sorted(by_size)
        curves = np.array([_curve(by_size[each], payload) for each in sizes])  # [sizes, 2, n]
        place = np.interp(size, sizes, np.arange(len(sizes)))
        below = np.minimum(place.astype(int), len(sizes) - 1)
        above = np.minimum(below + 1, len(sizes) - 1)
        here, share = np.arange(len(payload)), place - below
        busy, wait = (
            (1 - share) * curves[below, part, here] + share * curves[above, part, here]
            for part in range(2)
        )
        return MessageSeconds(np.where(size > 1, busy, 0.0), np.where(size > 1, wait, 0.0))


def _curve(records: list[MessageRecord], payload: Floats) -> Floats:
    """Busy and waiting seconds [2, n] at payloads [n]."""
    records = sorted(records, key=lambda record: record.bytes)
    at = [record.bytes for record in records]
    beyond = np.maximum(payload / at[-1], 1.0)
    busy, wait = (
        np.interp(payload, at, seconds)
        for seconds in ([r.busy_s for r in records], [r.wait_s for r in records])
    )
    return beyond * np.array([busy, wait])
