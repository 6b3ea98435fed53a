"""A schedule in simulated time: how long a step takes, who waits, and how much is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

from fivefold.layout.actions import Action
from fivefold.parallel.pipeline.table import Schedule

_NOT_DONE = -1.0


class Timed(NamedTuple):
    """An action in simulated time, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch, by virtual stage."""

    forward: Sequence[float]
    backward: Sequence[float]  # the whole one
    weight: Sequence[float]  # its part for the weights
    overlapped: Sequence[float] | None  # a forward and a backward side by side; None: in turn
    arrival: Sequence[float]  # by pass, see `run_table`: travel of the message it waits for


@dataclass(frozen=True)
class Simulation:
    """What one step of a schedule costs in time and in activations held."""

    step_s: float  # from the first action's start to the end of the last tail
    bubble_fraction: float  # idle share of the step, averaged over the ranks
    busy_s: tuple[float, ...]  # per rank, its tail included
    peak_in_flight: tuple[int, ...]
    """Per rank: most (stage, micro_batch) after their forward and before the last of their
    backward. (A rank that has the input's gradient already keeps less of them than before.)"""
    schedule: Schedule
    _times: Times
    _end_s: list[float]  # by pass * micro_batches + micro_batch, see `run_table`

    @cached_property
    def timeline(self) -> tuple[tuple[Timed, ...], ...]:
        """Per rank its actions in order; made when first asked for."""
        return tuple(tuple(self._row(rank)) for rank in range(self.schedule.pp))

    def _row(self, rank: int) -> Iterator[Timed]:
        schedule, times, end_s = self.schedule, self._times, self._end_s
        count, last = schedule.micro_batches, 2 * schedule.stages - 1
        paired = schedule.pairs[rank] if schedule.pairs and times.overlapped is not None else ()
        row = schedule.table[rank]
        start_s = free_s = 0.0

        def arrival_s(action: Action) -> float:
            number = action.stage if action.kind == "F" else last - action.stage
            index = number * count + action.micro_batch
            return end_s[index - count] + times.arrival[number]

        for place, action in enumerate(row):
            kind, stage, micro_batch = action
            if kind == "W":
                start_s, free_s = free_s, free_s + times.weight[stage]
            elif place - 1 not in paired:  # else it has begun with the one before it
                begin = (action, row[place + 1]) if place in paired else (action,)
                start_s = max(free_s, *map(arrival_s, begin))
                number = stage if kind == "F" else last - stage
                free_s = end_s[number * count + micro_batch]
            yield Timed(action, start_s, free_s)


def run_table(schedule: Schedule, times: Times) -> tuple[list[float], list[float], list[float]]:
    """Runs the table: an action starts when its rank is free and what it needs has arrived.

    On its way a micro-batch makes 2 * stages passes: forward down the stages, then backward up
    again (a backward in two parts has passed with the first). An action needs the pass before it,
    and nothing else: a backward's own forward, which `needs` names too, is further back on the same
    way, and weight gradients need what their rank has done. Two actions side by side begin together
    and end together, after half of the `overlapped` seconds of either stage.

    A rank that must wait is put down under the action it waits for and taken up again when that
    is done, so the work is proportional to the number of actions. This loop is what a simulation
    costs: numbers in lists, no objects.

    Returns `end_s[pass * micro_batches + micro_batch]` and, by rank, `finish_s` and `busy_s`.
    Raises ValueError if the ranks get stuck.
    """
    count, last = schedule.micro_batches, 2 * schedule.stages - 1
    weight_s = times.weight
    input_s = [b - w for b, w in zip(times.backward, weight_s, strict=True)]
    pass_s = {"F": times.forward, "B": times.backward, "I": input_s}
    overlapped_s, arrival_s = times.overlapped, times.arrival
    # The last entries are read as pass -1, from where micro-batches come: they are there at once.
    end_s = [_NOT_DONE] * ((last + 1) * count) + [0.0] * count
    finish_s, busy_s = [0.0] * schedule.pp, [0.0] * schedule.pp
    waiting: dict[int, int] = {}  # rank by the index of the action it waits for

    def walk(rank: int) -> Iterator[int]:
        """Runs the rank's row; yields the index of an action when it must wait for it."""
        now_s = worked_s = 0.0
        paired = schedule.pairs[rank] if schedule.pairs and overlapped_s is not None else ()
        begun, half_s = -1, 0.0  # the first of two side by side
        for place, (kind, stage, micro_batch) in enumerate(schedule.table[rank]):
            if kind == "W":
                now_s += weight_s[stage]
                worked_s += weight_s[stage]
                continue
            number = stage if kind == "F" else last - stage
            seconds = pass_s[kind][stage]
            index = number * count + micro_batch
            if end_s[index - count] == _NOT_DONE:
                yield index - count
            now_s = max(now_s, end_s[index - count] + arrival_s[number])
            if paired:
                assert overlapped_s is not None
                if place in paired:
                    begun, half_s = index, overlapped_s[stage] / 2
                    continue
                if begun >= 0:
                    seconds = half_s + overlapped_s[stage] / 2
            now_s += seconds
            worked_s += seconds
            for done in (index,) if begun < 0 else (index, begun):
                end_s[done] = now_s
                if done in waiting:
                    ready.append(waiting.pop(done))
            begun = -1
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
        if number < schedule.stages:
            return Action("F", number, micro_batch)
        stage = last - number
        return Action("I" if (stage, micro_batch) in schedule.split else "B", stage, micro_batch)

    def rank_of(action: Action) -> int:
        return schedule.rank_of(action.stage, action.micro_batch)

    waits_for = {rank: action_at(index) for index, rank in waiting.items()}
    waits_with = {rank: action_at(index + count) for index, rank in waiting.items()}
    ring: list[int] = []
    rank = min(waits_for)
    while rank in waits_for and rank not in ring:
        ring.append(rank)
        rank = rank_of(waits_for[rank])
    if rank in ring:
        ring = ring[ring.index(rank) :]
    waits = [
        f"rank {rank} at its action {schedule.table[rank].index(waits_with[rank])} "
        f"({waits_with[rank]}) waits for {waits_for[rank]} of rank {rank_of(waits_for[rank])}"
        for rank in ring
    ]
    raise ValueError(f"schedule {schedule.name} gets stuck: {'; '.join(waits)}")


def simulate(
    schedule: Schedule,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    send_s: float | Sequence[float] = 0.0,
    tail_s: float | Sequence[float] = 0.0,
    weight_s: float | Sequence[float] | None = None,
    overlapped_s: float | Sequence[float] | None = None,
) -> Simulation:
    """Times one step: an action starts when its rank is free and what it needs has arrived.

    `forward_s` and `backward_s` are the seconds of one micro-batch on a virtual stage, one number
    for all stages or one for each; `weight_s` is the part of the backward that makes the weights'
    gradients, half of it if not given. `send_s` is the seconds a message travels between two ranks,
    one number or one for each boundary between two virtual stages (stages - 1, in model order);
    it delays the receiver but occupies neither rank. `tail_s` is what a rank does after its last
    action (the optimizer step, say), one number or one for each rank.

    `overlapped_s` is the seconds of a stage's forward and backward, of two micro-batches, side by
    side: then the schedule's `pairs` run so (a pair of two stages takes half of either's), from
    when both have what they need. If not given, they run one after the other.
    Raises ValueError if the table gets stuck.
    """
    stages = schedule.stages
    forward_s = _each(forward_s, stages, "stage times", "virtual stages")
    backward_s = _each(backward_s, stages, "stage times", "virtual stages")
    if weight_s is None:
        weight_s = [seconds / 2 for seconds in backward_s]
    weight_s = _each(weight_s, stages, "stage times", "virtual stages")
    if overlapped_s is not None:
        overlapped_s = _each(overlapped_s, stages, "stage times", "virtual stages")
    send_s = _each(send_s, stages - 1, "travel times", "boundaries")
    tail_s = _each(tail_s, schedule.pp, "tail times", "ranks")
    down_s = [
        0.0 if schedule.rank_of(stage) == schedule.rank_of(stage + 1) else seconds
        for stage, seconds in enumerate(send_s)
    ]
    arrival_s = [0.0, *down_s, 0.0, *reversed(down_s)]
    times = Times(forward_s, backward_s, weight_s, overlapped_s, arrival_s)
    end_s, finish_s, worked_s = run_table(schedule, times)
    step_s = max(finish + tail for finish, tail in zip(finish_s, tail_s, strict=True))
    busy_s = tuple(worked + tail for worked, tail in zip(worked_s, tail_s, strict=True))
    return Simulation(
        step_s=step_s,
        bubble_fraction=1.0 - sum(busy_s) / (schedule.pp * step_s) if step_s else 0.0,
        busy_s=busy_s,
        peak_in_flight=tuple(_peak_in_flight(row) for row in schedule.table),
        schedule=schedule,
        _times=times,
        _end_s=end_s,
    )


def _each(values: float | Sequence[float], number: int, what: str, owners: str) -> Sequence[float]:
    if isinstance(values, (int, float)):
        return [values] * number
    if len(values) != number:
        raise ValueError(f"{len(values)} {what} for {number} {owners}")
    return values


def _peak_in_flight(row: tuple[Action, ...]) -> int:
    in_flight = peak = 0
    for kind, _, _ in row:
        if kind == "F":
            in_flight += 1
            peak = max(peak, in_flight)
        elif kind != "I":
            in_flight -= 1
    return peak
