from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.notation import PLANNED_SCHEDULES, SCHEDULES
from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.schedules import build, check
from fivefold.parallel.pipeline.simulation import simulate
from fivefold.parallel.pipeline.table import Schedule
from fivefold.plan.time.pipeline import in_flight, pipeline_step_s
from tests.parallel.pipeline.drawn import SPLIT, schedules


class Case(NamedTuple):
    """A pipeline with its times: `forward_s` and `backward_s` of the first, middle, last stage."""

    schedule: str
    pp: int
    vpp: int
    micro_batches: int
    forward_s: tuple[float, float, float]
    backward_s: tuple[float, float, float]
    send_s: float


def equal_stages(case: Case) -> Case:
    return case._replace(forward_s=(1.0, 1.0, 1.0), backward_s=(case.backward_s[1],) * 3)


def drawn_cases(
    number: int, schedule: str, interleaved: bool, ends: tuple[float, float], most_send: float
) -> list[Case]:
    """A middle stage's forward takes 1 s and its backward 1 to 3 s; the first and the last stage
    `ends` times that, and a message up to `most_send` seconds."""
    chance = random.Random(0)
    cases = []
    for _ in range(number):
        pp, vpp, micro_batches = chance.randint(1, 16), 1, chance.randint(1, 64)
        if interleaved:
            pp, vpp = chance.randint(2, 16), chance.randint(2, 6)
            micro_batches = pp * chance.randint(1, 6)
        backward = chance.uniform(1, 3)
        first, last = chance.uniform(*ends), chance.uniform(*ends)
        tilt = [chance.uniform(0.9, 1.1) for _ in range(2)]
        backwards = (backward * first * tilt[0], backward, backward * last * tilt[1])
        send = chance.uniform(0, most_send)
        forwards = (first, 1.0, last)
        cases.append(Case(schedule, pp, vpp, micro_batches, forwards, backwards, send))
    return cases


def by_formula(cases: list[Case]) -> np.ndarray:
    schedule, pp, vpp, micro_batches, forward_s, backward_s, send_s = zip(*cases, strict=True)
    times = np.array(forward_s).T, np.array(backward_s).T
    return pipeline_step_s(np.array(schedule), pp, vpp, micro_batches, *times, send_s)


def by_simulation(case: Case) -> float:
    schedule = build(case.schedule, case.pp, case.vpp, case.micro_batches)
    forward_s = _stage_times(schedule.stages, case.forward_s)
    backward_s = _stage_times(schedule.stages, case.backward_s)
    return simulate(schedule, forward_s, backward_s, case.send_s).step_s


def _stage_times(stages: int, by_role: tuple[float, float, float]) -> list[float]:
    first, middle, last = by_role
    return [first, *[middle] * (stages - 2), last] if stages > 1 else [last]


def errors(cases: list[Case]) -> np.ndarray:
    return by_formula(cases) / [by_simulation(case) for case in cases] - 1


# Time


@pytest.mark.parametrize(
    ("pp", "micro_batches", "vpp", "idle"),
    [(8, 8, 1, 0.467), (8, 32, 1, 0.179), (8, 32, 4, 0.052), (4, 16, 2, 0.086), (8, 4, 1, 7 / 11)],
)
def test_the_idle_share_of_equal_stages_is_the_known_one_and_the_simulations(
    pp: int, micro_batches: int, vpp: int, idle: float
):
    step_s = pipeline_step_s("1f1b", pp, vpp, micro_batches, np.full(3, 1.0), np.full(3, 2.0))
    busy_s = micro_batches * vpp * 3.0
    assert 1 - busy_s / step_s == pytest.approx(idle, abs=5e-4)
    simulated = simulate(build("1f1b", pp, vpp, micro_batches), 1.0, 2.0)
    assert step_s == pytest.approx(simulated.step_s, rel=1e-12)
    assert simulated.bubble_fraction == pytest.approx(idle, abs=5e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_stages_are_exact_with_sends_up_to_half_a_chunks_time(interleaved: bool):
    cases = drawn_cases(150, "1f1b", interleaved, ends=(1.0, 1.0), most_send=1.0)
    assert errors([equal_stages(case) for case in cases]) == pytest.approx(0, abs=1e-9)


def test_gpipe_is_exact_for_any_stages():
    cases = drawn_cases(150, "gpipe", False, ends=(0.3, 3.0), most_send=2.0)
    assert errors(cases) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("ends", "most_send", "worst"), [((0.7, 1.6), 0.25, 0.02), ((0.5, 2.0), 0.3, 0.05)]
)
def test_uneven_ends_are_as_near_as_promised(
    interleaved: bool, ends: tuple[float, float], most_send: float, worst: float
):
    off = np.abs(errors(drawn_cases(300, "1f1b", interleaved, ends, most_send)))
    assert off.max() <= worst
    assert np.mean(off) <= 0.001


def test_the_slowest_rank_paces_a_long_step():
    times = (1.0, 1.0, 1.5), (2.0, 2.0, 3.0)
    step_s = pipeline_step_s("1f1b", 8, 1, 1000, *times)
    assert 1000 * 4.5 < step_s < 1000 * 4.5 + 8 * 4.5


def test_sends_show_where_nothing_hides_them_and_not_where_chunks_do():
    times = (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)

    def added(vpp: int) -> float:
        return float(
            pipeline_step_s("1f1b", 8, vpp, 256, *times, 0.2)
            - pipeline_step_s("1f1b", 8, vpp, 256, *times)
        )

    assert added(1) > 2 * 0.2 * 0.8 * 256  # two sends a boundary in nearly each micro-batch
    assert added(2) == pytest.approx(0.2 * (2 * 7 + 2 * 8))  # way in and out, through two chunks


def test_layouts_in_one_call_do_not_touch_each_other():
    cases = drawn_cases(20, "1f1b", False, (0.7, 1.6), 0.2)
    cases += drawn_cases(20, "1f1b", True, (0.7, 1.6), 0.2)
    cases += drawn_cases(20, "gpipe", False, (0.7, 1.6), 0.2)
    random.Random(1).shuffle(cases)
    alone = [by_formula([case])[0] for case in cases]
    assert by_formula(cases) == pytest.approx(alone, rel=1e-12)


# Backwards in two parts, and both ways; F = 1, whole backward B = 2, W its half for the weights


@pytest.mark.parametrize(
    ("schedule", "vpp", "idle_s"),
    [
        ("1f1b", 1, 7 * 3.0),
        ("bfs", 2, 7 * 3.0),
        ("zb-h1", 1, 7 * (1 + 1 - 1)),  # (pp - 1) (F + B_input - W)
        ("zb-v", 2, 7 * 1.0),  # the fill alone
        ("dualpipe", 1, 3 * (3 + 2 - 3)),  # (stages / 2 - 1) (F&B + B - 3 W)
        ("dualpipe-v", 2, 7 * (3 + 2 - 3)),
    ],
)
def test_schedules_idle_as_their_papers_say_and_as_their_tables_do(
    schedule: str, vpp: int, idle_s: float
):
    step_s = pipeline_step_s(schedule, 8, vpp, 32, [1.0] * 3, [2.0] * 3)
    assert step_s == pytest.approx(32 * vpp * 3.0 + idle_s)
    table = build(schedule, 8, vpp, 32)
    assert simulate(table, 1.0, 2.0, overlapped_s=3.0).step_s == pytest.approx(float(step_s))


@given(
    schedules(("bfs", *SPLIT)),
    st.floats(0.5, 1.6),
    st.floats(0.5, 1.6),
    st.floats(0.0, 0.02),
)
def test_equal_stages_are_timed_as_their_tables_are(
    schedule: Schedule, of_input: float, weight: float, send: float
):
    """Exactly where there are no messages, but for a V with too few micro-batches to fill it."""
    assume(schedule.name != "zb-v" or schedule.micro_batches >= 2 * schedule.pp - 1)
    numbers = schedule.name, schedule.pp, schedule.vpp, schedule.micro_batches

    def both(send_s: float) -> tuple[float, float]:
        times = [1.0] * 3, [of_input + weight] * 3
        formula = pipeline_step_s(*numbers, *times, send_s, weight_s=[weight] * 3)
        whole = of_input + weight
        table = simulate(schedule, 1.0, whole, send_s, weight_s=weight, overlapped_s=1.0 + whole)
        return float(formula), table.step_s

    formula_s, table_s = both(0.0)
    assert formula_s == pytest.approx(table_s, rel=1e-9)
    formula_s, table_s = both(send)
    assert formula_s == pytest.approx(table_s, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "vpp", "worst"),
    [("zb-h1", 1, 0.09), ("zb-v", 2, 0.09), ("dualpipe", 1, 0.13), ("dualpipe-v", 2, 0.14)],
)
def test_uneven_ends_are_timed_at_the_pace_of_the_slowest_rank(
    schedule: str, vpp: int, worst: float
):
    chance = random.Random(0)
    off = []
    for _ in range(100):
        pp = 2 * chance.randint(1, 6)
        micro_batches = 2 * chance.randint(pp, 3 * pp)
        first, last = (chance.uniform(0.7, 1.6) for _ in range(2))
        table = build(schedule, pp, vpp, micro_batches)
        forward = _stage_times(table.stages, (first, 1.0, last))
        backward, both = [2 * f for f in forward], [3 * f for f in forward]
        step_s = simulate(table, forward, backward, overlapped_s=both).step_s
        by_role = np.array([first, 1.0, last])
        formula = pipeline_step_s(schedule, pp, vpp, micro_batches, by_role, 2 * by_role)
        off.append(float(formula) / step_s - 1)
    assert min(off) > -0.06 and max(off) < worst


def test_weight_gradients_fill_the_zero_bubble_schedule():
    times = [1.0] * 3, [2.0] * 3

    def bubble(weight: float) -> float:
        step_s = pipeline_step_s("zb-h1", 8, 1, 32, *times, weight_s=[weight] * 3)
        return float(step_s) - 32 * 3.0

    assert bubble(0.25) == pytest.approx(7 * (1 + 1.75 - 0.25))
    assert bubble(0.25) > bubble(0.75) > bubble(1.0) == pytest.approx(7.0)


def test_overlapping_forwards_with_backwards_shortens_dualpipe():
    times = [1.0] * 3, [2.0] * 3
    apart = pipeline_step_s("dualpipe", 8, 1, 32, *times)
    beside = pipeline_step_s("dualpipe", 8, 1, 32, *times, overlapped_s=[2.5] * 3)
    alone = 3 * 8 // 2 - 1  # micro-batches of the outermost rank that find no partner
    assert apart - beside == pytest.approx((32 - alone + 3) * 0.5)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match=r"no formula for a schedule among .*'2f2b'"):
        pipeline_step_s(np.array(["1f1b", "2f2b"]), 4, 1, 8, [1.0] * 3, [2.0] * 3)


# Activations


@given(schedules())
def test_what_is_in_flight_is_what_the_simulation_holds(schedule: Schedule):
    numbers = schedule.name, schedule.pp, schedule.vpp, schedule.micro_batches
    held = in_flight(*numbers, np.arange(schedule.pp))
    simulated = simulate(schedule, 1.0, 2.0).peak_in_flight
    if schedule.name == "zb-v" and schedule.micro_batches < 2 * schedule.pp - 1:
        assert np.all(held >= simulated)  # too few micro-batches to fill it
    else:
        assert tuple(held) == simulated


def test_more_micro_batches_hold_no_more_in_1f1b_and_all_of_them_in_gpipe():
    micro_batches = np.array([2, 4, 8, 16])
    assert list(in_flight("1f1b", 2, 1, micro_batches, 0)) == [2, 2, 2, 2]
    assert list(in_flight("1f1b", 2, 1, micro_batches, 1)) == [1, 1, 1, 1]
    assert list(in_flight("gpipe", 2, 1, micro_batches, 0)) == [2, 4, 8, 16]


@pytest.mark.parametrize(
    ("schedule", "vpp", "chunks"),
    [("zb-h1", 1, 8), ("zb-v", 2, 16), ("dualpipe", 1, 9), ("dualpipe-v", 2, 17)],
)
def test_schedules_with_later_weight_gradients_hold_what_their_papers_say(
    schedule: str, vpp: int, chunks: int
):
    assert set(in_flight(schedule, 8, vpp, 64, np.arange(8))) == {chunks}
    assert set(in_flight(schedule, 8, vpp, 2, np.arange(8))) == {2 * vpp}


# What can run is known before anything runs


@pytest.mark.parametrize("micro_batches", [3, 6])
def test_interleaving_is_refused_at_plan_time_without_full_groups(micro_batches: int):
    with pytest.raises(UserError, match=f"multiple of pp 4, not {micro_batches}: .*4 and 8"):
        check("1f1b", 4, 2, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2)])
def test_any_number_of_micro_batches_finishes_or_is_refused(
    schedule: str, vpp: int, micro_batches: int
):
    if vpp > 1 and micro_batches % 4:
        with pytest.raises(UserError):
            build(schedule, 4, vpp, micro_batches)
        return
    validate(build(schedule, 4, vpp, micro_batches))
    ideal_s = vpp * micro_batches * 3.0
    step_s = pipeline_step_s(schedule, 4, vpp, micro_batches, [1.0] * 3, [2.0] * 3)
    assert step_s == pytest.approx(ideal_s + 3 * 3.0)


def test_many_layouts_of_all_schedules_are_timed_at_once():
    number = 100_000
    names = np.resize([*SCHEDULES, *PLANNED_SCHEDULES], number)
    two_chunks = np.isin(names, ["zb-v", "dualpipe-v", "bfs"])
    times = np.random.default_rng(0).uniform(0.5, 1.5, (3, number))
    step_s = pipeline_step_s(names, 8, 1 + two_chunks, 64, times, 2 * times, 0.1)
    assert np.all(step_s > 64 * 3 * times.min(axis=0))
