from __future__ import annotations

import pytest

from fivefold.parallel.comm import Axis, Pending, Recorder
from fivefold.parallel.pipeline.schedules import Action
from fivefold.step_trace import PARTS, Message, StepTrace, Work, seconds


def message(split: str, op: str, wait_start_s: float | None, end_s: float | None) -> Message:
    return Message(split, "forward", op, 2, 8, split, (0, 1), 0.0, wait_start_s, end_s)


def parts(step_s: float, work: list[Work], messages: list[Message]) -> dict[str, float]:
    """Where a step of `step_s` seconds went: what is not zero."""
    found = seconds(StepTrace(0.0, step_s, work, messages))
    assert sum(found.values()) == pytest.approx(step_s)
    assert set(found) == set(PARTS)
    return {part: value for part, value in found.items() if abs(value) > 1e-12}


def test_what_is_not_waited_for_nor_named_is_compute() -> None:
    assert parts(2.0, [], []) == {"compute": 2.0}
    assert parts(2.0, [Work("F of stage 0, micro-batch 0", 0.0, 1.0)], []) == {"compute": 2.0}


def test_only_the_wait_of_a_message_is_exposed() -> None:
    hidden = message("dp", "all_reduce", wait_start_s=1.5, end_s=1.5)
    assert parts(2.0, [], [hidden]) == {"compute": 2.0}
    assert parts(2.0, [], [message("dp", "all_reduce", 1.0, 1.5)]) == {"compute": 1.5, "dp": 0.5}
    assert parts(2.0, [], [message("pp", "send", None, 1.5)]) == {"compute": 2.0}


def test_a_wait_inside_the_optimizer_is_counted_once() -> None:
    work = [Work("data", 0.0, 0.25), Work("optimizer", 1.0, 2.0)]
    found = parts(2.0, work, [message("dp", "all_reduce", 1.0, 1.5)])
    assert found == {"compute": 0.75, "data": 0.25, "optimizer": 0.5, "dp": 0.5}


def test_in_a_pipeline_waiting_for_a_stage_or_for_the_last_rank_is_bubble() -> None:
    received = message("pp", "receive", 0.0, 0.5)
    last = message("world", "all_reduce", 1.0, 1.25)
    assert parts(2.0, [], [received, last]) == {"compute": 1.25, "bubble": 0.75}
    assert parts(2.0, [], [last]) == {"compute": 1.75, "world": 0.25}
    tied = message("pp", "all_reduce", 1.0, 1.25)
    assert parts(2.0, [], [tied]) == {"compute": 1.75, "pp": 0.25}


def test_a_message_is_noted_when_it_is_issued_and_when_it_is_waited_for() -> None:
    recorder = Recorder(phase="backward")
    axis = Axis("ring", "cp", (4, 6), 0, None, recorder)
    sent = recorder.record(axis, "send", 32)
    assert recorder.step_trace.messages == [sent]
    assert (sent.split, sent.phase, sent.op, sent.group_size) == ("cp", "backward", "send", 2)
    assert (sent.payload_bytes, sent.axis, sent.ranks) == (32, "ring", (4, 6))
    assert (sent.wait_start_s, sent.end_s, sent.exposed_s) == (None, None, 0.0)
    Pending([], lambda: None, sent).wait()  # pyright: ignore[reportArgumentType]
    assert sent.wait_start_s is not None and sent.end_s is not None
    assert sent.start_s <= sent.wait_start_s <= sent.end_s


def test_a_message_that_has_gone_by_itself_was_never_waited_for() -> None:
    recorder = Recorder()
    sent = recorder.record(Axis("pp forward", "pp", (0, 1), 0, None, recorder), "send", 32)
    assert Pending([], lambda: None, sent).is_done()  # pyright: ignore[reportArgumentType]
    assert sent.wait_start_s is None and sent.end_s is not None and sent.exposed_s == 0.0


def test_work_has_the_name_of_what_was_done() -> None:
    trace = StepTrace()
    with trace.doing(Action("F", 1, 3)):
        inside = StepTrace().start_s
    [work] = trace.work
    assert work.name == "F of stage 1, micro-batch 3"
    assert trace.start_s <= work.start_s <= inside <= work.end_s
