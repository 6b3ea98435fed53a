"""The proof that a table, from wherever it comes, can be run and does the whole step."""

from __future__ import annotations

from collections import defaultdict

from fivefold.layout.actions import KINDS, Action
from fivefold.parallel.pipeline.simulation import Times, run_table
from fivefold.parallel.pipeline.table import Schedule


def validate(schedule: Schedule) -> None:
    """Proves a table.

    Holds afterwards: every micro-batch passes every stage once forward and once backward, in one
    part or in two, on the right rank; no action comes before what it needs; the ranks cannot wait
    for each other in a ring, even if pairs run side by side; and every channel is read in the order
    in which it is written, so that messages need no label. A channel is all that goes from one rank
    to another in one direction, forward or backward.
    Raises ValueError naming the rank, the action and what it waits for.
    """
    _check_each_once(schedule)
    _check_pairs(schedule)
    _check_channels(schedule)
    at_once = [0.0] * schedule.stages
    arrival_s = [0.0] * (2 * schedule.stages)
    run_table(schedule, Times(at_once, at_once, at_once, at_once, arrival_s))


def _check_each_once(schedule: Schedule) -> None:
    if len(schedule.table) != schedule.pp:
        raise ValueError(f"the table has {len(schedule.table)} rows for pp {schedule.pp}")
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.table):
        for action in row:
            _check_action(schedule, rank, action)
            if action in seen:
                raise ValueError(f"rank {rank} runs {action} twice")
            kind, stage, micro_batch = action
            if kind == "W" and ("I", stage, micro_batch) not in seen:
                raise ValueError(
                    f"rank {rank} runs {action} before I of it, the gradient of the input"
                )
            seen.add(action)
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            _check_passes(schedule, stage, micro_batch, seen)


def _check_action(schedule: Schedule, rank: int, action: Action) -> None:
    kind, stage, micro_batch = action
    if kind not in KINDS:
        raise ValueError(f"rank {rank} runs {action}, an action of unknown kind")
    if not (0 <= stage < schedule.stages and 0 <= micro_batch < schedule.micro_batches):
        raise ValueError(
            f"rank {rank} runs {action}, outside of {schedule.stages} stages and "
            f"{schedule.micro_batches} micro-batches"
        )
    owner = schedule.rank_of(stage, micro_batch)
    if owner != rank:
        raise ValueError(f"rank {rank} runs {action}, which belongs to rank {owner}")


def _check_passes(schedule: Schedule, stage: int, micro_batch: int, seen: set[Action]) -> None:
    """A micro-batch has one forward on a stage, and one backward: B, or I and W."""
    whole = Action("B", stage, micro_batch)
    wanted = ["F"]
    if (stage, micro_batch) not in schedule.split:
        wanted.append("B")
    else:
        wanted.append("W")
        if whole in seen:
            rank = schedule.rank_of(stage, micro_batch)
            raise ValueError(f"rank {rank} runs {whole} and I of it, which is a part of it")
    for kind in wanted:
        action = Action(kind, stage, micro_batch)
        if action not in seen:
            rank = schedule.rank_of(stage, micro_batch)
            raise ValueError(f"rank {rank} never runs {action}")


def _check_pairs(schedule: Schedule) -> None:
    for rank, (row, paired) in enumerate(zip(schedule.table, schedule.pairs, strict=False)):
        for place in paired:
            kinds = [kind for kind, _, _ in row[place : place + 2]]
            if kinds != ["F", "B"]:
                raise ValueError(
                    f"rank {rank} pairs its action {place} with the next one, but only a forward "
                    "runs side by side, with a backward"
                )


def _check_channels(schedule: Schedule) -> None:
    """Channels by (is it forward?, from rank, to rank); what they carry as (stage, micro_batch) of
    the sender."""
    written: defaultdict[tuple[bool, int, int], list[Action]] = defaultdict(list)
    read: defaultdict[tuple[bool, int, int], list[Action]] = defaultdict(list)
    for rank in range(schedule.pp):
        for action, receives, sends in schedule.steps(rank):
            forward = action.kind == "F"
            if sends is not None and sends.rank != rank:
                written[forward, rank, sends.rank].append(action)
            if receives is not None and receives.rank != rank:
                read[forward, receives.rank, rank].append(receives.produced_by)
    for (forward, sender, reader), reads in read.items():
        for sent, expected in zip(written[forward, sender, reader], reads, strict=True):
            if sent != expected:
                raise ValueError(
                    f"rank {reader} waits for {expected} where rank {sender} first sends {sent}"
                )
