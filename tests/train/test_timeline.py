from __future__ import annotations

import pytest

from fivefold.step_trace import Message, StepTrace, Work
from fivefold.train.timeline import clock_shifts, shifted


def test_processes_of_one_machine_have_one_clock() -> None:
    """However late one of them leaves a barrier."""
    assert clock_shifts(["a", "a"], [[1.0, 2.0], [1.5, 2.1]]) == [0.0, 0.0]


def test_the_clock_of_another_machine_is_told_by_what_its_ranks_read_at_barriers() -> None:
    """Half of them came out of one barrier 50 ms late."""
    here = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    there = [[101.0, 102.05, 103.0], [101.0, 102.05, 103.0]]
    shifts = clock_shifts(["a", "a", "b", "b"], here + there)
    assert shifts[:2] == [0.0, 0.0]
    assert shifts[2:] == [pytest.approx(100.0)] * 2


def test_what_was_done_is_moved_as_a_whole() -> None:
    message = Message("dp", "backward", "all_reduce", 2, 8, "dp", (0, 1), 101.0, 102.0, None)
    moved = shifted(StepTrace(100.0, 105.0, [Work("data", 100.0, 101.0)], [message]), 100.0)
    assert (moved.start_s, moved.end_s) == (0.0, 5.0)
    assert moved.work == [Work("data", 0.0, 1.0)]
    assert [(m.start_s, m.wait_start_s, m.end_s) for m in moved.messages] == [(1.0, 2.0, None)]
