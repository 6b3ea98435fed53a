"""The passes of a step at whose beginning one rank of this program may hold most memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fivefold.layout.actions import is_table_file
from fivefold.layout.notation import PLANNED_SCHEDULES
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.table import Schedule
from fivefold.plan.time.pipeline import in_flight


@dataclass(frozen=True)
class ScheduleEvent:
    """When a rank of a pipeline begins a pass."""

    kind: str  # of the pass: F, B, I or W
    chunk: int
    in_flight: tuple[int, ...]  # micro-batches that it holds of each chunk, this one included
    deferred_weight_grads: tuple[
        int, ...
    ]  # those whose weight gradients are still to come, this one included
    accumulated: tuple[bool, ...]  # does a chunk have gradients of weights?
    finished: tuple[bool, ...]  # and from all micro-batches?
    last: bool  # is this the chunk's last pass for its weights?
    messages: int  # hidden states that have arrived for the next pass, or leave still

    @property
    def starts(self) -> bool:
        """Is it the first micro-batch of the chunk?"""
        return self.is_new(self.chunk) and self.in_flight[self.chunk] == 1

    def is_new(self, chunk: int) -> bool:
        return not self.accumulated[chunk] and not self.deferred_weight_grads[chunk]

    def is_gathered(self, chunk: int) -> bool:
        """Has the chunk been gathered for this step, where that is done once?"""
        begun = self.in_flight[chunk] > 0 or not self.is_new(chunk)
        return begun and not self.finished[chunk]


@lru_cache(maxsize=4096)
def schedule_events(
    schedule: str, pp: int, vpp: int, micro_batches: int, rank: int
) -> tuple[ScheduleEvent, ...]:
    """The events of one step, without those that another one surpasses."""
    if schedule in PLANNED_SCHEDULES:
        return _events_of_planned(schedule, pp, vpp, micro_batches, rank)
    if schedule == "1f1b":  # after its warm-up it goes round in the same circle
        circle = pp - rank + 2 if vpp == 1 else 4 * pp
        micro_batches = min(micro_batches, circle)
    elif schedule not in ("gpipe", "bfs") and not is_table_file(schedule):
        micro_batches = min(micro_batches, 6 * pp)
    table = build(schedule, pp, vpp, micro_batches)
    return tuple(_highest(_events_of(table, rank)))


def _events_of(table: Schedule, rank: int) -> list[ScheduleEvent]:
    steps = table.steps(rank)
    chunks = sorted({step.action.stage for step in steps})
    held, deferred_weight_grads, done = ([0] * len(chunks) for _ in range(3))
    found = dict[ScheduleEvent, None]()
    leaving, sent = 0, None
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        kind, chunk = step.action.kind, chunks.index(step.action.stage)
        held[chunk] += kind == "F"
        arriving = following is not None and following.receives is not None
        event = ScheduleEvent(
            kind,
            chunk,
            tuple(held),
            tuple(deferred_weight_grads),
            tuple(count > 0 for count in done),
            tuple(count == table.micro_batches for count in done),
            kind in "BW" and done[chunk] == table.micro_batches - 1,
            arriving + leaving,
        )
        found[event] = None
        held[chunk] -= kind in "BI"
        deferred_weight_grads[chunk] += (kind == "I") - (kind == "W")
        done[chunk] += kind in "BW"
        # A sent tensor is freed with the next message. A forward pass sends its output, which is
        # kept until its backward pass anyway.
        if step.sends is not None:
            leaving = int(kind != "F")
            sent = step.action.stage, step.action.micro_batch
        elif kind in "BI" and sent == (step.action.stage, step.action.micro_batch):
            leaving = 1
    return list(found)


def _events_of_planned(
    schedule: str, pp: int, vpp: int, micro_batches: int, rank: int
) -> tuple[ScheduleEvent, ...]:
    """The events of a schedule without a table: its chunks hold equally many micro-batches, by
    `in_flight`."""
    chunks = max(vpp, 2 if schedule.startswith("dualpipe") else 1)
    held = int(in_flight(schedule, pp, vpp, micro_batches, rank))
    each = (max(1, -(-held // chunks)),) * chunks
    none, yes, no = (0,) * chunks, (True,) * chunks, (False,) * chunks
    return tuple(
        ScheduleEvent(kind, chunk, each, none, yes, no, False, 1)
        for kind in "FB"
        for chunk in range(chunks)
    )


def _highest(found: list[ScheduleEvent]) -> Iterator[ScheduleEvent]:
    """The events that no other of the same chunk and kind equals or exceeds in micro-batches in
    flight, deferred weight gradients, gradients held and messages under way."""
    alike: dict[tuple[Any, ...], list[ScheduleEvent]] = {}
    for each in found:
        key = (each.kind, each.chunk, each.last, each.kind == "F" and each.starts)
        alike.setdefault(key, []).append(each)
    for group in alike.values():
        there = np.array([_figures(event) for event in group])
        for number, each in enumerate(group):
            if not np.any(np.delete(np.all(there >= there[number], axis=1), number)):
                yield each


def _figures(event: ScheduleEvent) -> tuple[int, ...]:
    unfinished = tuple(not each for each in event.finished)
    gathered = tuple(event.is_gathered(chunk) for chunk in range(len(unfinished)))
    states = (*event.accumulated, *unfinished, *gathered)
    return (*event.in_flight, *event.deferred_weight_grads, *states, event.messages)
