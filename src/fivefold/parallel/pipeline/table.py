"""A pipeline schedule as data: for each pipeline rank the actions it runs, in order.

The same table is proved (`proof`), timed (`simulation`), drawn (`picture`) and executed (`run`).
The model is cut into `pp * vpp` virtual stages in model order. A micro-batch goes forward down the
stages and backward up again; a backward is one action ("B"), or two: the gradient of the stage's
input ("I"), which the stage before waits for, and the weights' ("W"), for which nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.layout import actions
from fivefold.layout.actions import BOTH_ENDS, LOOP, Action, table_text


class Message(NamedTuple):
    """The result of one action on its way to the action that uses it: activations after "F",
    their gradients after "B" or "I"."""

    produced_by: Action
    rank: int  # the other end: where it comes from, or where it goes; perhaps the same rank


class Step(NamedTuple):
    """An action with what it must wait for and what it hands on. A message whose other end is the
    rank itself (where a V turns) is handed over there and not sent."""

    action: Action
    receives: Message | None
    sends: Message | None


@dataclass(frozen=True)
class Schedule:
    """The actions of one optimizer step: `table[rank]` is what that rank runs, in order."""

    name: str
    pp: int
    vpp: int
    micro_batches: int
    table: tuple[tuple[Action, ...], ...]
    placement: str = LOOP  # LOOP, FOLD or BOTH_ENDS
    pairs: tuple[frozenset[int], ...] = ()
    """By rank, the places in its row of forwards that may run side by side with the backward that
    comes next. One after the other is as right."""

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def rank_of(self, stage: int, micro_batch: int = 0) -> int:
        """The pipeline rank on which a micro-batch meets a virtual stage."""
        rank = actions.rank_of(stage, self.pp, self.placement)
        from_the_end = self.placement == BOTH_ENDS and micro_batch >= self.micro_batches // 2
        return self.pp - 1 - rank if from_the_end else rank

    def text(self) -> str:
        """The table as the text of a file. Raises UserError for two copies of the stages, which
        the format cannot tell apart."""
        if self.placement == BOTH_ENDS:
            raise UserError(
                f"schedule={self.name} has two copies of each stage, which no table in a file can "
                "tell apart: dualpipe-v has one"
            )
        return table_text(self.table, self.pairs or (frozenset(),) * self.pp)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, micro_batch) of the backwards in two parts."""
        return frozenset(
            (stage, micro_batch)
            for row in self.table
            for kind, stage, micro_batch in row
            if kind == "I"
        )

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions whose results this one uses: at most one of another stage, and that first."""
        kind, stage, micro_batch = action
        if kind == "F":
            return (Action("F", stage - 1, micro_batch),) if stage > 0 else ()
        if kind == "W":
            return (Action("I", stage, micro_batch),)
        own_forward = Action("F", stage, micro_batch)
        if stage == self.stages - 1:
            return (own_forward,)
        above = "I" if (stage + 1, micro_batch) in self.split else "B"
        return (Action(above, stage + 1, micro_batch), own_forward)

    def steps(self, rank: int) -> list[Step]:
        """What a rank waits for before and hands on after each of its actions, in order.

        A forward takes from the stage before and gives to the stage after it, a gradient goes the
        other way round, and weight gradients stay.
        """
        return [self._step(action) for action in self.table[rank]]

    def _step(self, action: Action) -> Step:
        kind, stage, micro_batch = action
        if kind == "W":
            return Step(action, None, None)
        receives = sends = None
        for needed in self.needs(action):
            if needed.stage != stage:
                receives = Message(needed, self.rank_of(needed.stage, micro_batch))
        used_by = stage + 1 if kind == "F" else stage - 1
        if 0 <= used_by < self.stages:
            sends = Message(action, self.rank_of(used_by, micro_batch))
        return Step(action, receives, sends)
