"""A run's timeline: some steps of all ranks in one clock, written when they are over."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from fivefold.parallel.mesh import Axes
from fivefold.step_trace import Message, StepTrace, Work
from fivefold.train.runfile import Run

ROUNDS = 7
"""Barriers after which the ranks read their clocks; medians are taken."""

WriteTimeline = Callable[[str, Sequence[str], Sequence[Sequence[StepTrace]], int], None]
"""Writes a file: its path, the name and the steps of each rank, the number of the first step. It
must be picklable where workers are spawned."""


@dataclass(frozen=True)
class Recorded:
    """What one rank hands to rank 0."""

    name: str
    machine: str  # whose clock it reads
    clock_s: list[float]  # after each of `ROUNDS` barriers
    steps: list[StepTrace]


class TimelineRecorder:
    """Keeps the trace of the steps that the timeline shows: those after the run's first one, or
    that one if it is the only one."""

    def __init__(
        self, run: Run, axes: Axes, finished_steps: int, write: WriteTimeline | None
    ) -> None:
        self._path, self._axes, self._write = run.timeline, axes, write
        first = min(finished_steps + 2, run.steps)
        self._shown = range(first, min(first + run.timeline_steps, run.steps + 1))
        self._steps: list[StepTrace] = []

    def step(self, number: int, trace: StepTrace) -> None:
        """After step `number`. All ranks call this; the last step that is shown writes the file."""
        if self._path is None or self._write is None or number not in self._shown:
            return
        self._steps.append(trace)
        if number < self._shown[-1]:
            return
        ranks = _gather(f"rank {self._axes.rank}: {self._axes.describe()}", self._steps)
        self._steps = []
        if ranks is not None:
            shifts = clock_shifts([rank.machine for rank in ranks], [r.clock_s for r in ranks])
            steps = [
                [shifted(trace, shift) for trace in rank.steps]
                for rank, shift in zip(ranks, shifts, strict=True)
            ]
            self._write(self._path, [rank.name for rank in ranks], steps, self._shown[0])


def _gather(name: str, steps: list[StepTrace]) -> list[Recorded] | None:
    """What all ranks recorded, on rank 0."""
    import torch.distributed as dist

    clock_s = []
    for _ in range(ROUNDS):
        dist.barrier()
        clock_s.append(time.perf_counter())
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(Recorded(name, _machine(), clock_s, steps), everyone)
    return cast("list[Recorded] | None", everyone)


def _machine() -> str:
    """The same for processes that read the same clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()


def clock_shifts(machines: Sequence[str], clocks_s: Sequence[Sequence[float]]) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's, by rank.

    A machine has one clock for all its processes. Those of different machines are read at the same
    moments, after barriers; how much later one rank leaves a barrier than another is the error.
    """
    ahead: dict[str, list[float]] = {}
    for machine, clock_s in zip(machines, clocks_s, strict=True):
        differences = [own - first for own, first in zip(clock_s, clocks_s[0], strict=True)]
        ahead.setdefault(machine, []).extend(differences)
    shift = {machine: statistics.median(values) for machine, values in ahead.items()}
    shift[machines[0]] = 0.0
    return [shift[machine] for machine in machines]


def shifted(trace: StepTrace, ahead_s: float) -> StepTrace:
    """The same in a clock that `ahead_s` is ahead of."""
    if ahead_s == 0.0:
        return trace

    def move(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - ahead_s

    def moved(message: Message) -> Message:
        return replace(
            message,
            start_s=message.start_s - ahead_s,
            wait_start_s=move(message.wait_start_s),
            end_s=move(message.end_s),
        )

    return StepTrace(
        trace.start_s - ahead_s,
        move(trace.end_s),
        [Work(work.name, work.start_s - ahead_s, work.end_s - ahead_s) for work in trace.work],
        [moved(message) for message in trace.messages],
    )
