"""A timeline in a file for https://ui.perfetto.dev: what each rank does and sends, side by side.

The same names and tracks for a run (what was recorded) and for a plan (what is simulated), so that
the two can be looked at beside each other. Times in the file are nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError
from fivefold.files import atomic_write
from fivefold.layout.actions import Action
from fivefold.ledger import SPLITS
from fivefold.parallel.pipeline.table import Schedule
from fivefold.report.text import format_bytes
from fivefold.step_trace import Message, StepTrace, is_between_stages

if TYPE_CHECKING:
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    from fivefold.plan.timeline import Afterwards, PlannedStep

Fact = str | int | float

COMPUTE = "compute"
"""The track of what a rank does; each split has one of its messages."""


@dataclass
class Slice:
    """Something on a track from start to end; slices of one track may lie within each other."""

    name: str
    start_s: float
    end_s: float
    facts: Mapping[str, Fact] = field(default_factory=dict)  # shown when it is clicked on
    flow: int | None = None  # an arrow joins the slices of one number


@dataclass
class Rank:
    """A rank (or a pipeline rank) with its tracks by name."""

    name: str
    tracks: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))


def check_writer(path: str) -> None:
    """Raises UserError if the package that writes a timeline, or the folder, is not there."""
    if find_spec("perfetto") is None:
        raise UserError(
            f"the timeline {path} needs the package perfetto, which is not installed: "
            "pip install perfetto"
        )
    if Path(path).is_dir():
        raise UserError(f"the timeline {path} cannot be written: that is a folder")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise UserError(f"the timeline {path} cannot be written: there is no folder {folder}")


# --- a run -------------------------------------------------------------------------------------


def of_run(
    names: Sequence[str], steps: Sequence[Sequence[StepTrace]], first_step: int = 1
) -> list[Rank]:
    """What was recorded; `names` by rank, `steps[rank]` in one clock, of which the first has number
    `first_step`. Time 0 is the first start."""
    zero = min(trace.start_s for own in steps for trace in own)
    flows = _flows(steps)
    ranks = []
    for name, own in zip(names, steps, strict=True):
        rank = Rank(name)
        for number, trace in enumerate(own, first_step):
            _add_step(rank, trace, zero, number, flows)
        ranks.append(rank)
    return ranks


def _add_step(
    rank: Rank, trace: StepTrace, zero: float, number: int, flows: Mapping[int, int]
) -> None:
    assert trace.end_s is not None
    work = [(f"step {number}", trace.start_s, trace.end_s), *trace.work]
    rank.tracks[COMPUTE] += [Slice(name, start - zero, end - zero) for name, start, end in work]
    for message in trace.messages:
        name = f"{message.split} {message.op}"
        facts = _facts(message)
        flow = flows.get(id(message))
        if message.wait_start_s is not None and message.end_s is not None:
            waited = Slice(
                f"wait: {name}", message.wait_start_s - zero, message.end_s - zero, facts
            )
            rank.tracks[COMPUTE].append(waited)
        end_s = trace.end_s if message.end_s is None else message.end_s
        rank.tracks[_track(message.split)].append(
            Slice(name, message.start_s - zero, end_s - zero, facts, flow)
        )


def _track(split: str) -> str:
    return f"{split} messages"


def _facts(message: Message) -> dict[str, Fact]:
    facts: dict[str, Fact] = {"phase": message.phase, "axis": message.axis}
    if message.op != "receive":
        facts["payload"] = format_bytes(message.payload_bytes)
        facts["payload_bytes"] = message.payload_bytes
    shown = message.ranks if len(message.ranks) <= 16 else [*message.ranks[:15], ".."]
    return {**facts, "group_size": message.group_size, "ranks": " ".join(map(str, shown))}


def _flows(steps: Sequence[Sequence[StepTrace]]) -> dict[int, int]:
    """A number for each message between stages, by the id of its two records. A channel's messages
    are received in the order in which they are sent."""
    ends: dict[tuple, list[Message]] = defaultdict(list)
    for own in steps:
        for number, trace in enumerate(own):
            for message in trace.messages:
                if is_between_stages(message):
                    ends[number, message.axis, message.ranks, message.op].append(message)
    flows: dict[int, int] = {}
    for (number, axis, ranks, op), sent in ends.items():
        if op != "send":
            continue
        received = ends.get((number, axis, ranks, "receive"), [])
        for pair in zip(sent, received, strict=False):
            flow = len(flows) // 2 + 1
            flows |= {id(message): flow for message in pair}
    return flows


# --- a plan ------------------------------------------------------------------------------------


def of_plan(step: PlannedStep) -> list[Rank]:
    """What is simulated, with a pipeline rank where a run has ranks. Messages that lie within an
    action, such as those of a tensor split, are part of its seconds."""
    schedule, rows = step.simulation.schedule, step.simulation.timeline
    ranks = [Rank(f"pipeline rank {number}") for number in range(schedule.pp)]
    for number, (rank, row) in enumerate(zip(ranks, rows, strict=True)):
        rank.tracks[COMPUTE] += [Slice(str(action), start, end) for action, start, end in row]
        _add_sends(ranks, schedule, number, {action: end for action, _, end in row}, step.send_s)
        _add_afterwards(rank, step.afterwards[number], step.optimizer_s[number])
    return ranks


def _add_sends(
    ranks: list[Rank],
    schedule: Schedule,
    number: int,
    ends_s: Mapping[Action, float],
    send_s: float,
) -> None:
    """The messages of one rank's actions, with an arrow to where they are received."""
    for each in schedule.steps(number):
        if each.sends is None or each.sends.rank == number:  # handed over where a V turns
            continue
        start_s, flow = ends_s[each.action], 1 + sum(len(r.tracks[_track("pp")]) for r in ranks)
        for rank, op in ((number, "send"), (each.sends.rank, "receive")):
            message = Slice(f"pp {op}", start_s, start_s + send_s, {"of": str(each.action)}, flow)
            ranks[rank].tracks[_track("pp")].append(message)


def _add_afterwards(rank: Rank, waits: Sequence[Afterwards], optimizer_s: float) -> None:
    time_s = max((each.end_s for each in rank.tracks[COMPUTE]), default=0.0)
    for each in waits:
        name, end_s = f"{each.split} {each.op}", time_s + each.exposed_s
        facts = {"phase": each.phase, "payload": format_bytes(each.payload_bytes)}
        rank.tracks[COMPUTE].append(Slice(f"wait: {name}", time_s, end_s, facts))
        rank.tracks[_track(each.split)].append(Slice(name, time_s, end_s, facts))
        time_s = end_s
    rank.tracks[COMPUTE].append(Slice("optimizer", time_s, time_s + optimizer_s))


# --- the file ----------------------------------------------------------------------------------


def save_run(
    path: str, names: Sequence[str], steps: Sequence[Sequence[StepTrace]], first_step: int
) -> None:
    """Writes what a run recorded (see `of_run`). UserError where that fails."""
    save(of_run(names, steps, first_step), path)


def save(ranks: Iterable[Rank], path: str | Path) -> None:
    """Writes the file. UserError where that fails."""
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    ids = iter(range(1, 2**62))
    for number, rank in enumerate(ranks):
        own = next(ids)
        _add_rank(builder, own, rank.name, number)
        names = [COMPUTE, *map(_track, SPLITS)]
        for order, name in enumerate(name for name in names if rank.tracks[name]):
            for lane in _lanes(rank.tracks[name]):
                track = next(ids)
                _add_track(builder, track, own, name, order)
                _add_slices(builder, track, lane)
    try:
        atomic_write(Path(path), builder.serialize())
    except OSError as error:
        raise UserError(f"the timeline {path} cannot be written: {error.strerror}") from None


def _lanes(slices: list[Slice]) -> list[list[Slice]]:
    """Slices of a track either lie within each other or apart. Those that only overlap go to
    different lanes: tracks of the same name, which are shown as one."""
    lanes: list[list[Slice]] = []
    opened: list[list[Slice]] = []  # of each lane, those that have not ended, outermost first
    for each in sorted(slices, key=lambda each: (each.start_s, -each.end_s)):
        for around in opened:
            while around and around[-1].end_s <= each.start_s:
                around.pop()
        fits = (n for n, around in enumerate(opened) if not around or _within(each, around[-1]))
        number = next(fits, len(lanes))
        if number == len(lanes):
            lanes.append([])
            opened.append([])
        lanes[number].append(each)
        opened[number].append(each)
    return lanes


def _within(inner: Slice, outer: Slice) -> bool:
    return outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


def _add_rank(builder: TraceProtoBuilder, own: int, name: str, number: int) -> None:
    descriptor = builder.add_packet().track_descriptor
    descriptor.uuid = own
    descriptor.process.pid = number + 1  # 0 would be the idle process
    descriptor.process.process_name = name
    descriptor.sibling_order_rank = number
    descriptor.child_ordering = descriptor.EXPLICIT


def _add_track(builder: TraceProtoBuilder, track: int, parent: int, name: str, order: int) -> None:
    descriptor = builder.add_packet().track_descriptor
    descriptor.uuid, descriptor.parent_uuid = track, parent
    descriptor.name, descriptor.sibling_order_rank = name, order


def _add_slices(builder: TraceProtoBuilder, track: int, lane: list[Slice]) -> None:
    """Begins and ends in order: what is open ends before what starts later begins."""
    opened: list[Slice] = []
    for each in lane:
        while opened and opened[-1].end_s <= each.start_s:
            _end(builder, track, opened.pop())
        _begin(builder, track, each)
        opened.append(each)
    while opened:
        _end(builder, track, opened.pop())


def _begin(builder: TraceProtoBuilder, track: int, each: Slice) -> None:
    packet = _packet(builder, each.start_s)
    event = packet.track_event
    event.type, event.track_uuid, event.name = event.TYPE_SLICE_BEGIN, track, each.name
    if each.flow is not None:
        event.flow_ids.append(each.flow)
    for name, value in each.facts.items():
        fact = event.debug_annotations.add()
        fact.name = name
        if isinstance(value, int):
            fact.int_value = value
        elif isinstance(value, float):
            fact.double_value = value
        else:
            fact.string_value = value


def _end(builder: TraceProtoBuilder, track: int, each: Slice) -> None:
    event = _packet(builder, each.end_s).track_event
    event.type, event.track_uuid = event.TYPE_SLICE_END, track


def _packet(builder: TraceProtoBuilder, time_s: float) -> Any:
    packet = builder.add_packet()
    packet.timestamp = round(time_s * 1e9)
    packet.trusted_packet_sequence_id = 1  # all of one writer
    return packet
