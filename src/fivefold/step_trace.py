"""The language that run and report share: what one rank did in one optimizer step, and when.

Times are seconds of `time.perf_counter`, which on one machine is one clock for all processes. On a
GPU they are those of the host, which issues work and waits for little of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from fivefold.ledger import SPLITS

PARTS: tuple[str, ...] = ("compute", *SPLITS, "bubble", "optimizer", "data")
"""Where the seconds of a step go; see `seconds`."""


class Work(NamedTuple):
    """Something that the rank did. Other work and waits may lie within."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Message:
    """A message under way. What names it is as in the ledger, which leaves receives out (the
    sender counts them): their payload is 0, and they have a sender's group."""

    split: str
    phase: str  # in which it was issued
    op: str
    group_size: int
    payload_bytes: int
    axis: str  # of the layout, or the pipeline's channel
    ranks: tuple[int, ...]  # of the group
    start_s: float  # issued
    wait_start_s: float | None = None  # the rank begins to wait for it; None: it never did
    end_s: float | None = None  # seen to be done; None: nobody looked

    @property
    def exposed_s(self) -> float:
        """Seconds in which the rank did nothing else."""
        return (
            0.0
            if self.wait_start_s is None or self.end_s is None
            else self.end_s - self.wait_start_s
        )


@dataclass
class StepTrace:
    """What one rank did in one optimizer step, in the order in which it was begun (messages) and
    ended (work)."""

    start_s: float = field(default_factory=perf_counter)
    end_s: float | None = None  # None: still at it
    work: list[Work] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @contextmanager
    def doing(self, name: object) -> Iterator[None]:
        """Notes what runs inside as work of this name."""
        start_s = perf_counter()
        yield
        self.work.append(Work(str(name), start_s, perf_counter()))

    def end(self) -> None:
        self.end_s = perf_counter()


def seconds(trace: StepTrace) -> dict[str, float]:
    """Where the seconds of a finished step went, by `PARTS`; their sum is the step.

    - a split: its exposed messages, which is waiting for them;
    - bubble: waiting for a pipeline neighbour's message, whether the neighbour or the message is
      late. With a pipeline, the wait for all ranks in the step's last message (`world`) is bubble
      too: there the ranks that have drained wait for those that have not;
    - optimizer: what follows the last backward pass, but for messages: norms, AdamW;
    - compute: all the rest.
    """
    assert trace.end_s is not None
    parts = dict.fromkeys(PARTS, 0.0)
    optimizer_s = trace.end_s
    for work in trace.work:
        if work.name in ("optimizer", "data"):
            parts[work.name] += work.end_s - work.start_s
        if work.name == "optimizer":
            optimizer_s = min(optimizer_s, work.start_s)
    pipeline = any(is_between_stages(message) for message in trace.messages)
    for message in trace.messages:
        if message.wait_start_s is None:
            continue
        idle = message.op == "receive" or (pipeline and message.split == "world")
        parts["bubble" if idle else message.split] += message.exposed_s
        if message.wait_start_s >= optimizer_s:
            parts["optimizer"] -= message.exposed_s
    parts["compute"] = trace.end_s - trace.start_s - sum(parts.values())
    return parts


def is_between_stages(message: Message) -> bool:
    """Does it go along the pipeline, from one stage to the next?"""
    return message.split == "pp" and message.op in ("send", "receive")
