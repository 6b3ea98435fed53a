"""What a run hands back: by rank the seconds, the bytes and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.ledger import Ledger
from fivefold.step_trace import PARTS, StepTrace, seconds
from fivefold.train.prepare import Plan


class StepAverages:
    """Mean seconds of this rank's steps by part. The first step, which warms up, is left out if
    there is another one."""

    def __init__(self) -> None:
        self._first: dict[str, float] | None = None
        self._sums = dict.fromkeys(PARTS, 0.0)
        self.steps = 0

    def add(self, trace: StepTrace) -> None:
        parts = seconds(trace)
        if self._first is None:
            self._first = parts
            return
        self.steps += 1
        for part, value in parts.items():
            self._sums[part] += value

    def mean(self) -> dict[str, float]:
        """Seconds per step, by part."""
        if self.steps == 0:
            return self._first or self._sums
        return {part: value / self.steps for part, value in self._sums.items()}


@dataclass(frozen=True)
class RankOutcome:
    """What one rank measured."""

    seconds: dict[str, float]  # per step, by part
    ledger: Ledger  # of the last step
    memory_bytes: int  # peak, without what the process had before the model was built
    peak_bytes: int  # peak, with that
    expert_rows: list[int]  # by MoE layer: rows that its experts computed in the last micro-batch


@dataclass(frozen=True)
class RunOutcome:
    """What all ranks measured."""

    plan: Plan
    ranks: list[RankOutcome]
    steps: int  # over which seconds are averaged
