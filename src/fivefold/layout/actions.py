"""The actions of a pipeline, and tables of them as text: a layout may name a file of it.

The text is CSV: a row for each pipeline rank, and in a cell what the rank does next: stage, kind
and micro-batch, such as `0F3`, `1B2`, `0I0` or `0W0`; an empty cell is a rank that waits. Two
actions run side by side are `(0F5;7B2)OVERLAP_F_B`. torch.distributed.pipelining reads and writes
the same format ("compute_only").
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.errors import UserError

KINDS = ("F", "B", "I", "W")
"""Forward; backward; and a backward in two parts: the gradient of the input, then the weights'."""

LOOP, FOLD, BOTH_ENDS = "loop", "fold", "both ends"
"""How virtual stages lie on pp ranks: stage s on rank s % pp, down the ranks again and again; down
and up in a V, stage s and stage 2 pp - 1 - s on one rank; and two copies of pp stages, of which the
second, for the later half of the micro-batches, begins on the last rank."""


class Action(NamedTuple):
    """One piece of work on one micro-batch on one stage; `kind` is one of `KINDS`."""

    kind: str
    stage: int  # virtual stage, 0 to pp * vpp - 1 in model order
    micro_batch: int  # 0 to micro_batches - 1

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


def rank_of(stage: int, pp: int, placement: str) -> int:
    """The pipeline rank of a virtual stage (of the first copy, where there are two)."""
    lap, place = divmod(stage, pp)
    return pp - 1 - place if placement == FOLD and lap % 2 else place


@dataclass(frozen=True, eq=False)
class ActionTable:
    """What each pipeline rank does, in order, as a file says it."""

    pp: int
    vpp: int
    micro_batches: int
    placement: str
    rows: tuple[tuple[Action, ...], ...]
    pairs: tuple[frozenset[int], ...]  # see Schedule.pairs


TABLE_FILE = ".csv"
"""How the name of a file ends that has a table."""


def is_table_file(schedule: str) -> bool:
    """Does a layout's `schedule=` name a file?"""
    return schedule.endswith(TABLE_FILE)


def parse_table(text: str, path: str) -> ActionTable:
    """The table in the text of a file, which errors call `path`. Raises UserError for text without
    a table whose stages lie in a loop or in a V; `proof.validate` says whether it can be run."""
    rows, pairs = [], []
    for number, cells in enumerate(csv.reader(io.StringIO(text))):
        row: list[Action] = []
        paired: set[int] = set()
        for cell in cells:
            actions = _read_cell(cell.strip(), f"{path}: row {number + 1}")
            if len(actions) == 2:
                paired.add(len(row))
            row += actions
        rows.append(tuple(row))
        pairs.append(frozenset(paired))
    if not any(rows):
        raise UserError(f"{path} has no actions: a row a rank, with cells such as 0F0 and 0B0")
    actions = [action for row in rows for action in row]
    pp, stages = len(rows), 1 + max(action.stage for action in actions)
    if stages % pp:
        raise UserError(
            f"{path} has {stages} stages for its {pp} rows, a row a rank: every rank has the same "
            "number of stages"
        )
    micro_batches = 1 + max(action.micro_batch for action in actions)
    placement = _placement(path, rows, stages)
    return ActionTable(pp, stages // pp, micro_batches, placement, tuple(rows), tuple(pairs))


def _read_cell(cell: str, where: str) -> list[Action]:
    """The actions of a cell: one, none, or two side by side."""
    if not cell:
        return []
    side_by_side = re.fullmatch(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", cell)
    texts = [text.strip() for text in side_by_side.groups()] if side_by_side else [cell]
    actions = []
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,6})", text)
        if match is None:
            raise UserError(
                f"{where}: {cell[:40]!r} is no action: write stage, kind (F, B, I or W) and "
                "micro-batch, such as 0F3"
            )
        actions.append(Action(match[2], int(match[1]), int(match[3])))
    if side_by_side and [action.kind for action in actions] != ["F", "B"]:
        raise UserError(
            f"{where}: {cell[:40]!r} is not a forward with a backward, such as (0F5;7B2)"
        )
    return actions


def _placement(path: str, rows: list[tuple[Action, ...]], stages: int) -> str:
    held = [{action.stage for action in row} for row in rows]
    pp = len(rows)
    for placement in (LOOP, FOLD):
        wanted: list[set[int]] = [set() for _ in rows]
        for stage in range(stages):
            wanted[rank_of(stage, pp, placement)].add(stage)
        if held == wanted:
            return placement
    raise UserError(
        f"{path} gives rank 0 the stages {sorted(held[0])} of {stages}: stages lie in a loop "
        f"(stage s on rank s % {pp}) or, two a rank, in a V (stages s and {stages - 1} - s)"
    )


def table_text(rows: tuple[tuple[Action, ...], ...], pairs: tuple[frozenset[int], ...]) -> str:
    """The file's text; its inverse is `parse_table`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, paired in zip(rows, pairs, strict=True):
        cells, position = [], 0
        while position < len(row):
            if position in paired:
                cells.append(f"({_cell(row[position])};{_cell(row[position + 1])})OVERLAP_F_B")
                position += 1
            else:
                cells.append(_cell(row[position]))
            position += 1
        writer.writerow(cells)
    return text.getvalue()


def _cell(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.micro_batch}"
