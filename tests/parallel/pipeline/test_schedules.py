from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.actions import Action
from fivefold.parallel.pipeline.picture import draw
from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.simulation import simulate
from fivefold.parallel.pipeline.table import Message, Schedule
from tests.parallel.pipeline.drawn import schedules


def row(text: str) -> tuple[Action, ...]:
    """Reads "F00 B31" as the actions (F, stage 0, micro-batch 0), (B, stage 3, micro-batch 1)."""
    return tuple(Action(word[0], int(word[1]), int(word[2])) for word in text.split())


def table(name: str, micro_batches: int, *rows: str) -> Schedule:
    return Schedule(name, len(rows), 1, micro_batches, tuple(row(text) for text in rows))


# The tables


def test_gpipe_runs_all_forwards_before_all_backwards():
    assert build("gpipe", 2, 1, 3).table == (
        row("F00 F01 F02 B00 B01 B02"),
        row("F10 F11 F12 B10 B11 B12"),
    )


def test_1f1b_takes_turns_after_a_warm_up_that_shrinks_along_the_pipeline():
    assert build("1f1b", 3, 1, 4).table == (
        row("F00 F01 F02 B00 F03 B01 B02 B03"),
        row("F10 F11 B10 F12 B11 F13 B12 B13"),
        row("F20 B20 F21 B21 F22 B22 F23 B23"),
    )


def test_interleaved_1f1b_sends_pp_micro_batches_at_a_time_through_the_chunks():
    assert build("1f1b", 2, 2, 4).table == (
        row("F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 B01 B22 B23 B02 B03"),
        row("F10 F11 F30 B30 F31 B31 F12 B10 F13 B11 F32 B32 F33 B33 B12 B13"),
    )


@pytest.mark.parametrize("rank", range(4))
def test_interleaved_1f1b_warms_up_like_megatron(rank: int):
    actions = build("1f1b", 4, 3, 16).table[rank]
    first_backward = [action.kind for action in actions].index("B")
    warm_up = (4 - rank - 1) * 2 + (3 - 1) * 4
    assert first_backward == warm_up + 1  # the first pair's forward comes before its backward


@given(schedules())
def test_every_schedule_built_is_proved(schedule: Schedule):
    validate(schedule)


@given(schedules())
def test_every_stage_runs_its_backwards_in_micro_batch_order(schedule: Schedule):
    for actions in schedule.table:
        order: dict[int, list[int]] = defaultdict(list)
        for action in actions:
            if action.kind in ("B", "I"):
                order[action.stage].append(action.micro_batch)
        for run in order.values():
            assert run == list(range(run[0], run[0] + len(run)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8])
def test_fewer_micro_batches_than_stages_run(name: str, micro_batches: int):
    validate(build(name, 4, 1, micro_batches))


# Refusals


@pytest.mark.parametrize(
    ("micro_batches", "nearest"), [(3, "4 and 8"), (6, "4 and 8"), (9, "8 and 12")]
)
def test_interleaving_refuses_micro_batches_that_are_no_multiple_of_pp(
    micro_batches: int, nearest: str
):
    message = rf"vpp2.* multiple of pp 4, not {micro_batches}: .* {nearest}$"
    with pytest.raises(UserError, match=message):
        build("1f1b", 4, 2, micro_batches)


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_interleaving_runs_multiples_of_pp(micro_batches: int):
    validate(build("1f1b", 4, 2, micro_batches))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpipe", 4, 2, 8), "gpipe .* vpp is 2: use vpp1, or schedule=1f1b"),
        (("bfs", 4, 1, 8), "schedule=bfs .* vpp is 1: use vpp2, or schedule=gpipe"),
        (("zb-v", 4, 1, 8), "schedule=zb-v is for vpp 2, not vpp 1: use vpp2"),
        (("zb-h1", 1, 1, 8), "schedule=zb-h1 .* pp is 1: use pp2 or 1f1b"),
        (("dualpipe-v", 4, 2, 7), "needs 2 x pp 4 = 8 micro-batches or more, not 7: use ga8"),
        (("dualpipe", 3, 1, 8), "pp 3 or ga 8 is odd: use pp4 ga8, or dualpipe-v"),
        (("1f1b", 4, 1, 0), "ga must be 1 or more, not 0"),
        (("1f1b", 0, 1, 4), "pp must be 1 or more, not 0"),
        (("1f1b", 4, 0, 4), "vpp must be 1 or more, not 0"),
    ],
)
def test_what_no_schedule_can_run_is_refused(arguments: tuple[str, int, int, int], message: str):
    with pytest.raises(UserError, match=message):
        build(*arguments)


# The proof can fail


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
    candidate = dataclasses.replace(schedule, table=tuple(tuple(actions) for actions in rows))
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
                local = [
                    needed
                    for needed in schedule.needs(action)
                    if receives is None or needed != receives.produced_by
                ]
                if any(needed not in done for needed in local):
                    break
                if receives is not None:
                    queue = queues[_channel(receives, rank, receives.rank)]
                    if not queue:
                        break
                    if queue.pop(0) != receives.produced_by:
                        return False
                if sends is not None:
                    queues[_channel(sends, sends.rank, rank)].append(action)
                done.add(action)
                waiting.pop(0)
                progress = True
    return not any(steps)


# Messages


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


# Time and memory


@pytest.mark.parametrize("backward_s", [1.0, 2.0])
@pytest.mark.parametrize(
    ("pp", "micro_batches", "vpp", "idle"),
    [
        (8, 8, 1, 0.467),
        (8, 32, 1, 0.179),
        (8, 32, 4, 0.052),
        (4, 16, 2, 0.086),
        (8, 4, 1, 7 / 11),
    ],
)
def test_the_bubble_is_the_known_share_of_the_step(
    pp: int, micro_batches: int, vpp: int, idle: float, backward_s: float
):
    simulation = simulate(build("1f1b", pp, vpp, micro_batches), 1.0, backward_s)
    assert simulation.bubble_fraction == pytest.approx(idle, abs=5e-4)


@given(schedules(("gpipe", "1f1b")), st.floats(0.1, 4.0))
def test_equal_stages_idle_by_the_closed_form(schedule: Schedule, backward_s: float):
    # Narayanan et al., arXiv:2104.04473, section 2.2: (p - 1) / (v m) of the ideal time.
    simulation = simulate(schedule, 1.0, backward_s)
    work = schedule.vpp * schedule.micro_batches
    assert simulation.bubble_fraction == pytest.approx(
        (schedule.pp - 1) / (work + schedule.pp - 1), abs=1e-9
    )
    assert simulation.busy_s == pytest.approx([work * (1.0 + backward_s)] * schedule.pp)


def test_stage_times_and_travel_times_add_up_along_the_pipeline():
    # One micro-batch: down through the stages and up again, with a message at each boundary.
    simulation = simulate(build("1f1b", 3, 1, 1), [1, 2, 4], [8, 16, 32], send_s=0.5)
    assert simulation.step_s == 1 + 2 + 4 + 32 + 16 + 8 + 4 * 0.5
    assert simulation.busy_s == (9, 18, 36)
    assert simulation.bubble_fraction == pytest.approx(1 - 63 / (3 * 65))
    assert [timed.start_s for timed in simulation.timeline[1]] == [1.5, 1.5 + 2 + 0.5 + 36 + 0.5]


def test_a_slow_stage_sets_the_pace_of_the_whole_pipeline():
    simulation = simulate(build("1f1b", 4, 1, 100), [1, 1, 3, 1], [1, 1, 3, 1])
    assert simulation.busy_s[2] == 600
    assert 600 < simulation.step_s < 620


@given(schedules(), st.data())
def test_no_action_starts_before_its_rank_is_free_and_its_inputs_have_arrived(
    schedule: Schedule, data: st.DataObject
):
    times = st.lists(st.floats(0.0, 4.0), min_size=schedule.stages, max_size=schedule.stages)
    send_s = data.draw(st.floats(0.0, 4.0))
    forward, backward = data.draw(times), data.draw(times)
    weight = [seconds * data.draw(st.floats(0.0, 1.0)) for seconds in backward]
    simulation = simulate(schedule, forward, backward, send_s, weight_s=weight)
    end_s = {timed.action: timed.end_s for held in simulation.timeline for timed in held}
    for rank, held in enumerate(simulation.timeline):
        assert tuple(timed.action for timed in held) == schedule.table[rank]
        free_s = 0.0
        for action, start_s, finish_s in held:
            arrivals = [
                end_s[needed]
                + (0.0 if schedule.rank_of(needed.stage, action.micro_batch) == rank else send_s)
                for needed in schedule.needs(action)
            ]
            assert start_s == max([free_s, *arrivals])
            free_s = finish_s
    assert simulation.step_s == max(end_s.values())


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 16])
def test_1f1b_holds_as_many_micro_batches_as_ranks_follow_whatever_their_number(
    micro_batches: int,
):
    held = simulate(build("1f1b", 4, 1, micro_batches), 1.0, 2.0).peak_in_flight
    assert held == tuple(min(micro_batches, 4 - rank) for rank in range(4))


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 16])
def test_gpipe_holds_every_micro_batch(micro_batches: int):
    held = simulate(build("gpipe", 4, 1, micro_batches), 1.0, 2.0).peak_in_flight
    assert held == (micro_batches,) * 4


def test_interleaved_1f1b_holds_its_warm_up_and_one_more():
    held = simulate(build("1f1b", 4, 2, 16), 1.0, 2.0).peak_in_flight
    assert held == tuple((4 - rank - 1) * 2 + 4 + 1 for rank in range(4))


def test_a_list_of_the_wrong_number_of_stage_times_is_refused():
    with pytest.raises(ValueError, match="3 stage times for 4 virtual stages"):
        simulate(build("1f1b", 2, 2, 2), [1.0, 1.0, 1.0], 1.0)


def test_simulating_a_table_that_gets_stuck_says_so():
    with pytest.raises(ValueError, match="gets stuck"):
        simulate(table("x", 1, "B00 F00", "F10 B10"), 1.0, 1.0)


def test_each_boundary_may_have_its_own_travel_time():
    simulation = simulate(build("1f1b", 3, 1, 1), [1, 2, 4], [8, 16, 32], send_s=[0.5, 0.25])
    assert simulation.step_s == 63 + 2 * (0.5 + 0.25)
    assert [timed.start_s for timed in simulation.timeline[2]] == [1 + 0.5 + 2 + 0.25, 7.75]


def test_a_send_that_arrives_while_the_receiver_computes_costs_nothing():
    slow_last = dict(forward_s=[1, 3], backward_s=[1, 3])
    without = simulate(build("gpipe", 2, 1, 4), **slow_last)
    travelling = simulate(build("gpipe", 2, 1, 4), **slow_last, send_s=0.5)
    assert travelling.step_s == without.step_s + 2 * 0.5  # the first and the last message only


def test_the_step_ends_with_the_tail_of_the_last_rank_to_finish():
    schedule = build("1f1b", 2, 1, 1)
    assert simulate(schedule, 1.0, 2.0, tail_s=0.5).step_s == 6.5
    simulation = simulate(schedule, 1.0, 2.0, tail_s=[0.5, 4.0])  # the last rank ends at 4
    assert simulation.step_s == 8.0
    assert simulation.busy_s == (3.5, 7.0)


def test_a_wrong_number_of_travel_times_is_refused():
    with pytest.raises(ValueError, match="2 travel times for 3 boundaries"):
        simulate(build("1f1b", 4, 1, 4), 1.0, 1.0, send_s=[0.0, 0.0])


# Pictures


def test_the_picture_shows_forwards_backwards_and_idle_time():
    assert draw(build("1f1b", 2, 1, 3)) == (
        "rank 0  0 1 . . [0] 2 [1] . [2]\nrank 1  . 0 [0] 1 [1] 2 [2]"
    )


def test_the_picture_names_the_chunk_by_a_letter():
    assert draw(build("1f1b", 2, 2, 2)) == (
        "rank 0  0a 1a 0b 1b .  .  [0b]  .  [1b]  [0a]  [1a]\n"
        "rank 1  .  0a 1a 0b [0b]  1b [1b]  [0a]  [1a]"
    )


def test_schedules_and_splits_need_no_torch():
    code = (
        "import sys, fivefold.parallel.pipeline.picture, fivefold.parallel.pipeline.schedules;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
