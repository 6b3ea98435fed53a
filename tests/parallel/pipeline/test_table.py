from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given

from fivefold.errors import UserError
from fivefold.layout.actions import Action
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.table import Message, Schedule
from tests.parallel.pipeline.drawn import row, schedules


def test_messages_name_what_arrives_before_and_leaves_after_an_action():
    schedule = build("1f1b", 2, 2, 2)
    steps = {step.action: step for step in schedule.steps(0) + schedule.steps(1)}

    def action(text: str) -> Action:
        return row(text)[0]

    def around(text: str) -> tuple[Message | None, Message | None]:
        return steps[action(text)].receives, steps[action(text)].sends

    assert around("F00") == (None, Message(action("F00"), 1))
    assert around("F10") == (Message(action("F00"), 0), Message(action("F10"), 0))
    assert around("F30") == (Message(action("F20"), 0), None)
    assert around("B30") == (None, Message(action("B30"), 0))
    assert around("B20") == (Message(action("B30"), 1), Message(action("B20"), 1))
    assert around("B00") == (Message(action("B10"), 1), None)


def test_stages_on_one_rank_hand_over_and_send_nothing():
    steps = build("1f1b", 1, 3, 2).steps(0)
    assert len(steps) == 12
    assert {message.rank for step in steps for message in step[1:] if message} == {0}


@given(schedules(("gpipe", "1f1b")))
def test_what_one_rank_sends_another_reads_in_the_same_order_whatever_the_channel(
    schedule: Schedule,
):
    # Stronger than validate asks: no labels are needed even where all messages from one rank to
    # another share one stream, as with NCCL (pp 2 interleaved mixes activations and gradients).
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    read: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank in range(schedule.pp):
        for step in schedule.steps(rank):
            if step.sends:
                sent[rank, step.sends.rank].append(step.sends.produced_by)
            if step.receives:
                read[step.receives.rank, rank].append(step.receives.produced_by)
    assert sent == read


def test_a_gradient_comes_from_the_whole_backward_or_from_its_first_part():
    schedule = build("dualpipe-v", 2, 2, 4)
    sources = {
        schedule.needs(action)[0].kind
        for actions in schedule.table
        for action in actions
        if action.kind in ("B", "I") and action.stage < 3
    }
    assert sources == {"B", "I"}
    assert schedule.needs(Action("W", 1, 3)) == (Action("I", 1, 3),)


def test_where_a_v_turns_the_rank_hands_over_to_itself():
    steps = {step.action: step for step in build("zb-v", 2, 2, 2).steps(1)}
    assert steps[Action("F", 1, 0)].sends == Message(Action("F", 1, 0), 1)
    assert steps[Action("F", 2, 0)].receives == Message(Action("F", 1, 0), 1)
    assert steps[Action("I", 1, 0)].receives == Message(Action("I", 2, 0), 1)
    assert steps[Action("W", 1, 0)][1:] == (None, None)


def test_two_copies_of_the_stages_have_no_file():
    with pytest.raises(UserError, match=r"schedule=dualpipe has two copies .*dualpipe-v has one"):
        build("dualpipe", 2, 1, 4).text()
