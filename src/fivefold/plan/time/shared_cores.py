"""The step of ranks that are processes on the cores of one CPU (`cluster.cores`).

What is hidden on an accelerator costs here all the same: a message beside compute takes its part of
the core. So what a rank does adds up to its busy seconds, and beside them it waits for messages to
arrive. Where there are more ranks than cores, a busy rank has a share of a core; a waiting one
leaves its core to others, which is why bubbles of a pipeline cost little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.cluster.cpu import Cpu
from fivefold.layout.actions import Action
from fivefold.layout.batch import LayoutBatch
from fivefold.ledger import Transfer
from fivefold.parallel.pipeline.table import Schedule
from fivefold.parallel.workload import RankWorkload
from fivefold.plan.constants import ZERO_PASSES
from fivefold.plan.engines import Job
from fivefold.plan.time.accelerator import Seconds
from fivefold.plan.time.breakdown import (
    Message,
    Passes,
    PipelineRun,
    Rank,
    Row,
    StageSeconds,
    Time,
    Traffic,
    Waits,
)
from fivefold.plan.time.cpu import seconds as cpu_seconds
from fivefold.plan.time.machine import Machine, Places, compute_of, outside_of
from fivefold.plan.time.operations import Operations
from fivefold.plan.time.pipeline import pipeline_step_s


class SharedCores(Machine):
    """Processes that share the cores of a CPU."""

    @cached_property
    def cpu(self) -> Cpu:
        """As it works where all processes do."""
        cpu = self.job.cluster.cpu
        assert cpu is not None
        return cpu.among(self.job.cluster.num_devices)

    def compute_seconds(self, operations: Operations) -> Seconds:
        return cpu_seconds(self.job, self.cpu, operations)

    def message_seconds(self, transfer: Transfer, places: Places) -> Message:
        cpu = self.cpu
        # The ring's sends are swaps with both neighbours at once.
        op = "shift" if transfer.axis == "ring" else transfer.op
        one = cpu.message_s(op, transfer.group_size, transfer.payload_bytes)
        busy, wait, kind = one.busy, one.wait, kind_of(transfer)
        if kind in cpu.calls:
            around = cpu.calls[kind]
            busy = busy + around.busy_s
            # Ranks wait for the last of them, which was measured with a core for each. Where cores
            # are shared, those that wait leave them to the others, which are there the sooner.
            share = min(1.0, cpu.cores / self.job.cluster.num_devices)
            wait = wait + share * around.wait_s * (not overlaps_compute(transfer))
        if kind == "zero":
            busy = busy + ZERO_PASSES * cpu.copy_byte * transfer.payload_bytes
        if transfer.is_between_stages:
            busy = 2 * busy  # as many messages arrive as leave
        several = np.asarray(transfer.group_size) > 1
        busy, wait = busy * several, wait * several
        return Message(transfer, transfer.calls * busy, transfer.calls * wait)

    def slows_compute(self, transfer: Transfer) -> float:
        return 1.0  # it takes its part of the core

    def cores_share(self, world_size: int) -> float:
        return max(1.0, world_size / self.cpu.cores)

    def whole_step_seconds(self, layouts: LayoutBatch, inside: Elementwise) -> Elementwise:
        return inside + self.cpu.step * np.maximum(1.0, layouts.world_size / self.cpu.cores)

    def run(self, schedule: Schedule, stages: StageSeconds, processes: float) -> PipelineRun:
        busy = {
            "F": stages.forward.tolist(),
            "B": stages.backward.tolist(),
            "I": (stages.backward - stages.weight).tolist(),
            "W": stages.weight.tolist(),
        }
        waits = {
            "F": stages.wait_forward.tolist(),
            "B": stages.wait_backward.tolist(),
            "I": stages.wait_backward.tolist(),
            "W": [0.0] * schedule.stages,
        }
        return simulate(schedule, busy, waits, stages.send, processes, self.cpu.cores)

    def time(self, layouts: LayoutBatch, traffic: Mapping[str, Traffic]) -> Time:
        """What one rank computes more than another is a wait to the others, in which it may have
        their cores."""
        even = replace(self, job=replace(self.job, imbalance=1.0)).layer_seconds(layouts)
        uneven = self.layer_seconds(layouts)
        ranks = {}
        for role, mine in traffic.items():
            mean, busiest = (
                compute_of(self.job, layouts, layers, mine.work) for layers in (even, uneven)
            )
            waits = waits_for_experts(self.job, layouts, self.cpu.cores, mean, busiest)
            ranks[role] = self._rank(mine, mean, outside_of(even, mine.work), waits)
        return Time(self.step_seconds(layouts, ranks), ranks)

    def _rank(self, traffic: Traffic, mean: Seconds, outside: Passes, for_experts: Waits) -> Rank:
        """`mean` is what a rank computes in one micro-batch, `outside` a part of it."""
        work, m = traffic.work, traffic.work.micro_batches
        busy: dict[str, Elementwise] = {"forward": 0.0, "backward": 0.0, "once": 0.0}
        waits: dict[str, Elementwise] = dict(busy)
        rows, send = [], 0.0
        for each in traffic.messages:
            transfer, when = each.transfer, _when(each.transfer)
            seconds = each.total + each.waits
            busy[when] = busy[when] + each.total
            if transfer.is_between_stages:  # the pipeline knows when a rank waits for one
                send = np.maximum(send, each.waits / np.maximum(transfer.calls, 1))
            exposed = seconds * (not overlaps_compute(transfer))
            rows.append(Row(transfer, seconds, exposed, each.waits))
            if not overlaps_compute(transfer):
                waits[when] = waits[when] + each.waits
        optimizer = self.cpu.optimizer_element * _elements(work)
        return Rank(
            layers=Passes(
                mean.forward - outside.forward + busy["forward"] / m,
                mean.input_gradient - outside.input_gradient + busy["backward"] / m,
                mean.weight_gradient - outside.weight_gradient,
            ),
            outside=outside,
            micro_batches=m,
            chunks=work.chunks,
            once=busy["once"] + optimizer,
            optimizer=optimizer,
            send=send,
            rows=rows,
            waits=Waits(
                waits["forward"] / m + for_experts.forward,
                waits["backward"] / m + for_experts.backward,
                waits["once"],
            ),
            for_experts=for_experts,
        )

    def step_seconds(self, layouts: LayoutBatch, ranks: Mapping[str, Rank]) -> Elementwise:
        """As the pipeline takes with what one rank's processes get of the cores when they are
        alone, or as long as the cores need for all there is to do."""
        cpu = self.cpu
        processes = layouts.world_size / layouts.pp  # of one pipeline rank
        share = np.maximum(1.0, processes / cpu.cores)
        roles = [ranks[role] for role in ("first", "middle", "last")]
        passes = {
            name: np.array([_chunk_s(rank, role, name, share) for role, rank in ranks.items()])
            for name in ("forward", "backward")
        }
        pipeline = pipeline_step_s(
            layouts.schedule,
            layouts.pp,
            layouts.vpp,
            layouts.accumulation,
            passes["forward"],
            passes["backward"],
            roles[1].send,
        )
        once = np.maximum.reduce([rank.once * share + rank.waits.once for rank in roles])
        works = [rank.micro_batches * rank.busy + rank.once for rank in roles]
        middles = np.maximum(layouts.pp - 2, 0)
        total = works[0] + middles * works[1] + (layouts.pp > 1) * works[2]
        waits = np.maximum.reduce([_waits(rank) for rank in roles])
        return np.maximum(pipeline + once, total * processes / cpu.cores + waits) + (
            cpu.step * share
        )


def kind_of(transfer: Transfer) -> str:
    """What part of the program sends it: `zero` of FSDP2, else the axis that it goes along, where
    everything of experts is `ep`."""
    if transfer.split == "dp" and transfer.op in ("all_gather", "reduce_scatter"):
        return "zero"
    return "ep" if transfer.split == "ep" else transfer.axis


def overlaps_compute(transfer: Transfer) -> bool:
    """Does the program start the message and compute on before it needs its result?"""
    if transfer.axis == "ring" or transfer.is_between_stages:
        return True
    if transfer.split == "dp":
        return transfer.phase != "optimizer"
    sums = transfer.op in ("all_reduce", "reduce_scatter")
    return (
        transfer.axis == "tp"
        and transfer.phase == "backward"
        and sums
        and not transfer.is_recompute
    )


def waits_for_experts(
    job: Job, layouts: LayoutBatch, cores: int, mean: Seconds, busiest: Seconds
) -> Waits:
    """Of a mean rank for the one whose experts have the most tokens, in a micro-batch; `mean` and
    `busiest` are what they compute.

    Its part is (imbalance - 1) of the experts' share of `mean`. Where the ranks that wait shared
    cores with it, they leave them to it, and it is the sooner done.
    """
    more = job.busiest(layouts.ep) - 1.0
    sharing = np.maximum(1.0, layouts.world_size / layouts.pp / cores) - 1.0
    alone = np.maximum(0.0, 1.0 - sharing / np.maximum(more, 1e-9))
    return Waits(
        forward=alone * (busiest.forward - mean.forward),
        backward=alone * (busiest.backward - mean.backward),
    )


def _elements(work: RankWorkload) -> Elementwise:
    """That the optimizer of a rank updates."""
    return sum(work.total(units, lambda sizes: sizes.gradient) for units in work.units)


def _when(transfer: Transfer) -> str:
    """In which pass a message is sent, or that it is sent once a step."""
    return "once" if transfer.phase == "optimizer" else transfer.phase


def _waits(rank: Rank) -> Elementwise:
    return rank.micro_batches * (rank.waits.forward + rank.waits.backward) + rank.waits.once


def _chunk_s(rank: Rank, role: str, name: str, share: Elementwise) -> Elementwise:
    busy = getattr(rank.layers, name) / rank.chunks
    busy = busy + getattr(rank.outside, name) * (role != "middle")
    return busy * share + getattr(rank.waits, name) / rank.chunks


@dataclass
class _State:
    """Where a pipeline rank is in its row of the schedule."""

    row: Sequence[Action]
    done: int = 0
    work_s: float = 0.0  # left of the action it is in
    free_at_s: float | None = None  # when the wait after its work ends; None: before that
    started: bool = False
    worked_s: float = 0.0  # so far, and what that took
    busy_s: float = 0.0

    @property
    def action(self) -> Action | None:
        return self.row[self.done] if self.done < len(self.row) else None


def simulate(
    schedule: Schedule,
    busy_s: Mapping[str, Sequence[float]],
    wait_s: Mapping[str, Sequence[float]],
    send_s: float,
    processes: float,
    cores: int,
) -> PipelineRun:
    """Runs a table of actions in which each pipeline rank stands for `processes` processes that do
    the same at the same time. All that are busy get equal parts of the cores, at most one each.

    `busy_s` and `wait_s`, by kind of action and virtual stage: an action works first and then waits
    for its messages, its cores free. A result reaches another rank `send_s` later.
    """
    states = [_State(row) for row in schedule.table]
    arrives_s: dict[Action, float] = {}
    now_s = 0.0

    def ready_s(rank: int, action: Action) -> float:
        """When all that the action needs is there; infinity where that is not known yet."""
        latest = 0.0
        for needed in schedule.needs(action):
            there_s = arrives_s.get(needed, math.inf)
            if schedule.rank_of(needed.stage, needed.micro_batch) != rank:
                there_s += send_s
            latest = max(latest, there_s)
        return latest

    while True:
        events = []
        for rank, state in enumerate(states):
            if state.action is not None and not state.started:
                ready = ready_s(rank, state.action)
                if ready <= now_s:
                    state.started = True
                    state.work_s = busy_s[state.action.kind][state.action.stage]
                elif ready < math.inf:
                    events.append(ready)
        busy = [state for state in states if state.started and state.free_at_s is None]
        rate = min(1.0, cores / (len(busy) * processes)) if busy else 1.0
        events += [now_s + state.work_s / rate for state in busy]
        events += [state.free_at_s for state in states if state.free_at_s is not None]
        if not events:
            break
        before_s, now_s = now_s, min(events)
        took_s = now_s - before_s
        for state in busy:
            state.worked_s += took_s * rate
            state.busy_s += took_s
        for state in states:
            action = state.action
            if action is None or not state.started:
                continue
            if state.free_at_s is None:
                # By the time that is among the events: what is left of the work after rounding can
                # be too little to move the clock.
                if before_s + state.work_s / rate <= now_s:
                    state.free_at_s = now_s + wait_s[action.kind][action.stage]
                state.work_s -= took_s * rate
            if state.free_at_s is not None and state.free_at_s <= now_s:
                arrives_s[action] = now_s
                state.done, state.started, state.free_at_s = state.done + 1, False, None
    slowdowns = (state.busy_s / state.worked_s if state.worked_s else 1.0 for state in states)
    return PipelineRun(now_s, tuple(slowdowns))
