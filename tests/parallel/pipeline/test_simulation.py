from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.simulation import simulate
from fivefold.parallel.pipeline.table import Schedule
from tests.parallel.pipeline.drawn import schedules, table


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


# Backwards in two parts


@pytest.mark.parametrize("weight_s", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zb_h1_idles_by_its_formula(pp: int, weight_s: float):
    # Qi et al., arXiv:2401.10241, table 2: (p - 1) (T_F + T_B - T_W); and the last rank waits for
    # its first forward, which is that much where T_B <= T_W.
    simulation = simulate(build("zb-h1", pp, 1, 4 * pp), 1.0, 1.0 + weight_s, weight_s=weight_s)
    idle_s = simulation.step_s - 4 * pp * (2.0 + weight_s)
    assert idle_s == pytest.approx((pp - 1) * max(1.0, 1.0 + 1.0 - weight_s))


def test_zb_h1_idles_a_third_of_1f1b():
    # Section 2.1: with equal times of the three passes the bubble is a third of 1F1B's.
    idle_s = [
        simulate(build(name, 8, 1, 32), 1.0, 2.0).step_s - 32 * 3.0 for name in ("1f1b", "zb-h1")
    ]
    assert idle_s == [21.0, 7.0]


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zb_v_never_waits_after_its_first_forward_where_all_passes_take_equally_long(pp: int):
    simulation = simulate(build("zb-v", pp, 2, 2 * pp), 1.0, 2.0)
    for rank, held in enumerate(simulation.timeline):
        assert held[0].start_s == rank  # stages of half the layers each
        assert simulation.busy_s[rank] == held[-1].end_s - held[0].start_s


@pytest.mark.parametrize("pp", [4, 8])
def test_dualpipe_side_by_side_idles_by_its_formula(pp: int):
    # DeepSeek-AI, arXiv:2412.19437, table 2: (PP / 2 - 1) (F&B + B - 3 W), with F = B / 2 = W.
    formula_s = (pp // 2 - 1) * (3.0 + 2.0 - 3.0)
    whole = simulate(build("dualpipe", pp, 1, 4 * pp), 1.0, 2.0, overlapped_s=3.0)
    assert whole.step_s == 4 * pp * 3.0 + formula_s
    folded = simulate(build("dualpipe-v", pp // 2, 2, 2 * pp), 1.0, 2.0, overlapped_s=3.0)
    assert folded.step_s == whole.step_s


def test_side_by_side_is_worth_what_it_saves():
    schedule = build("dualpipe-v", 4, 2, 32)
    pairs = len(schedule.pairs[0])
    apart = simulate(schedule, 1.0, 2.0, overlapped_s=3.0)
    beside = simulate(schedule, 1.0, 2.0, overlapped_s=2.5)
    assert apart.busy_s[0] - beside.busy_s[0] == 0.5 * pairs
    assert beside.step_s < apart.step_s - 0.5 * (pairs - 2 * schedule.pp)


def test_two_side_by_side_begin_when_both_can_and_end_together():
    schedule = build("dualpipe-v", 2, 2, 8)
    overlapped = [2.0, 4.0, 6.0, 8.0]
    simulation = simulate(schedule, 1.0, 2.0, 0.25, overlapped_s=overlapped)
    end_s = {timed.action: timed.end_s for held in simulation.timeline for timed in held}
    for rank, held in enumerate(simulation.timeline):
        for place in schedule.pairs[rank]:
            forward, backward = held[place : place + 2]
            assert forward[1:] == backward[1:]
            stages = forward.action.stage, backward.action.stage
            assert forward.end_s - forward.start_s == sum(overlapped[s] / 2 for s in stages)
            for timed in (forward, backward):
                for needed in schedule.needs(timed.action):
                    travel_s = 0.25 * (schedule.rank_of(needed.stage) != rank)
                    assert timed.start_s >= end_s[needed] + travel_s


@pytest.mark.parametrize(
    ("name", "vpp", "held"),
    [
        ("zb-h1", 1, [8] * 8),  # on every rank what 1F1B holds on the first
        ("zb-v", 2, [16] * 8),
        ("dualpipe-v", 2, [17] * 8),
        ("dualpipe", 1, [9] * 8),  # PP + 1: arXiv:2412.19437, table 2
        ("1f1b", 1, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
@pytest.mark.parametrize("micro_batches", [16, 32, 64])
def test_more_micro_batches_hold_no_more_activations(
    name: str, vpp: int, held: list[int], micro_batches: int
):
    schedule = build(name, 8, vpp, micro_batches)
    assert list(simulate(schedule, 1.0, 2.0).peak_in_flight) == held


def test_a_message_that_turns_on_its_rank_does_not_travel():
    simulation = simulate(build("zb-v", 2, 2, 1), 1.0, 2.0, send_s=0.5)
    # Two borders both ways; and rank 1's weights of one stage come before its other gradient.
    assert simulation.step_s == 4 * 1.0 + 4 * 1.0 + 4 * 0.5 + 2 * 1.0


# Published steps

ZERO_BUBBLE = Path(__file__).parents[3] / "benchmarks" / "data" / "measurements.csv"


def published() -> dict[tuple[str, int], float]:
    """Samples per second and device by schedule and micro-batches: GPT of 6.2B parameters, 8
    stages (arXiv:2401.10241, table 4)."""
    with ZERO_BUBBLE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["params_b"] == "6.2"]
    return {
        (row["pipeline_schedule"], int(row["global_batch"]) // int(row["micro_batch"])): float(
            row["metric_value"]
        )
        for row in rows
        if row["id"].startswith("ZB-")
    }


# Products of a layer of h = 4,096 and s = 1,024, per token and h (table 1 there).
FORWARD, OF_INPUT, OF_WEIGHTS = 24 * 4096 + 4 * 1024, 24 * 4096 + 8 * 1024, 24 * 4096


@pytest.mark.parametrize("micro_batches", [24, 32, 64])
def test_published_gains_of_later_weight_gradients_are_the_simulated_ones(micro_batches: int):
    measured = {name: published()[name, micro_batches] for name in ("1F1B", "ZB-1p", "ZB-2p")}

    def step_s(name: str, vpp: int = 1) -> float:
        times = [
            seconds / vpp / FORWARD for seconds in (FORWARD, OF_INPUT + OF_WEIGHTS, OF_WEIGHTS)
        ]
        schedule = build(name, 8, vpp, micro_batches)
        return simulate(schedule, times[0], times[1], weight_s=times[2]).step_s

    plain, one, two = step_s("1f1b"), step_s("zb-h1"), step_s("zb-v", 2)
    assert plain > one > two and measured["1F1B"] < measured["ZB-1p"] < measured["ZB-2p"]
    assert plain / one == pytest.approx(measured["ZB-1p"] / measured["1F1B"], abs=0.065)
    # ZB-V waits as little as ZB-2p, with half of its memory (section 6).
    assert plain / two == pytest.approx(measured["ZB-2p"] / measured["1F1B"], abs=0.025)
