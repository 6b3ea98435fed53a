from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from fivefold.cluster.load import load_cluster
from fivefold.layout.notation import parse
from fivefold.model.huggingface.presets import load_preset
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import estimate
from fivefold.plan.timeline import planned_step
from fivefold.report import timeline
from fivefold.report.timeline import Rank, Slice, check_writer, of_plan, of_run, save
from fivefold.step_trace import Message, StepTrace, Work
from tests.helpers import refusal


class Shown(NamedTuple):
    """A slice of a file, with its place: (process, track)."""

    place: tuple[str, str]
    name: str
    start_ns: int
    end_ns: int
    depth: int
    flows: tuple[int, ...]
    facts: dict[str, Any]


def read(path: Path) -> list[Shown]:
    """The slices of a file. Fails if begins and ends are not balanced and in order on a track."""
    trace = Trace.FromString(path.read_bytes())
    names: dict[int, tuple[str, str]] = {}
    opened: dict[int, list] = defaultdict(list)
    shown = []
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            parent = names.get(track.parent_uuid, ("", ""))[0]
            names[track.uuid] = (parent or track.process.process_name, track.name)
            continue
        event, stack = packet.track_event, opened[packet.track_event.track_uuid]
        if event.type == event.TYPE_SLICE_BEGIN:
            if stack:
                assert packet.timestamp >= stack[-1][1], "a slice begins before its parent"
            stack.append((event, packet.timestamp))
        else:
            begun, start_ns = stack.pop()
            assert start_ns <= packet.timestamp
            facts = {a.name: a.string_value or a.int_value for a in begun.debug_annotations}
            flows = tuple(begun.flow_ids)
            place = names[begun.track_uuid]
            shown.append(
                Shown(place, begun.name, start_ns, packet.timestamp, len(stack), flows, facts)
            )
    assert not any(opened.values()), "a slice has no end"
    return shown


def of(shown: list[Shown], process: str, track: str) -> list[tuple[str, int, int]]:
    """Names and milliseconds of one track, by their start."""
    own = [s for s in shown if s.place == (process, track)]
    own.sort(key=lambda s: (s.start_ns, -s.end_ns))
    return [(s.name, s.start_ns // 10**6, s.end_ns // 10**6) for s in own]


# --- the file -----------------------------------------------------------------------------------


def test_slices_that_only_overlap_are_on_tracks_of_one_name(tmp_path: Path) -> None:
    rank = Rank("rank 0")
    rank.tracks["dp messages"] += [
        Slice("a", 0.0, 0.4),
        Slice("b", 0.2, 0.6),
        Slice("c", 0.3, 0.4),
        Slice("d", 0.4, 0.5),
    ]
    save([rank], tmp_path / "t.pftrace")
    shown = read(tmp_path / "t.pftrace")
    assert of(shown, "rank 0", "dp messages") == [
        ("a", 0, 400),
        ("b", 200, 600),
        ("c", 300, 400),
        ("d", 400, 500),
    ]
    assert {s.name: s.depth for s in shown} == {"a": 0, "b": 0, "c": 1, "d": 0}


def test_a_file_that_cannot_be_written_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writer(str(tmp_path / "t.pftrace"))
    assert "there is no folder" in refusal(check_writer, str(tmp_path / "none" / "t.pftrace"))
    monkeypatch.setattr(timeline, "find_spec", lambda name: None)
    assert "pip install perfetto" in refusal(check_writer, "t.pftrace")
    (tmp_path / "folder").mkdir()
    assert "cannot be written" in refusal(save, [], tmp_path / "folder")


# --- a run --------------------------------------------------------------------------------------


def message(split: str, op: str, ranks: tuple[int, ...], start: float, *waited: float) -> Message:
    wait_start_s, end_s = waited or (None, None)
    size = 0 if op == "receive" else 4096
    return Message(split, "forward", op, len(ranks), size, split, ranks, start, wait_start_s, end_s)


def test_work_waits_and_messages_of_all_ranks_are_on_one_time_line(tmp_path: Path) -> None:
    first = StepTrace(10.0, 11.0, [Work("F of stage 0, micro-batch 0", 10.1, 10.5)])
    first.messages += [
        message("tp", "all_reduce", (0, 2), 10.1, 10.2, 10.3),
        message("pp", "send", (0, 1), 10.5),
    ]
    second = StepTrace(10.1, 11.1, [Work("F of stage 1, micro-batch 0", 10.6, 11.0)])
    second.messages.append(message("pp", "receive", (0, 1), 10.1, 10.6, 10.7))
    save(of_run(["rank 0: pp0", "rank 1: pp1"], [[first], [second]], 5), tmp_path / "t.pftrace")
    shown = read(tmp_path / "t.pftrace")
    assert of(shown, "rank 0: pp0", "compute") == [
        ("step 5", 0, 1000),
        ("F of stage 0, micro-batch 0", 100, 500),
        ("wait: tp all_reduce", 200, 300),
    ]
    assert of(shown, "rank 0: pp0", "tp messages") == [("tp all_reduce", 100, 300)]
    assert of(shown, "rank 1: pp1", "compute") == [
        ("step 5", 100, 1100),
        ("F of stage 1, micro-batch 0", 600, 1000),
        ("wait: pp receive", 600, 700),
    ]
    # The message that nobody looked at again is shown to the end of the step; an arrow leads from
    # it to where it is received.
    assert of(shown, "rank 0: pp0", "pp messages") == [("pp send", 500, 1000)]
    assert of(shown, "rank 1: pp1", "pp messages") == [("pp receive", 100, 700)]
    joined = {s.name: s.flows for s in shown if s.flows}
    assert joined.keys() == {"pp send", "pp receive"}
    assert joined["pp send"] == joined["pp receive"]
    [reduced] = [s for s in shown if s.name == "tp all_reduce"]
    assert reduced.facts == {
        "phase": "forward",
        "axis": "tp",
        "payload": "4.10 KB",
        "payload_bytes": 4096,
        "group_size": 2,
        "ranks": "0 2",
    }


# --- a plan -------------------------------------------------------------------------------------


def job(gpus: int) -> Job:
    cluster = load_cluster("dgx-h100", gpus)
    return Job(load_preset("llama-3.1-8b"), cluster, 4096, 32, "bf16", ENGINES["megatron"])


@pytest.mark.parametrize("text", ["tp2 sp pp4 dp2 zero1 ga16", "pp4 vpp2 tp4 ga32", "tp2 dp8 ga4"])
def test_a_plan_has_the_actions_of_its_schedule_and_ends_with_its_step(
    text: str, tmp_path: Path
) -> None:
    layout = parse(text)
    own = job(layout.world_size)
    step, made = planned_step(own, layout), estimate(own, layout)
    save(of_plan(step), tmp_path / "t.pftrace")
    shown = read(tmp_path / "t.pftrace")
    actions = [s.name for s in shown if "micro-batch" in s.name]
    assert len(actions) == len(set(actions)) == 2 * layout.stages * layout.accumulation
    flows = defaultdict(list)
    for s in shown:
        for flow in s.flows:
            flows[flow].append(s)
    assert len(flows) == 2 * (layout.stages - 1) * layout.accumulation
    for sent, received in flows.values():
        assert {sent.name, received.name} == {"pp send", "pp receive"}
        assert sent.place[0] != received.place[0] and sent.start_ns == received.start_ns
    # What is left is what a step takes besides: data, loss, stragglers.
    last_s = max(s.end_ns for s in shown) / 1e9
    assert last_s == pytest.approx(made.step_time_s - made.seconds["other"], rel=0.02)
    for rank in range(layout.pp):
        names = [name for name, *_ in of(shown, f"pipeline rank {rank}", "compute")]
        assert names[-1] == "optimizer"
        dp = [name for name in names if name.startswith("wait: dp")]
        assert bool(dp) == (layout.dp > 1)
