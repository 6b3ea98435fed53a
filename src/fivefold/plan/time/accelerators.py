"""The step of accelerators, on which messages that overlap with compute cost little.

A transfer that can overlap counts only as far as it is longer than that compute. Which transfer
overlaps with what is the engine's (`engines.Engine`), not a ratio.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.cluster.collectives import seconds as collective_s
from fivefold.cluster.constants import Constants
from fivefold.layout.batch import LayoutBatch
from fivefold.ledger import Transfer
from fivefold.parallel.layer_counts import role_rank
from fivefold.parallel.pipeline import simulation
from fivefold.parallel.pipeline.table import Schedule
from fivefold.parallel.workload import ELEMENT_BYTES, FP32, ROLES, RankWorkload
from fivefold.plan.constants import GRAPHED_STEP, HOST_BANDWIDTH
from fivefold.plan.engines import Engine, Job
from fivefold.plan.time import accelerator as compute
from fivefold.plan.time.breakdown import (
    Message,
    Passes,
    PipelineRun,
    Rank,
    Row,
    StageSeconds,
    Time,
    Traffic,
)
from fivefold.plan.time.machine import Layers, Machine, Places, compute_of, outside_of
from fivefold.plan.time.operations import Operations
from fivefold.plan.time.pipeline import pipeline_step_s


class Accelerators(Machine):
    """Devices of their own, with a network that works while they compute."""

    def compute_seconds(self, operations: Operations) -> compute.Seconds:
        return compute.seconds(self.job, self.constants, operations)

    def message_seconds(self, transfer: Transfer, places: Places) -> Message:
        payload = transfer.payload_bytes * _wire_share(self.job, transfer, places.members["ep"])
        alike = transfer.op, transfer.axis, np.asarray(payload, float).tobytes()
        if alike not in places.known:  # ranks of all roles send much the same
            place = places.members[transfer.axis]
            places.known[alike] = collective_s(self.job.cluster, transfer.op, place, payload)
        return Message(transfer, transfer.calls * places.known[alike])

    def slows_compute(self, transfer: Transfer) -> float:
        return 0.0 if transfer.is_between_stages else self.constants.contention

    def run(self, schedule: Schedule, stages: StageSeconds, processes: float) -> PipelineRun:
        forward, backward, weight = (
            x.tolist() for x in (stages.forward, stages.backward, stages.weight)
        )
        both = (stages.forward + stages.backward).tolist()
        ran = simulation.simulate(
            schedule, forward, backward, stages.send, weight_s=weight, overlapped_s=both
        )
        return PipelineRun(ran.step_s, (1.0,) * schedule.pp)

    def time(self, layouts: LayoutBatch, traffic: Mapping[str, Traffic]) -> Time:
        layers = self.layer_seconds(layouts)
        ranks = {role: self._rank(layouts, role, mine, layers) for role, mine in traffic.items()}
        return Time(self.step_seconds(layouts, ranks), ranks)

    def _rank(self, layouts: LayoutBatch, role: str, traffic: Traffic, layers: Layers) -> Rank:
        job, constants, work = self.job, self.constants, traffic.work
        beside = compute_of(job, layouts, layers, work)
        m = work.micro_batches
        rows: list[Row] = []
        # Seconds that a phase is longer by messages: those exposed, and the compute that the hidden
        # ones slow down, since they take some of its processors and memory bandwidth.
        added: dict[str, Elementwise] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        send: Elementwise = 0.0
        data, others = _data_parallel_and_others(job, traffic.messages)
        for message in others:
            transfer, total = message.transfer, message.total
            if transfer.is_between_stages:
                send = np.maximum(send, total / np.maximum(transfer.calls, 1))
                rows.append(Row(transfer, total, np.where(layouts.vpp > 1, 0.0, total)))
                continue  # the pipeline's formula knows when a rank waits for a message
            exposed = _exposed(job, layouts, transfer, total, beside, m)
            rows.append(Row(transfer, total, exposed))
            longer = exposed + constants.contention * (total - exposed)
            added[transfer.phase] = added[transfer.phase] + longer
        once = added["optimizer"]
        for phase in ("forward", "backward"):
            mine = [
                (each.transfer, each.total)
                for each in data
                if (each.transfer.phase == "forward") == (phase == "forward")
            ]
            share, hidden = _data_exposure(job, layouts, mine, beside, role, phase)
            rows += [Row(transfer, total, total * share) for transfer, total in mine]
            once = once + share * sum((total for _, total in mine), 0.0)
            added[phase] = added[phase] + constants.contention * hidden
        optimizer = _optimizer_s(job, constants, work)
        outside = outside_of(layers, work)
        return Rank(
            layers=Passes(
                beside.forward - outside.forward + added["forward"] / m,
                beside.input_gradient - outside.input_gradient + added["backward"] / m,
                beside.weight_gradient - outside.weight_gradient,
            ),
            outside=outside,
            micro_batches=m,
            chunks=work.chunks,
            once=once + optimizer,
            optimizer=optimizer,
            send=send,
            rows=rows,
        )

    def step_seconds(self, layouts: LayoutBatch, ranks: Mapping[str, Rank]) -> Elementwise:
        roles = [ranks[role] for role in ROLES]
        # The first chunk of the first rank has the embedding, the last of the last rank the head;
        # where micro-batches come from both ends, each of these ranks has both, for half of them.
        ends = 1 + layouts.is_bidirectional
        chunks = {
            name: np.array(
                [
                    getattr(rank.layers, name) / rank.chunks
                    + getattr(rank.outside, name) * (role != "middle") / ends
                    for role, rank in ranks.items()
                ],
                dtype=float,
            )
            for name in ("forward", "backward", "weight_gradient")
        }
        pipeline = pipeline_step_s(
            layouts.schedule,
            layouts.pp,
            layouts.vpp,
            layouts.accumulation,
            chunks["forward"],
            chunks["backward"],
            roles[1].send,
            weight_s=chunks["weight_gradient"],
        )
        once = np.maximum.reduce([rank.once for rank in roles])
        return self.whole_step_seconds(layouts, pipeline + once)

    def whole_step_seconds(self, layouts: LayoutBatch, inside: Elementwise) -> Elementwise:
        """A step with the seconds `inside` of it: with what the slowest of many nodes adds, and
        what is once a step."""
        nodes = np.maximum(layouts.world_size / self.job.cluster.tier_sizes[0], 1.0)
        once = self.constants.step_s * (GRAPHED_STEP if self.job.engine.cuda_graphs else 1.0)
        return inside * (1 + self.constants.straggler * np.log2(nodes)) + once


def _data_parallel_and_others(
    job: Job, messages: list[Message]
) -> tuple[list[Message], list[Message]]:
    """The messages of data parallelism that run beside whole passes, and all others."""
    data, others = [], []
    for each in messages:
        beside_passes = each.transfer.phase != "optimizer" or job.engine.overlapped_replicas
        mine = each.transfer.split == "dp" and beside_passes
        (data if mine else others).append(each)
    return data, others


def _wire_share(job: Job, transfer: Transfer, ep_members: NDArray[np.int64]) -> Elementwise:
    """The ledger's payloads are those of this program; other engines differ in the bytes of an
    element on the wire, and in what they send only once to each node."""
    engine = job.engine
    if transfer.split == "dp":
        if transfer.op == "all_gather":
            return engine.gathered_bytes / ELEMENT_BYTES["bf16"]
        return engine.reduced_bytes / FP32
    if transfer.axis == "ep" and transfer.op == "all_to_all":
        # One of two is on its way to the experts, the other on its way back.
        share = (engine.dispatched_bytes + 2) / 4
        return share * _copies_once_a_node(job, ep_members) if engine.once_a_node else share
    return 1.0


def _copies_once_a_node(job: Job, members: NDArray[np.int64]) -> Elementwise:
    """Messages if a token goes to each node (or rank) once, over one for each expert.

    Of k experts drawn evenly from N nodes, N (1 - (1 - 1/N)^k) nodes have one or more (DeepSeek-V3,
    arXiv:2412.19437, section 3.2.2). Within one node the same holds of its ranks.
    """
    moe = job.config.moe
    assert moe is not None
    k, nodes = moe.experts_per_token, members[-1] / members[0]
    places = np.where(nodes > 1, nodes, members[-1])
    reached = places * (1 - (1 - 1 / places) ** k)
    if moe.groups_per_token:  # groups of experts are whole nodes, or several share one
        limit = moe.groups_per_token * np.maximum(1, nodes / moe.groups)
        reached = np.where(nodes > 1, np.minimum(reached, limit), reached)
    return reached / k


def _exposed(
    job: Job,
    layouts: LayoutBatch,
    transfer: Transfer,
    total: Elementwise,
    beside: compute.Seconds,
    m: Elementwise,
) -> Elementwise:
    """The part of a step's messages that no compute hides."""
    engine = job.engine
    if transfer.axis == "tp" and transfer.split == "tp":
        products = m * beside.split_products
        if transfer.phase == "forward" or transfer.is_recompute:
            return _pipelined(engine, layouts, total, products)
        if transfer.phase == "optimizer" or not engine.hidden_tensor_backward:
            return total
        if transfer.op == "all_gather":
            # Half are of gradients, which the products wait for; half are of inputs that are
            # gathered once more for the weight's gradient, beside the product before it.
            half = total / 2
            return _pipelined(engine, layouts, half, products) + np.maximum(half - products, 0.0)
        return np.maximum(total - m * beside.weight_gradient, 0.0)
    if transfer.axis == "ring" and engine.overlapped_ring:
        forward = transfer.phase == "forward" or transfer.is_recompute
        attention = beside.attention_forward if forward else beside.attention_backward
        share = (layouts.ring - 1) / layouts.ring  # the first block needs no message
        return np.maximum(total - m * attention * share, 0.0)
    if transfer.split == "ep" and engine.overlapped_experts:
        forward = transfer.phase == "forward"
        window = beside.forward if forward else beside.input_gradient + beside.weight_gradient
        return np.maximum(total - m * window, 0.0)
    return total


def _pipelined(
    engine: Engine, layouts: LayoutBatch, total: Elementwise, products: Elementwise
) -> Elementwise:
    """Messages cut into tp pieces, each beside the product of the piece before it."""
    if not engine.pipelined_tensor_messages:
        return total
    first = total / layouts.tp
    return first + np.maximum(total - first - products, 0.0)


def _data_exposure(
    job: Job,
    layouts: LayoutBatch,
    rows: list[tuple[Transfer, Elementwise]],
    beside: compute.Seconds,
    role: str,
    phase: str,
) -> tuple[Elementwise, Elementwise]:
    """The exposed share of one phase's data-parallel messages, and the hidden seconds.

    Below ZeRO 3 weights are gathered once, beside the first micro-batch's forward pass, and
    gradients reduced once (ZeRO 2: every time), beside the last one's backward pass. One message
    has nothing beside it: the first gather, the last reduction.
    """
    total = sum((s for _, s in rows), 0.0)
    calls = sum((t.calls for t, _ in rows), 0)
    forward = phase == "forward"
    overlapped = job.engine.overlapped_weights if forward else job.engine.overlapped_gradients
    if not overlapped or not rows:
        return np.ones_like(layouts.tp, dtype=float), 0.0 * layouts.tp
    window = beside.forward if forward else beside.backward
    every_time = (layouts.zero == 3) | ((layouts.zero == 2) & (not forward))
    # With chunks, those that are done first reduce beside the micro-batches of the others.
    chunks = 1 + (layouts.pp - 1) * (layouts.vpp - 1) / layouts.vpp
    window = window * np.where(every_time, layouts.accumulation, chunks)
    # Later stages start later and end earlier: the pipeline's bubble hides theirs.
    pass_s = beside.forward if forward else beside.backward
    window = window + role_rank(job.config, layouts, role) * pass_s / layouts.vpp
    exposed = np.maximum(total - window, total / np.maximum(calls, 1))
    exposed = np.minimum(exposed, total)
    return exposed / np.maximum(total, 1e-30), total - exposed


def _optimizer_s(job: Job, constants: Constants, work: RankWorkload) -> Elementwise:
    """AdamW as one kernel: state read and written, the gradient read for its norm and once more,
    the 16-bit weight written."""
    engine = job.engine
    elements = sum(work.total(units, lambda sizes: sizes.gradient) for units in work.units)
    moved = elements * (2 * engine.optimizer_bytes + 2 * engine.gradient_bytes + 2)
    bandwidth = job.cluster.device.memory_bandwidth * constants.memory
    return moved / (HOST_BANDWIDTH if engine.host_optimizer else bandwidth)
