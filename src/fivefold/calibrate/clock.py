"""Seconds of a call, by the wall clock and of the processor.

On a CPU the processes of a run share its cores, so that the processor time of a call (of all
threads of the process) is what adds up, and it is also what other programs on the machine disturb
least. On a GPU the wall clock is that of the device, between two events of its stream.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

LEAST_TIMED_S = 1e-3
"""So long at least runs between two looks at the clocks, which take a microsecond."""
FEWEST_ROUNDS, MOST_ROUNDS = 5, 50


@dataclass(frozen=True)
class Seconds:
    """Of one call."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Clock:
    """Measures calls on a device, each for about `patience_s` seconds after a warm-up."""

    device: torch.device
    patience_s: float

    def one(self, call: Callable[[], object]) -> Seconds:
        """The median over rounds of so many calls that the clocks do not show."""
        call()
        first_s = self._round([call], 1)[0].wall_s
        calls = max(1, min(1000, int(LEAST_TIMED_S / max(first_s, 1e-7))))
        rounds = self._rounds(first_s * calls)
        [timed] = _medians([self._round([call], calls) for _ in range(rounds)])
        return timed

    def two(
        self, forward: Callable[[], object], backward: Callable[[], object]
    ) -> tuple[Seconds, Seconds]:
        """Of a forward pass and of the backward pass through what it made."""
        forward()
        backward()
        first_s = sum(phase.wall_s for phase in self._round([forward, backward], 1))
        rounds = self._rounds(first_s)
        timed = _medians([self._round([forward, backward], 1) for _ in range(rounds)])
        return timed[0], timed[1]

    def _rounds(self, round_s: float) -> int:
        return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(self.patience_s / max(round_s, 1e-7))))

    def _round(self, phases: list[Callable[[], object]], calls: int) -> list[Seconds]:
        """Seconds a call of each phase."""
        if self.device.type == "cuda":
            return _round_on_gpu(phases, calls)
        timed = []
        for phase in phases:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                phase()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            timed.append(Seconds(wall / calls, cpu / calls))
        return timed


def _round_on_gpu(phases: list[Callable[[], object]], calls: int) -> list[Seconds]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)]
    cpu_s = []
    torch.cuda.synchronize()
    events[0].record()
    for phase, done in zip(phases, events[1:], strict=True):
        cpu = time.process_time()
        for _ in range(calls):
            phase()
        done.record()
        cpu_s.append(time.process_time() - cpu)
    torch.cuda.synchronize()
    wall_s = [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return [Seconds(w / calls, c / calls) for w, c in zip(wall_s, cpu_s, strict=True)]


def _medians(rounds: list[list[Seconds]]) -> list[Seconds]:
    """Over rounds, for each phase."""
    return [
        Seconds(
            statistics.median(phase.wall_s for phase in phases),
            statistics.median(phase.cpu_s for phase in phases),
        )
        for phases in zip(*rounds, strict=True)
    ]
