"""A machine whose devices are processes on the cores of a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster.cpu import Cpu, Pass
from fivefold.errors import UserError
from fivefold.schema import validate
from tests.helpers import refusal

PASS = {
    "matmul_flop": 1e-11,
    "matmul_byte": 2e-10,
    "attention_flop": 3e-11,
    "elementwise_byte": 4e-11,
    "operation": 5e-6,
}
CPU = {
    "cores": 2,
    "forward": PASS,
    "backward": {name: 2 * value for name, value in PASS.items()},
    "copy_byte": 1e-11,
    "optimizer_element": 2e-9,
    "step": 2e-3,
    "calls": {"tp": {"busy_s": 1e-4, "wait_s": 2e-4}},
    "overhead": {"alone": {"bytes": 5e7, "share": 0.1}},
    "slowdown": {2: 1.0, 4: 1.2},
    "messages": [
        {"op": "all_reduce", "ranks": 2, "bytes": 1000, "busy_s": 1e-4, "wait_s": 5e-5},
        {"op": "all_reduce", "ranks": 2, "bytes": 3000, "busy_s": 3e-4, "wait_s": 5e-5},
        {"op": "all_reduce", "ranks": 4, "bytes": 1000, "busy_s": 3e-4, "wait_s": 9e-5},
        {"op": "all_reduce", "ranks": 4, "bytes": 3000, "busy_s": 5e-4, "wait_s": 9e-5},
    ],
}


def cpu(**changes: object) -> Cpu:
    return validate(Cpu, {**CPU, **changes}, "cpu")


def test_among_more_processes_all_that_is_busy_takes_longer_and_waits_do_not():
    alone = cpu()
    assert alone.among(1) == alone.among(2) == alone  # as with the fewest that were measured
    among = alone.among(3)
    assert among.forward.matmul_flop == pytest.approx(1.1 * alone.forward.matmul_flop)
    assert among.backward.operation == pytest.approx(1.1 * alone.backward.operation)
    assert (among.step, among.copy_byte) == pytest.approx((1.1 * alone.step, 1.1 * alone.copy_byte))
    call = among.calls["tp"]
    assert (call.busy_s, call.wait_s) == pytest.approx((1.1e-4, 2e-4))
    assert alone.among(100) == alone.among(4)
    assert alone.among(4).step == pytest.approx(2.4e-3)
    unmeasured = cpu(slowdown={})
    assert unmeasured.among(8) == unmeasured


def test_a_pass_adds_up_the_seconds_of_its_work():
    work = np.array([[1e9, 2e9], [1e6, 0.0], [1e8, 0.0], [1e6, 0.0], [10.0, 0.0]])
    expected = 1e9 * 1e-11 + 1e6 * 2e-10 + 1e8 * 3e-11 + 1e6 * 4e-11 + 10 * 5e-6
    assert Pass(**PASS).seconds(work) == pytest.approx([expected, 0.02])


def test_messages_between_measured_sizes_and_groups_are_interpolated():
    found = cpu().message_s("all_reduce", [2, 2, 3], [1000, 2000, 1000])
    assert found.busy == pytest.approx([1e-4, 2e-4, 2e-4])
    assert found.wait == pytest.approx([5e-5, 5e-5, 7e-5])


def test_messages_beyond_the_largest_go_on_in_proportion_and_groups_do_not():
    found = cpu().message_s("all_reduce", [2, 16], [6000, 3000])
    assert found.busy == pytest.approx([6e-4, 5e-4])


def test_a_group_of_one_sends_nothing():
    found = cpu().message_s("all_reduce", 1, 1000)
    assert found.busy.tolist() == found.wait.tolist() == [0.0]


def test_a_message_that_was_not_measured_is_named():
    with pytest.raises(UserError, match="no message send"):
        cpu().message_s("send", 2, 1000)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"forward": {}}, "forward.matmul_flop is missing"),
        ({"forward": PASS | {"light": 1}}, "unknown key forward.light; known here: matmul_flop"),
        ({"calls": {"tpp": {"busy_s": 0, "wait_s": 0}}}, "calls must be 'zero', 'tp'"),
        ({"overhead": {"alone": {"bytes": -1, "share": 0}}}, "overhead must be 0 or more"),
        ({"slowdown": {2: 0.0}}, "slowdown.2 must be more than 0"),
        ({"slowdown": {"two": 1.0}}, "slowdown must be a whole number"),
        ({"backward": dict.fromkeys(PASS, 0.0)}, "backward: a pass takes no time: measure it ag"),
    ],
)
def test_what_was_measured_is_refused_where_it_is_wrong(changes, sentence):
    assert sentence in refusal(cpu, **changes)
