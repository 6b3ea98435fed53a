"""Pipeline schedules as data: for each pipeline rank the actions it runs, in order.

The same table is proved (`validate`), timed (`simulate`), drawn (`draw`) and executed. The model
is cut into `pp * vpp` virtual stages in model order; stage s runs on pipeline rank s % pp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn

from fivefold.errors import UserError
from fivefold.layout.legality import RUN_RULES, SCHEDULE_RULES, VALUE_RULES, broken
from fivefold.layout.notation import Layout

_NOT_DONE = -1.0


class Action(NamedTuple):
    """One piece of work: the forward ("F") or backward ("B") of one micro-batch on one stage."""

    kind: str
    stage: int  # virtual stage, 0 to pp * vpp - 1 in model order
    micro_batch: int  # 0 to micro_batches - 1

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


class Message(NamedTuple):
    """The result of one action on its way between two ranks: activations after "F", their
    gradients after "B". The messages of one producing (kind, stage) form one channel."""

    produced_by: Action
    rank: int  # the other end: where it comes from, or where it goes


class Step(NamedTuple):
    """An action with the message it must wait for and the message it sends off."""

    action: Action
    receives: Message | None
    sends: Message | None


class Timed(NamedTuple):
    """An action in simulated time, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """The actions of one optimizer step: `table[rank]` is what that rank runs, in order."""

    name: str
    pp: int
    vpp: int
    micro_batches: int
    table: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs a virtual stage."""
        return stage % self.pp


@dataclass(frozen=True)
class Simulation:
    """What one step of a schedule costs in time and in activations held."""

    step_s: float  # from the first action's start to the end of the last tail
    bubble_fraction: float  # idle share of the step, averaged over the ranks
    busy_s: tuple[float, ...]  # per rank, its tail included
    peak_in_flight: tuple[int, ...]  # per rank: most (stage, micro_batch) after F and before B
    schedule: Schedule
    _end_s: list[float]  # by pass * micro_batches + micro_batch, see `_run`
    _arrival_s: list[float]  # by pass

    @cached_property
    def timeline(self) -> tuple[tuple[Timed, ...], ...]:
        """Per rank its actions in order; made when first asked for."""
        count, passes = self.schedule.micro_batches, 2 * self.schedule.stages
        rows = []
        for actions in self.schedule.table:
            row, free_s = [], 0.0
            for action in actions:
                kind, stage, micro_batch = action
                number = stage if kind == "F" else passes - 1 - stage
                index = number * count + micro_batch
                start_s = max(free_s, self._end_s[index - count] + self._arrival_s[number])
                free_s = self._end_s[index]
                row.append(Timed(action, start_s, free_s))
            rows.append(tuple(row))
        return tuple(rows)


# Building


def check(name: str, pp: int, vpp: int, micro_batches: int) -> None:
    """Raises UserError unless `build` has a schedule for these numbers."""
    layout = Layout(schedule=name, pp=pp, vpp=vpp, accumulation=micro_batches)
    for rules in (VALUE_RULES, RUN_RULES, SCHEDULE_RULES):
        for sentence in broken(rules, layout):
            raise UserError(sentence)


@lru_cache(maxsize=32)
def build(name: str, pp: int, vpp: int, micro_batches: int) -> Schedule:
    """The table of a named schedule.

    "gpipe" (Huang et al., arXiv:1811.06965) runs all forwards, then all backwards. "1f1b" keeps
    one forward and one backward in turn after a warm-up (Narayanan et al., arXiv:2104.04473); with
    vpp > 1 it is the interleaved one. Every schedule runs its backwards in the order of the
    micro-batches, so all of them sum the gradients in the same order.
    Raises UserError for numbers the schedule cannot run.
    """
    check(name, pp, vpp, micro_batches)
    table = []
    for rank in range(pp):
        forwards, backwards = _work(rank, pp, vpp, micro_batches)
        if name == "gpipe":
            warm_up = len(forwards)
        else:
            warm_up = min(warm_up_1f1b(rank, pp, vpp), len(forwards))
        table.append(_one_forward_one_backward(forwards, backwards, warm_up))
    return Schedule(name, pp, vpp, micro_batches, tuple(table))


def _work(rank: int, pp: int, vpp: int, micro_batches: int) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of one rank, each in the order in which they are run.

    With chunks, pp micro-batches at a time go through all chunks of the rank: forward from the
    first chunk to the last, backward from the last to the first.
    """
    group = pp if vpp > 1 else micro_batches
    forwards, backwards = [], []
    for start in range(0, micro_batches, group):
        members = range(start, start + group)
        for chunk in range(vpp):
            forwards += [Action("F", chunk * pp + rank, member) for member in members]
        for chunk in reversed(range(vpp)):
            backwards += [Action("B", chunk * pp + rank, member) for member in members]
    return forwards, backwards


def warm_up_1f1b(rank: Any, pp: Any, vpp: Any) -> Any:
    """Forwards before the first one-forward-one-backward pair, elementwise on arrays.

    Without chunks: the ranks still ahead of this one. With chunks, as in Megatron-LM: twice that,
    because an upstream rank stays two actions ahead, plus one group for each chunk but the last.
    """
    return (1 + (vpp > 1)) * (pp - rank - 1) + (vpp - 1) * pp


def _one_forward_one_backward(
    forwards: list[Action], backwards: list[Action], warm_up: int
) -> tuple[Action, ...]:
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return tuple(actions + backwards[len(forwards) - warm_up :])


# Dependencies


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions whose results this one uses: at most one of another stage, and that one first."""
    kind, stage, micro_batch = action
    if kind == "F":
        return (Action("F", stage - 1, micro_batch),) if stage > 0 else ()
    own_forward = Action("F", stage, micro_batch)
    if stage == stages - 1:
        return (own_forward,)
    return (Action("B", stage + 1, micro_batch), own_forward)


def messages(schedule: Schedule, rank: int) -> list[Step]:
    """What a rank receives before and sends after each of its actions, in order.

    A forward receives from the stage before and sends to the stage after it, a backward the other
    way round. Neighbouring stages on the same rank (pp 1) send nothing.
    """
    steps = []
    for action in schedule.table[rank]:
        receives = sends = None
        for needed in needs(action, schedule.stages):
            source = schedule.rank_of(needed.stage)
            if source != rank:
                receives = Message(needed, source)
        used_by = action.stage + 1 if action.kind == "F" else action.stage - 1
        if 0 <= used_by < schedule.stages and schedule.rank_of(used_by) != rank:
            sends = Message(action, schedule.rank_of(used_by))
        steps.append(Step(action, receives, sends))
    return steps


def _run(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    arrival_s: Sequence[float],
) -> tuple[list[float], list[float], list[float]]:
    """Runs the table: an action starts when its rank is free and what it needs has arrived.

    On its way a micro-batch makes 2 * stages passes: forward down the stages, then backward up
    again. An action needs the pass before it, and nothing else: a backward's own forward, which
    `needs` names too, is further back on the same way. `forward_s` and `backward_s` by virtual
    stage; `arrival_s[pass]` is how long the message travels that the pass waits for.

    A rank that must wait is put down under the action it waits for and taken up again when that
    is done, so the work is proportional to the number of actions. This loop is what a simulation
    costs: numbers in lists, no objects.

    Returns `end_s[pass * micro_batches + micro_batch]` and, by rank, `finish_s` and `busy_s`.
    Raises ValueError if the ranks get stuck.
    """
    count, passes = schedule.micro_batches, 2 * schedule.stages
    # The last entries are read as pass -1, from where micro-batches come: they are there at once.
    end_s = [_NOT_DONE] * (passes * count) + [0.0] * count
    finish_s, busy_s = [0.0] * schedule.pp, [0.0] * schedule.pp
    waiting: dict[int, int] = {}  # rank by the index of the action it waits for

    def walk(rank: int) -> Iterator[int]:
        """Runs the rank's row; yields the index of an action when it must wait for it."""
        now_s = worked_s = 0.0
        for kind, stage, micro_batch in schedule.table[rank]:
            if kind == "F":
                number, seconds = stage, forward_s[stage]
            else:
                number, seconds = passes - 1 - stage, backward_s[stage]
            index = number * count + micro_batch
            if end_s[index - count] == _NOT_DONE:
                yield index - count
            arrived_s = end_s[index - count] + arrival_s[number]
            now_s = (arrived_s if arrived_s > now_s else now_s) + seconds
            worked_s += seconds
            end_s[index] = now_s
            if index in waiting:
                ready.append(waiting.pop(index))
        finish_s[rank], busy_s[rank] = now_s, worked_s

    walks = [walk(rank) for rank in range(schedule.pp)]
    ready = list(range(schedule.pp))
    while ready:
        rank = ready.pop()
        for index in walks[rank]:
            waiting[index] = rank
            break
    if waiting:
        _raise_stuck(schedule, waiting)
    return end_s, finish_s, busy_s


def _raise_stuck(schedule: Schedule, waiting: dict[int, int]) -> NoReturn:
    """Follows who waits for whom until a rank comes up twice, and names the ranks of that ring.

    `waiting` is the rank by the index (pass * micro_batches + micro_batch) it waits for.
    """
    count, last = schedule.micro_batches, 2 * schedule.stages - 1

    def action_at(index: int) -> Action:
        number, micro_batch = divmod(index, count)
        kind, stage = ("F", number) if number < schedule.stages else ("B", last - number)
        return Action(kind, stage, micro_batch)

    waits_for = {rank: action_at(index) for index, rank in waiting.items()}
    waits_with = {rank: action_at(index + count) for index, rank in waiting.items()}
    ring: list[int] = []
    rank = min(waits_for)
    while rank in waits_for and rank not in ring:
        ring.append(rank)
        rank = schedule.rank_of(waits_for[rank].stage)
    if rank in ring:
        ring = ring[ring.index(rank) :]
    waits = [
        f"rank {rank} at its action {schedule.table[rank].index(waits_with[rank])} "
        f"({waits_with[rank]}) waits for {waits_for[rank]} "
        f"of rank {schedule.rank_of(waits_for[rank].stage)}"
        for rank in ring
    ]
    raise ValueError(f"schedule {schedule.name} gets stuck: {'; '.join(waits)}")


# Proving


def validate(schedule: Schedule) -> None:
    """Proves that a table, from wherever it comes, can be run and does the whole step.

    Holds afterwards: every forward and backward appears exactly once and on the right rank; no
    action comes before what it needs; the ranks cannot wait for each other in a ring; and every
    channel is read in the order in which it is written, so that messages need no label.
    Raises ValueError naming the rank, the action and what it waits for.
    """
    _check_each_once(schedule)
    _check_channels(schedule)
    at_once = [0.0] * (2 * schedule.stages)
    _run(schedule, at_once, at_once, at_once)


def _check_each_once(schedule: Schedule) -> None:
    if len(schedule.table) != schedule.pp:
        raise ValueError(f"the table has {len(schedule.table)} rows for pp {schedule.pp}")
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.table):
        for action in row:
            kind, stage, micro_batch = action
            if kind not in ("F", "B"):
                raise ValueError(f"rank {rank} runs {action}, an action of unknown kind")
            if not (0 <= stage < schedule.stages and 0 <= micro_batch < schedule.micro_batches):
                raise ValueError(
                    f"rank {rank} runs {action}, outside of {schedule.stages} stages and "
                    f"{schedule.micro_batches} micro-batches"
                )
            if schedule.rank_of(stage) != rank:
                raise ValueError(
                    f"rank {rank} runs {action}, which belongs to rank {schedule.rank_of(stage)}"
                )
            if action in seen:
                raise ValueError(f"rank {rank} runs {action} twice")
            seen.add(action)
    for kind in ("F", "B"):
        for stage in range(schedule.stages):
            for micro_batch in range(schedule.micro_batches):
                action = Action(kind, stage, micro_batch)
                if action not in seen:
                    raise ValueError(f"rank {schedule.rank_of(stage)} never runs {action}")


def _check_channels(schedule: Schedule) -> None:
    written: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    read: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, row in enumerate(schedule.table):
        for action in row:
            written[action.kind, action.stage].append(action.micro_batch)
            for needed in needs(action, schedule.stages):
                if schedule.rank_of(needed.stage) != rank:
                    read[needed.kind, needed.stage].append(needed.micro_batch)
    for (kind, stage), reads in read.items():
        for sent, expected in zip(written[kind, stage], reads, strict=True):
            if sent != expected:
                reader = schedule.rank_of(stage + 1 if kind == "F" else stage - 1)
                raise ValueError(
                    f"rank {reader} waits for {Action(kind, stage, expected)} where rank "
                    f"{schedule.rank_of(stage)} first sends micro-batch {sent}"
                )


# Timing


def simulate(
    schedule: Schedule,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    send_s: float | Sequence[float] = 0.0,
    tail_s: float | Sequence[float] = 0.0,
) -> Simulation:
    """Times one step: an action starts when its rank is free and what it needs has arrived.

    `forward_s` and `backward_s` are the seconds of one micro-batch on a virtual stage, one number
    for all stages or one for each. `send_s` is the seconds a message travels between two ranks,
    one number or one for each boundary between two virtual stages (stages - 1, in model order);
    it delays the receiver but occupies neither rank. `tail_s` is what a rank does after its last
    action (the optimizer step, say), one number or one for each rank.
    Raises ValueError if the table gets stuck.
    """
    stages = schedule.stages
    forward_s = _each(forward_s, stages, "stage times", "virtual stages")
    backward_s = _each(backward_s, stages, "stage times", "virtual stages")
    send_s = _each(send_s, stages - 1, "travel times", "boundaries")
    tail_s = _each(tail_s, schedule.pp, "tail times", "ranks")
    down_s = [0.0 if schedule.pp == 1 else seconds for seconds in send_s]
    arrival_s = [0.0, *down_s, 0.0, *reversed(down_s)]
    end_s, finish_s, worked_s = _run(schedule, forward_s, backward_s, arrival_s)
    step_s = max(finish + tail for finish, tail in zip(finish_s, tail_s, strict=True))
    busy_s = tuple(worked + tail for worked, tail in zip(worked_s, tail_s, strict=True))
    return Simulation(
        step_s=step_s,
        bubble_fraction=1.0 - sum(busy_s) / (schedule.pp * step_s) if step_s else 0.0,
        busy_s=busy_s,
        peak_in_flight=tuple(_peak_in_flight(row) for row in schedule.table),
        schedule=schedule,
        _end_s=end_s,
        _arrival_s=arrival_s,
    )


def _each(values: float | Sequence[float], number: int, what: str, owners: str) -> Sequence[float]:
    if isinstance(values, (int, float)):
        return [values] * number
    if len(values) != number:
        raise ValueError(f"{len(values)} {what} for {number} {owners}")
    return values


def _peak_in_flight(row: tuple[Action, ...]) -> int:
    in_flight = peak = 0
    for action in row:
        in_flight += 1 if action.kind == "F" else -1
        peak = max(peak, in_flight)
    return peak


# Drawing


def draw(schedule: Schedule) -> str:
    """A picture in plain text: a row a rank, time to the right, a backward twice as long as a
    forward. `3` is the forward of micro-batch 3, `[3]` its backward, `.` an idle forward's time;
    with chunks a letter tells the chunk of the rank (`3b`)."""
    digits = len(str(schedule.micro_batches - 1))
    unit = digits + (2 if schedule.vpp > 1 else 1)  # characters of one forward, with a space
    rows = []
    for rank, row in enumerate(simulate(schedule, 1, 2).timeline):
        line = ""
        for (kind, stage, micro_batch), start, end in row:
            chunk = chr(ord("a") + stage // schedule.pp) if schedule.vpp > 1 else ""
            label = f"{micro_batch:{digits}d}{chunk}"
            line += ".".ljust(unit) * (round(start) - len(line) // unit)
            line += (label if kind == "F" else f"[{label}]").ljust(unit * round(end - start))
        rows.append(f"rank {rank:{len(str(schedule.pp - 1))}d}  {line.rstrip()}")
    return "\n".join(rows)
