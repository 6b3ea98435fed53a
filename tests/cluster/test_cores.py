"""A machine whose devices are processes on the cores of a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster.cores import (
    Core,
    MessageSeconds,
    Pass,
    ProcessOverhead,
    check_messages,
    core_of,
    message_s,
)
from fivefold.errors import UserError

PASS = {
    "product_flop": 1e-11,
    "product_byte": 2e-10,
    "attention_flop": 3e-11,
    "light_byte": 4e-11,
    "operation": 5e-6,
}
REST = {"copy_byte": 1e-11, "optimizer_element": 2e-9, "step": 2e-3}
OPERATIONS = [
    {"what": "forward", **PASS},
    {"what": "backward", **{name: 2 * value for name, value in PASS.items()}},
    {"what": "rest", **REST},
    {"what": "call", "kind": "tp", "busy_s": 1e-4, "wait_s": 2e-4},
    {"what": "resident", "kind": "alone", "bytes": 5e7, "share": 0.1},
    {"what": "pace", "processes": 2, "factor": 1.0},
    {"what": "pace", "processes": 4, "factor": 1.2},
]
MESSAGES = [
    {"op": "all_reduce", "ranks": 2, "bytes": 1000, "busy_s": 1e-4, "wait_s": 5e-5},
    {"op": "all_reduce", "ranks": 2, "bytes": 3000, "busy_s": 3e-4, "wait_s": 5e-5},
    {"op": "all_reduce", "ranks": 4, "bytes": 1000, "busy_s": 3e-4, "wait_s": 9e-5},
    {"op": "all_reduce", "ranks": 4, "bytes": 3000, "busy_s": 5e-4, "wait_s": 9e-5},
]


def test_a_core_is_read_from_the_operations_of_a_file():
    core = core_of(OPERATIONS, "here")
    assert core == Core(
        Pass(**PASS),
        Pass(*(2 * v for v in PASS.values())),
        **REST,
        calls={"tp": MessageSeconds(1e-4, 2e-4)},
        resident={"alone": ProcessOverhead(5e7, 0.1)},
        paces={2: 1.0, 4: 1.2},
    )


def test_among_more_processes_all_that_is_busy_takes_longer_and_waits_do_not():
    core = core_of(OPERATIONS, "here")
    assert core.among(1) == core.among(2) == core  # as with the fewest that were measured
    among = core.among(3)
    assert among.forward.product_flop == pytest.approx(1.1 * core.forward.product_flop)
    assert among.backward.operation == pytest.approx(1.1 * core.backward.operation)
    assert (among.step, among.copy_byte) == pytest.approx((1.1 * core.step, 1.1 * core.copy_byte))
    assert (among.calls["tp"].busy, among.calls["tp"].wait) == pytest.approx((1.1e-4, 2e-4))
    assert core.among(100) == core.among(4) and core.among(4).step == pytest.approx(2.4e-3)
    unmeasured = core_of([r for r in OPERATIONS if r["what"] != "pace"], "here")
    assert unmeasured.among(8) == unmeasured


def test_a_pass_adds_up_the_seconds_of_its_work():
    work = np.array([[1e9, 2e9], [1e6, 0.0], [1e8, 0.0], [1e6, 0.0], [10.0, 0.0]])
    expected = 1e9 * 1e-11 + 1e6 * 2e-10 + 1e8 * 3e-11 + 1e6 * 4e-11 + 10 * 5e-6
    assert Pass(**PASS).seconds(work) == pytest.approx([expected, 0.02])


def test_a_part_that_was_not_measured_is_named():
    without = [dict(OPERATIONS[0]), OPERATIONS[1], OPERATIONS[2]]
    del without[0]["light_byte"]
    with pytest.raises(UserError, match="here has cores but no light_byte of 'forward'"):
        core_of(without, "here")


def test_messages_between_measured_sizes_and_groups_are_interpolated():
    found = message_s(MESSAGES, "all_reduce", [2, 2, 3], [1000, 2000, 1000])
    assert found.busy == pytest.approx([1e-4, 2e-4, 2e-4])
    assert found.wait == pytest.approx([5e-5, 5e-5, 7e-5])


def test_messages_beyond_the_largest_go_on_in_proportion_and_groups_do_not():
    found = message_s(MESSAGES, "all_reduce", [2, 16], [6000, 3000])
    assert found.busy == pytest.approx([6e-4, 5e-4])


def test_a_group_of_one_sends_nothing():
    found = message_s(MESSAGES, "all_reduce", 1, 1000)
    assert found.busy.tolist() == found.wait.tolist() == [0.0]


def test_a_message_that_was_not_measured_is_named():
    with pytest.raises(UserError, match="no message send"):
        message_s(MESSAGES, "send", 2, 1000)


def test_what_is_not_known_is_refused_by_its_name():
    with pytest.raises(UserError, match="here has operations whose what is 'pase': known are for"):
        core_of([*OPERATIONS, {"what": "pase"}], "here")
    with pytest.raises(UserError, match="here has operations whose kind is 'tpp': known are zero"):
        core_of([*OPERATIONS, {"what": "call", "kind": "tpp"}], "here")
    with pytest.raises(UserError, match="'busy' of a message all_reduce, which is not known"):
        check_messages([{**MESSAGES[0], "busy": 1.0}], "here")


def test_a_machine_that_takes_no_time_is_refused():
    nothing = {"what": "backward", **dict.fromkeys(PASS, 0.0)}
    with pytest.raises(UserError, match="here has cores on which a backward pass takes no time"):
        core_of([OPERATIONS[0], nothing, OPERATIONS[2]], "here")
    with pytest.raises(UserError, match="here has a pace whose factor is 0"):
        core_of([*OPERATIONS, {"what": "pace", "processes": 8, "factor": 0}], "here")
