"""PyTorch's own schedules as a second opinion, built without processes (private, torch 2.13)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from fivefold.layout.actions import Action
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.table import Schedule
from fivefold.parallel.pipeline.table_file import read_table


def torch_rows(kind: Any, pp: int, chunks: int, micro_batches: int) -> list[list[Any]]:
    """By rank torch's actions, with its pauses left out."""
    rows = []
    for rank in range(pp):
        made = kind.__new__(kind)
        made.pp_group_size, made._n_microbatches, made.rank = pp, micro_batches, rank
        made.n_local_stages, made.num_stages, made._stages = chunks, pp * chunks, [None] * chunks
        made.number_of_rounds = max(1, micro_batches // pp)
        made.microbatches_per_round = micro_batches // made.number_of_rounds
        actions = made._calculate_single_rank_operations(rank)
        rows.append([action for action in actions if action is not None])
    return rows


def read(action: Any) -> list[Action]:
    """Our actions for one of torch's."""
    if action.sub_actions:
        return [each for sub in action.sub_actions for each in read(sub)]
    kind = action.computation_type.value
    return [Action(kind, action.stage_index, action.microbatch_index)]


def as_table(rows: list[list[Any]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(ours for action in row for ours in read(action)) for row in rows)


@pytest.mark.parametrize("micro_batches", [3, 8, 20])
@pytest.mark.parametrize("pp", [2, 4])
def test_zb_v_is_torchs(pp: int, micro_batches: int):
    rows = torch_rows(theirs.ScheduleZBVZeroBubble, pp, 2, micro_batches)
    assert build("zb-v", pp, 2, micro_batches).table == as_table(rows)


@pytest.mark.parametrize("micro_batches", [8, 20])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_dualpipe_v_is_torchs_with_its_pairs(pp: int, micro_batches: int):
    rows = torch_rows(theirs.ScheduleDualPipeV, pp, 2, micro_batches)
    ours = build("dualpipe-v", pp, 2, micro_batches)
    assert ours.table == as_table(rows)
    paired = [sum(action.sub_actions is not None for action in row) for row in rows]
    assert [len(pairs) for pairs in ours.pairs] == paired


@pytest.mark.parametrize("micro_batches", [4, 8, 12])
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank(micro_batches: int):
    rows = torch_rows(theirs.ScheduleInterleavedZeroBubble, 4, 1, micro_batches)
    assert build("zb-h1", 4, 1, micro_batches).table == as_table(rows)


@pytest.mark.parametrize("micro_batches", [4, 8, 12])
def test_interleaved_1f1b_is_torchs(micro_batches: int):
    rows = torch_rows(theirs.ScheduleInterleaved1F1B, 4, 3, micro_batches)
    assert build("1f1b", 4, 3, micro_batches).table == as_table(rows)


def test_breadth_first_is_torchs_but_for_the_order_of_its_backwards():
    # Ours run in the order of the micro-batches in every schedule, so that sums are the same.
    rows = as_table(torch_rows(theirs.ScheduleLoopedBFS, 4, 3, 6))
    turned = tuple(
        tuple(
            action._replace(micro_batch=5 - action.micro_batch) if action.kind == "B" else action
            for action in row
        )
        for row in rows
    )
    assert build("bfs", 4, 3, 6).table == turned


FILES = [
    build("zb-v", 3, 2, 5),
    build("dualpipe-v", 2, 2, 6),
    build("1f1b", 2, 2, 4),
    build("zb-h1", 4, 1, 4),
]


@pytest.mark.parametrize("schedule", FILES, ids=lambda schedule: schedule.name)
def test_torch_reads_our_file_and_we_read_torchs(schedule: Schedule, tmp_path: Path):
    path = tmp_path / "table.csv"
    path.write_text(schedule.text())
    with path.open(newline="") as file:
        cells = list(csv.reader(file))
    read_by_torch = [[theirs._Action.from_str(cell) for cell in row] for row in cells]
    assert as_table(read_by_torch) == schedule.table
    order = dict(enumerate(read_by_torch))
    found = theirs._validate_schedule(order, schedule.pp, schedule.stages, schedule.micro_batches)
    assert found == {stage: schedule.rank_of(stage) for stage in range(schedule.stages)}

    path = tmp_path / "theirs.csv"
    with path.open("w", newline="") as file:  # as PipelineScheduleMulti._dump_csv writes
        for row in read_by_torch:
            csv.writer(file).writerow([None, *row, None])
    again = read_table(str(path))
    assert (again.rows, again.pairs) == (schedule.table, schedule.pairs)
    assert (again.pp, again.vpp) == (schedule.pp, schedule.vpp)
    assert (again.placement, again.micro_batches) == (schedule.placement, schedule.micro_batches)
