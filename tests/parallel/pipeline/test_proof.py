from __future__ import annotations

import dataclasses
import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.layout.actions import Action
from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.table import Message, Schedule
from tests.parallel.pipeline.drawn import row, schedules, table


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (table("x", 1, "F00 B00", "F10"), "^rank 1 never runs B of stage 1, micro-batch 0$"),
        (table("x", 1, "F00 F00 B00", "F10 B10"), "^rank 0 runs F of stage 0.* twice$"),
        (table("x", 1, "F00 F10 B00", "B10"), "^rank 0 runs F of stage 1.* belongs to rank 1$"),
        (table("x", 1, "F00 B00 F02", "F10 B10"), "outside of 2 stages and 1 micro-batches$"),
        (table("x", 1, "F00 X00 B00", "F10 B10"), "^rank 0 runs X of stage 0.* unknown kind$"),
        (table("x", 1, "F00 W00 I00", "F10 B10"), "^rank 0 runs W of stage 0.* before I of it"),
        (table("x", 1, "F00 I00", "F10 B10"), "^rank 0 never runs W of stage 0, micro-batch 0$"),
        (table("x", 1, "F00 W00", "F10 B10"), "^rank 0 runs W of stage 0.* before I of it"),
        (
            table("x", 1, "F00 I00 W00 B00", "F10 B10"),
            "^rank 0 runs B of stage 0, micro-batch 0 and I of it, which is a part of it$",
        ),
        (
            Schedule("x", 2, 1, 1, (row("F00 B00"),)),
            "^the table has 1 rows for pp 2$",
        ),
        (
            table("x", 1, "B00 F00", "F10 B10"),
            "^schedule x gets stuck: "
            r"rank 0 at its action 0 \(B of stage 0, micro-batch 0\) waits for "
            "B of stage 1, micro-batch 0 of rank 1; "
            r"rank 1 at its action 0 \(F of stage 1, micro-batch 0\) waits for "
            "F of stage 0, micro-batch 0 of rank 0$",
        ),
        (
            table("x", 1, "F00 B00", "B10 F10"),
            r"stuck: rank 1 at its action 0 \(B of stage 1, micro-batch 0\) waits for "
            "F of stage 1, micro-batch 0 of rank 1$",
        ),
        (
            table("x", 2, "F00 F01 B00 B01", "F11 F10 B10 B11"),
            "^rank 1 waits for F of stage 0, micro-batch 1 where rank 0 "
            "first sends F of stage 0, micro-batch 0$",
        ),
        (
            table("x", 2, "F00 F01 B01 B00", "F10 F11 B10 B11"),
            "^rank 0 waits for B of stage 1, micro-batch 1 where rank 1 "
            "first sends B of stage 1, micro-batch 0$",
        ),
    ],
)
def test_a_broken_table_is_refused_with_rank_action_and_reason(broken: Schedule, message: str):
    with pytest.raises(ValueError, match=message):
        validate(broken)


def test_ranks_that_warm_up_too_little_deadlock():
    # Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, which rank 1
    # wants before it starts its backwards.
    with pytest.raises(ValueError, match=r"gets stuck: rank 0 .* of rank 1; rank 1 .* of rank 0$"):
        validate(table("x", 2, "F00 B00 F01 B01", "F10 F11 B10 B11"))


@given(schedules(), st.randoms(use_true_random=False))
def test_validate_agrees_with_running_the_table_rank_by_rank(
    schedule: Schedule, chance: random.Random
):
    rows = [list(actions) for actions in schedule.table]
    swapped = chance.choice(rows)
    first, second = chance.randrange(len(swapped)), chance.randrange(len(swapped))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    candidate = dataclasses.replace(
        schedule, table=tuple(tuple(actions) for actions in rows), pairs=()
    )
    if _runs(candidate):
        validate(candidate)
    else:
        with pytest.raises(ValueError):
            validate(candidate)


def _channel(message: Message, reader: int, writer: int) -> tuple[bool, int, int]:
    return message.produced_by.kind == "F", writer, reader


def _runs(schedule: Schedule) -> bool:
    """Runs the table with one queue of unlabelled messages a channel, by trying every rank."""
    queues: dict[tuple[bool, int, int], list[Action]] = defaultdict(list)
    done: set[Action] = set()
    steps = [schedule.steps(rank) for rank in range(schedule.pp)]
    progress = True
    while progress:
        progress = False
        for rank, waiting in enumerate(steps):
            while waiting:
                action, receives, sends = waiting[0]
                message = receives if receives and receives.rank != rank else None
                local = [
                    needed
                    for needed in schedule.needs(action)
                    if message is None or needed != message.produced_by
                ]
                if any(needed not in done for needed in local):
                    break
                if message is not None:
                    queue = queues[_channel(message, rank, message.rank)]
                    if not queue:
                        break
                    if queue.pop(0) != message.produced_by:
                        return False
                if sends is not None and sends.rank != rank:
                    queues[_channel(sends, sends.rank, rank)].append(action)
                done.add(action)
                waiting.pop(0)
                progress = True
    return not any(steps)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_gradient_of_weights_that_is_moved_ahead_of_its_input_s_is_refused(name: str):
    schedule = build(name, 4, 2, 8)
    actions = list(schedule.table[0])
    place = next(i for i, action in enumerate(actions) if action.kind == "W")
    actions.insert(0, actions.pop(place))
    broken = dataclasses.replace(schedule, table=(tuple(actions), *schedule.table[1:]), pairs=())
    with pytest.raises(ValueError, match=r"rank 0 runs W of stage 7.* before I of it"):
        validate(broken)


def test_a_table_that_runs_in_turn_but_not_side_by_side_is_refused():
    # Side by side rank 0's forward of micro-batch 1 waits for the gradient that rank 1 makes after
    # it has seen that very forward.
    rows = row("F00 F01 B00 B01"), row("F10 F11 B10 B11")
    validate(Schedule("x", 2, 1, 2, rows))
    with pytest.raises(ValueError, match="gets stuck"):
        validate(Schedule("x", 2, 1, 2, rows, pairs=(frozenset({1}), frozenset())))


def test_only_a_forward_and_the_backward_after_it_can_be_paired():
    rows = row("F00 B00"), row("F10 B10")
    with pytest.raises(ValueError, match="rank 0 pairs its action 1 with the next one"):
        validate(Schedule("x", 2, 1, 1, rows, pairs=(frozenset({1}), frozenset())))


def test_a_channel_is_all_that_one_rank_sends_another_forward():
    # Rank 1 runs stage 3 on micro-batch 0 before stage 1 on micro-batch 1: each stage's messages
    # come in order, but rank 0 writes stage 0's second before stage 2's first.
    first = row("F00 F01 F20 F21 B20 B21 B00 B01")
    second = row("F10 F30 F11 F31 B30 B31 B10 B11")
    with pytest.raises(
        ValueError, match="rank 1 waits for F of stage 2, micro-batch 0 where rank 0 first sends F"
    ):
        validate(Schedule("x", 2, 2, 2, (first, second)))
