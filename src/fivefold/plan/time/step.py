"""Seconds of one optimizer step, by arithmetic, for many layouts at once.

The step is what its slowest pipeline rank does, and what it waits for. For three ranks (the
first, which has the embedding, a middle one, and the last, which has the head) every operation and
every transfer of the ledger gets its seconds; a transfer that can run beside compute counts only
as far as it is longer than that compute. Which transfer can run beside what is the engine's
(`job.Engine`), not a ratio.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.collectives import seconds as collective_s
from fivefold.cluster.constants import Constants
from fivefold.layout.batch import LayoutBatch
from fivefold.ledger import Transfer
from fivefold.model.config import LayerKind
from fivefold.parallel.cost import SPLIT_COSTS
from fivefold.parallel.workload import (
    ELEMENT_BYTES,
    FP32,
    ROLES,
    RankWorkload,
    role_rank,
    stage_work,
)
from fivefold.plan.engines import Engine, Job
from fivefold.plan.time import accelerator as compute
from fivefold.plan.time import cpu as host
from fivefold.plan.time import shared_cores as sharing
from fivefold.plan.time.breakdown import Message, Passes, Rank, Row, Time, Traffic
from fivefold.plan.time.operations import (
    Numbers,
    Operations,
    embedding_operations,
    head_operations,
    layer_operations,
)
from fivefold.plan.time.pipeline import pipeline_step_s
from fivefold.plan.time.placement import members


def estimate_time(job: Job, layouts: LayoutBatch, constants: Constants) -> Time:
    """The step time of every layout."""
    return step_time(job, layouts, traffic(job, layouts), constants)


def traffic(job: Job, layouts: LayoutBatch) -> dict[str, Traffic]:
    """What the ranks of each role send, with the seconds that a message alone takes."""
    places = members(job.cluster, layouts)
    known: dict[tuple[str, str, bytes], Numbers] = {}  # ranks of all roles send much the same
    result = {}
    for role in ROLES:
        work = stage_work(
            job.config,
            layouts,
            job.sequence_length,
            job.activations,
            role,
            mtp=job.mtp,
            flat=job.engine.flat_shards,
        )
        messages = []
        for transfer in (t for split in SPLIT_COSTS for t in split.transfers(work)):
            if not np.any(transfer.calls):
                continue
            if job.cluster.cores:
                messages.append(sharing.message(job.cluster, transfer))
                continue
            payload = transfer.payload_bytes * _wire_share(job, transfer, places["ep"])
            alike = transfer.op, transfer.axis, np.asarray(payload, float).tobytes()
            if alike not in known:
                place = places[transfer.axis]
                known[alike] = collective_s(job.cluster, transfer.op, place, payload)
            one = known[alike]
            messages.append(Message(transfer, transfer.calls * one))
        result[role] = Traffic(work, messages)
    return result


def step_time(
    job: Job, layouts: LayoutBatch, traffic: dict[str, Traffic], constants: Constants
) -> Time:
    """The step time of layouts whose traffic is known."""
    if job.cluster.cores:
        return _time_on_cores(job, layouts, traffic, constants)
    per_kind = _layer_seconds(job, layouts, constants)
    ranks = {
        role: _rank(job, layouts, constants, per_kind, role, mine) for role, mine in traffic.items()
    }
    roles = [ranks[role] for role in ROLES]
    # The first chunk of the first rank has the embedding, the last of the last rank the head; where
    # micro-batches come from both ends, each of these ranks has both, for half of them.
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
    step = whole_step_s(job, layouts, constants, pipeline + once)
    return Time(step, ranks)


def _time_on_cores(
    job: Job, layouts: LayoutBatch, traffic: dict[str, Traffic], constants: Constants
) -> Time:
    """On cores that processes share, where what one rank computes more than another is a wait to
    the others, in which it may have their cores."""
    even = _layer_seconds(replace(job, imbalance=1.0), layouts, constants)
    uneven = _layer_seconds(job, layouts, constants)
    ranks = {}
    for role, mine in traffic.items():
        mean = compute_of(job, layouts, even, mine.work)
        busiest = compute_of(job, layouts, uneven, mine.work)
        for_experts = sharing.waits_for_experts(job, layouts, mean, busiest)
        outside = outside_of(even, mine.work)
        ranks[role] = sharing.rank(job.cluster, mine, mean, outside, for_experts)
    return Time(sharing.step_s(job.cluster, layouts, ranks), ranks)


GRAPHED_STEP = 0.2
"""What is left of the host's time between steps where a graph replays whole steps: assumed, what
small steps of MLPerf's 8B runs leave for it."""


def whole_step_s(job: Job, layouts: LayoutBatch, constants: Constants, inside: Numbers) -> Numbers:
    """A step with the seconds `inside` of it: with what the slowest of many nodes adds, and what is
    once a step."""
    nodes = np.maximum(layouts.world_size / job.cluster.tier_sizes[0], 1.0)
    once = constants.step_s * (GRAPHED_STEP if job.engine.cuda_graphs else 1.0)
    return inside * (1 + constants.straggler * np.log2(nodes)) + once


def _layer_seconds(
    job: Job, layouts: LayoutBatch, constants: Constants
) -> dict[LayerKind | str, compute.Seconds]:
    """Of one layer of each kind, and of what stands before and after the layers."""
    kinds = [*dict.fromkeys(job.config.layer_kinds)]
    if job.mtp:
        kinds.append(job.config.mtp_kind)
    operations: dict[LayerKind | str, Operations] = {
        kind: layer_operations(job, layouts, kind) for kind in kinds
    }
    operations["embedding"] = embedding_operations(job, layouts)
    operations["head"] = head_operations(job, layouts)
    return {name: operation_s(job, constants, ops) for name, ops in operations.items()}


def operation_s(job: Job, constants: Constants, operations: Operations) -> compute.Seconds:
    """Of operations on the job's device."""
    if job.cluster.cores:
        return host.seconds(job, job.cluster.core, operations)
    return compute.seconds(job, constants, operations)


def _rank(
    job: Job,
    layouts: LayoutBatch,
    constants: Constants,
    per_kind: dict[LayerKind | str, compute.Seconds],
    role: str,
    traffic: Traffic,
) -> Rank:
    work = traffic.work
    beside = compute_of(job, layouts, per_kind, work)
    m = work.micro_batches
    rows: list[Row] = []
    # Seconds that a phase is longer by messages: those exposed, and the compute that the hidden
    # ones slow down, since they take some of its processors and memory bandwidth.
    added: dict[str, Numbers] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    send: Numbers = 0.0
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
    outside = outside_of(per_kind, work)
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


def outside_of(per_kind: dict[LayerKind | str, compute.Seconds], work: RankWorkload) -> Passes:
    """Embedding, head and loss, and those of multi-token prediction."""
    modules = work.mtp_layers
    parts = [
        (per_kind["embedding"], work.first + modules),
        (per_kind["head"], work.last + modules),
    ]
    return Passes(
        sum(s.forward * count for s, count in parts),
        sum(s.input_gradient * count for s, count in parts),
        sum(s.weight_gradient * count for s, count in parts),
    )


def compute_of(job: Job, layouts: LayoutBatch, per_kind, work: RankWorkload) -> compute.Seconds:
    """Of one micro-batch on one pipeline rank, recomputation included."""
    layers = [(per_kind[kind], count) for kind, count in work.layers]
    modules = work.mtp_layers
    parts = [
        *layers,
        (per_kind["embedding"], work.first + modules),
        (per_kind["head"], work.last + modules),
    ]

    def total(name: str) -> Numbers:
        return sum((getattr(s, name) * count for s, count in parts), 0.0)

    selective = layouts.recompute == "selective"
    again: Numbers = 0.0
    for (layer, count), recomputed in zip(layers, work.recomputed, strict=True):
        again = again + recomputed * layer.forward
        again = again + selective * count * compute.selected_s(job, layer)
    return compute.Seconds(
        forward=total("forward"),
        input_gradient=total("input_gradient") + again,
        weight_gradient=total("weight_gradient"),
        attention_forward=total("attention_forward"),
        attention_backward=total("attention_backward"),
        split_products=total("split_products"),
        products=total("products"),
        light=total("light"),
    )


def _wire_share(job: Job, transfer: Transfer, ep_members: NDArray[np.int64]) -> Numbers:
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


def _copies_once_a_node(job: Job, members: NDArray[np.int64]) -> Numbers:
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
    total: Numbers,
    beside: compute.Seconds,
    m: Numbers,
) -> Numbers:
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


def _pipelined(engine: Engine, layouts: LayoutBatch, total: Numbers, products: Numbers) -> Numbers:
    """Messages cut into tp pieces, each beside the product of the piece before it."""
    if not engine.pipelined_tensor_messages:
        return total
    first = total / layouts.tp
    return first + np.maximum(total - first - products, 0.0)


def _data_exposure(
    job: Job,
    layouts: LayoutBatch,
    rows: list[tuple[Transfer, Numbers]],
    beside: compute.Seconds,
    role: str,
    phase: str,
) -> tuple[Numbers, Numbers]:
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


HOST_BANDWIDTH = 40e9
"""Bytes/s of host memory for each device, where the host runs the optimizer: assumed, two sockets
of about 160 GB/s in use for 8 devices. Gradients and weights cross PCIe beside it."""


def _optimizer_s(job: Job, constants: Constants, work: RankWorkload) -> Numbers:
    """AdamW as one kernel: state read and written, the gradient read for its norm and once more,
    the 16-bit weight written."""
    engine = job.engine
    elements = sum(work.total(units, lambda sizes: sizes.gradient) for units in work.units)
    moved = elements * (2 * engine.optimizer_bytes + 2 * engine.gradient_bytes + 2)
    bandwidth = job.cluster.device.memory_bandwidth * constants.memory
    return moved / (HOST_BANDWIDTH if engine.host_optimizer else bandwidth)
