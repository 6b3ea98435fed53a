from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.stages import rank_stages, stage_ranks
from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.table import Schedule
from tests.parallel.pipeline.drawn import row, schedules


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


# Split backwards, and both ways


def test_zb_h1_lags_its_weight_gradients_behind_by_its_rank():
    assert build("zb-h1", 2, 1, 3).table == (
        row("F00 F01 I00 W00 F02 I01 W01 I02 W02"),
        row("F10 I10 F11 I11 W10 F12 I12 W11 W12"),
    )


def test_breadth_first_runs_a_chunk_for_all_micro_batches_before_the_next():
    assert build("bfs", 2, 2, 3).table == (
        row("F00 F01 F02 F20 F21 F22 B20 B21 B22 B00 B01 B02"),
        row("F10 F11 F12 F30 F31 F32 B30 B31 B32 B10 B11 B12"),
    )


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_v_has_its_first_and_last_stage_on_the_first_rank(name: str):
    schedule = build(name, 4, 2, 8)
    assert [schedule.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_dualpipe_sends_half_of_the_micro_batches_in_from_the_last_rank():
    schedule = build("dualpipe", 4, 1, 8)
    assert [schedule.rank_of(stage, 3) for stage in range(4)] == [0, 1, 2, 3]
    assert [schedule.rank_of(stage, 4) for stage in range(4)] == [3, 2, 1, 0]
    firsts = [actions[0] for actions in schedule.table]
    assert [(a.stage, a.micro_batch) for a in firsts] == [(0, 0), (1, 0), (1, 4), (0, 4)]


@pytest.mark.parametrize("pp", [4, 8])
def test_each_half_of_dualpipe_is_a_dualpipe_v_of_half_the_ranks(pp: int):
    whole, folded = build("dualpipe", pp, 1, 4 * pp), build("dualpipe-v", pp // 2, 2, 2 * pp)
    for rank, actions in enumerate(folded.table):
        kinds = [(kind, stage) for kind, stage, _ in actions]
        for here in (rank, pp - 1 - rank):
            assert [(kind, stage) for kind, stage, _ in whole.table[here]] == kinds
            assert whole.pairs[here] == folded.pairs[rank]


@given(schedules(("dualpipe", "dualpipe-v")))
def test_a_forward_is_paired_with_the_backward_of_another_stage(schedule: Schedule):
    for actions, pairs in zip(schedule.table, schedule.pairs, strict=True):
        for place in pairs:
            forward, backward = actions[place : place + 2]
            assert (forward.kind, backward.kind) == ("F", "B")
            assert forward.micro_batch != backward.micro_batch


@given(schedules())
def test_stages_lie_where_the_layout_says(schedule: Schedule):
    layout = Layout(
        schedule=schedule.name,
        pp=schedule.pp,
        vpp=schedule.vpp,
        accumulation=schedule.micro_batches,
    )
    for rank, actions in enumerate(schedule.table):
        assert {action.stage for action in actions} == set(rank_stages(layout, rank))
    assert stage_ranks(layout) == [schedule.rank_of(stage) for stage in range(schedule.stages)]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8])
def test_too_few_micro_batches_to_fill_a_zero_bubble_schedule_run(name: str, micro_batches: int):
    validate(build(name, 4, 1 + (name == "zb-v"), micro_batches))


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


def test_schedules_and_splits_need_no_torch():
    code = (
        "import sys, fivefold.report.schedule_drawing, fivefold.parallel.pipeline.schedules;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
