"""The named schedules: how each one fills its table.

All of them run the backwards of a stage in the order of the micro-batches, so that all sum the
gradients in the same order.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache

from fivefold.arrays import Elementwise
from fivefold.errors import UserError
from fivefold.layout.actions import BOTH_ENDS, FOLD, LOOP, Action, is_table_file
from fivefold.layout.legality import VALUE_RULES
from fivefold.layout.notation import Layout
from fivefold.layout.rule import broken
from fivefold.layout.schedule_rules import SCHEDULE_RULES
from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.table import Schedule
from fivefold.parallel.pipeline.table_file import read_table, with_table


def check(name: str, pp: int, vpp: int, micro_batches: int) -> None:
    """Raises UserError unless `build` has a schedule for these numbers."""
    layout = with_table(Layout(schedule=name, pp=pp, vpp=vpp, accumulation=micro_batches))
    for rules in (VALUE_RULES, SCHEDULE_RULES):
        for sentence in broken(rules, layout):
            raise UserError(sentence)


@lru_cache(maxsize=32)
def build(name: str, pp: int, vpp: int, micro_batches: int) -> Schedule:
    """The table of a named schedule, or that of a file (`*.csv`).

    - "gpipe" (Huang et al., arXiv:1811.06965): all forwards, then all backwards;
    - "bfs" (Lamy-Poirier, arXiv:2211.05953): the same with several chunks a rank, all micro-batches
      through one chunk before the next, "breadth first";
    - "1f1b" (Narayanan et al., arXiv:2104.04473): one forward and one backward in turn after a
      warm-up; with vpp > 1 the interleaved one;
    - "zb-h1" (Qi et al., arXiv:2401.10241, section 2.1): 1F1B whose weight gradients come later,
      where the rank would wait;
    - "zb-v" (section 6 there): the same with two chunks a rank in a V;
    - "dualpipe" (DeepSeek-AI, arXiv:2412.19437, section 3.2.1): two copies of the stages, with
      micro-batches from both ends, a forward of one overlapping a backward of the other;
    - "dualpipe-v": half of it, folded into a V, so that there is one copy (github.com/deepseek-ai/
      DualPipe, which has the steps of both).

    Raises UserError for numbers the schedule cannot run, and for a file whose table cannot run.
    """
    check(name, pp, vpp, micro_batches)
    if is_table_file(name):
        return from_file(name)
    rows = [_ROWS[name](rank, pp, vpp, micro_batches) for rank in range(pp)]
    placement = {"zb-v": FOLD, "dualpipe-v": FOLD, "dualpipe": BOTH_ENDS}.get(name, LOOP)
    table = tuple(tuple(row.actions) for row in rows)
    pairs = tuple(frozenset(row.pairs) for row in rows)
    return Schedule(name, pp, vpp, micro_batches, table, placement, pairs)


LARGEST_ASKED_FOR = 4_000_000
"""Actions of a schedule that is drawn or timed by hand."""


def asked_for(name: str, pp: int | None, vpp: int | None, micro_batches: int | None) -> Schedule:
    """The schedule that someone names: of 4 ranks and 8 micro-batches, and as few stages a rank as
    it can have, where no other numbers are given; a file says its numbers itself. It has been
    proved. Raises UserError as `build` does, for a file that has other numbers than are given, and
    for a schedule that is too large.
    """
    if is_table_file(name):
        schedule = from_file(name)
        _check_numbers(schedule, pp, vpp, micro_batches)
        return schedule
    pp, micro_batches = pp or 4, micro_batches or 8
    if name == "interleaved":
        if vpp == 1:
            raise UserError("interleaved is 1f1b with 2 or more stages a rank, and vpp is 1")
        name, vpp = "1f1b", vpp or 2
    if vpp is None:
        vpp = 2 if name in ("bfs", "zb-v", "dualpipe-v") else 1
    actions = 3 * pp * vpp * micro_batches
    if actions > LARGEST_ASKED_FOR:
        raise UserError(
            f"pp {pp} x vpp {vpp} x {micro_batches} micro-batches is a table of up to {actions:,} "
            f"actions: the most is {LARGEST_ASKED_FOR:,}"
        )
    schedule = build(name, pp, vpp, micro_batches)
    validate(schedule)
    return schedule


def _check_numbers(
    schedule: Schedule, pp: int | None, vpp: int | None, micro_batches: int | None
) -> None:
    """UserError unless the schedule of a file has the numbers that are given."""
    asked = {"pp": pp, "vpp": vpp, "micro_batches": micro_batches}
    for number, value in asked.items():
        found = getattr(schedule, number)
        if value not in (None, found):
            raise UserError(
                f"{schedule.name} is a table with {number.replace('_', ' ')} {found}, not {value}: "
                "its numbers need not be given"
            )


def from_file(path: str) -> Schedule:
    """The table of a file, proved. Raises UserError where it cannot be read or cannot run."""
    file = read_table(path)
    schedule = Schedule(
        path, file.pp, file.vpp, file.micro_batches, file.rows, file.placement, file.pairs
    )
    try:
        validate(schedule)
    except ValueError as error:
        raise UserError(f"{path} cannot run: {error}") from None
    return schedule


class _Row:
    """A rank's row in the making. Its chunks are numbered in the order in which a micro-batch meets
    them; each takes its micro-batches in order, from `first` on."""

    def __init__(self, *stages: int, first: tuple[int, ...] = ()) -> None:
        self.stages = stages
        self.first = first or (0,) * len(stages)
        self.actions: list[Action] = []
        self.pairs: set[int] = set()
        self.done: Counter[tuple[str, int]] = Counter()
        self.deferred_weight_grads: deque[tuple[int, int]] = deque()

    def run(self, kind: str, chunk: int = 0, times: int = 1) -> None:
        """The next micro-batch's forward ("F"), backward ("B") or input gradient ("I")."""
        direction = "F" if kind == "F" else "B"
        for _ in range(times):
            micro_batch = self.first[chunk] + self.done[direction, chunk]
            self.done[direction, chunk] += 1
            self.actions.append(Action(kind, self.stages[chunk], micro_batch))
            if kind == "I":
                self.deferred_weight_grads.append((self.stages[chunk], micro_batch))

    def weights(self, times: int = 1, chunk: int | None = None) -> None:
        """The weight gradients that have been deferred longest; of one chunk, or of any."""
        for _ in range(times):
            longest = self.deferred_weight_grads[0]
            if chunk is not None:
                longest = next(
                    each for each in self.deferred_weight_grads if each[0] == self.stages[chunk]
                )
            self.deferred_weight_grads.remove(longest)
            self.actions.append(Action("W", *longest))

    def pair(self, forward: int, backward: int) -> None:
        """A forward of one chunk and a backward of the other, side by side."""
        self.pairs.add(len(self.actions))
        self.run("F", forward)
        self.run("B", backward)


# All forwards first, and 1F1B


def _all_forwards_first(rank: int, pp: int, vpp: int, micro_batches: int) -> _Row:
    row = _Row(*range(rank, pp * vpp, pp))
    for chunk in range(vpp):
        row.run("F", chunk, micro_batches)
    for chunk in reversed(range(vpp)):
        row.run("B", chunk, micro_batches)
    return row


def _one_forward_one_backward(rank: int, pp: int, vpp: int, micro_batches: int) -> _Row:
    """With chunks, pp micro-batches at a time go through all chunks of the rank: forward from the
    first chunk to the last, backward from the last to the first."""
    row = _Row(*range(rank, pp * vpp, pp))
    group = pp if vpp > 1 else micro_batches
    groups = micro_batches // group
    forwards = [chunk for _ in range(groups) for chunk in range(vpp) for _ in range(group)]
    backwards = [
        chunk for _ in range(groups) for chunk in reversed(range(vpp)) for _ in range(group)
    ]
    warm_up = min(warm_up_1f1b(rank, pp, vpp), len(forwards))
    for chunk in forwards[:warm_up]:
        row.run("F", chunk)
    for number, chunk in enumerate(backwards):
        if warm_up + number < len(forwards):
            row.run("F", forwards[warm_up + number])
        row.run("B", chunk)
    return row


def warm_up_1f1b(rank: Elementwise, pp: Elementwise, vpp: Elementwise) -> Elementwise:
    """Forwards before the first one-forward-one-backward pair, elementwise on arrays.

    Without chunks: the ranks still ahead of this one. With chunks, as in Megatron-LM: twice that,
    because an upstream rank stays two actions ahead, plus one group for each chunk but the last.
    """
    return (1 + (vpp > 1)) * (pp - rank - 1) + (vpp - 1) * pp


# Weight gradients later


def _zero_bubble_h1(rank: int, pp: int, vpp: int, micro_batches: int) -> _Row:
    """1F1B in whose steady state a rank lags `rank` weight gradients behind. So every rank keeps
    pp micro-batches, and the last ranks have weight gradients left for the end."""
    row = _Row(rank)
    warm_up = min(pp - 1 - rank, micro_batches)
    row.run("F", times=warm_up)
    for number in range(micro_batches):
        if warm_up + number < micro_batches:
            row.run("F")
        row.run("I")
        if number >= rank:
            row.weights()
    row.weights(len(row.deferred_weight_grads))
    return row


def _zero_bubble_v(rank: int, pp: int, vpp: int, micro_batches: int) -> _Row:
    """Warm-up, steady state and end of ZB-V. With fewer micro-batches than fill it, 2 pp - 1, it is
    the row of so many without the actions of those that there are not."""
    count = max(micro_batches, 2 * pp - 1)
    row = _Row(rank, 2 * pp - 1 - rank)
    down, up = 0, 1
    row.run("F", down, 2 * (pp - rank) - 1)
    for _ in range(rank):
        row.run("F", up)
        row.run("F", down)
    for _ in range(pp - rank):
        row.run("F", up)
        row.run("I", up)
        row.weights()
    while row.done["F", up] < count:
        if row.done["F", down] < count:
            row.run("F", down)
        row.run("I", down)
        row.weights()
        row.run("F", up)
        row.run("I", up)
        row.weights()
    for _ in range(rank):
        row.run("I", down)
        row.run("I", up)
    for _ in range(pp - rank):
        row.run("I", down)
        row.weights(1, down)
    row.weights(rank, up)
    row.weights(len(row.deferred_weight_grads))
    row.actions = [action for action in row.actions if action.micro_batch < micro_batches]
    return row


# Both directions side by side


def _dualpipe(rank: int, pp: int, vpp: int, micro_batches: int) -> _Row:
    """Each pair of opposite ranks has the stages of one of pp / 2 ranks of a dualpipe-v twice: what
    begins on the one ends on the other."""
    half = micro_batches // 2
    place, first = (rank, (0, half)) if rank < pp // 2 else (pp - 1 - rank, (half, 0))
    return _dualpipe_row(_Row(place, pp - 1 - place, first=first), place, pp // 2, half)


def _dualpipe_v(rank: int, pp: int, vpp: int, micro_batches: int) -> _Row:
    return _dualpipe_row(_Row(rank, 2 * pp - 1 - rank), rank, pp, micro_batches)


def _dualpipe_row(row: _Row, place: int, places: int, count: int) -> _Row:
    """The eight steps of DualPipe (github.com/deepseek-ai/DualPipe, README and dualpipe.py) for a
    rank that is number `place` of `places` between the outermost and the middle (or the turn)."""
    near, far = 0, 1
    ahead = places - 1 - place
    row.run("F", near, 2 * ahead)
    for _ in range(place + 1):
        row.run("F", near)
        row.run("F", far)
    for _ in range(ahead):
        row.run("I", far)
        row.weights()
        row.run("F", far)
    for number in range(count - 2 * places + place + 1):
        if number == 0 and ahead == 0:  # apart, which is a smaller bubble
            row.run("F", near)
            row.run("B", far)
        else:
            row.pair(near, far)
        row.pair(far, near)
    for _ in range(ahead):
        row.run("B", far)
        row.pair(far, near)
    for number in range(2 * (place + 1)):
        # Of the last 2 (place + 1) backwards the second half leaves its weights for the end.
        row.run("B" if number < place + 1 else "I", far if number % 2 == 0 else near)
    for _ in range(ahead):
        row.weights()
        row.run("I", near)
    row.weights(len(row.deferred_weight_grads))
    return row


_ROWS = {
    "gpipe": _all_forwards_first,
    "bfs": _all_forwards_first,
    "1f1b": _one_forward_one_backward,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}
