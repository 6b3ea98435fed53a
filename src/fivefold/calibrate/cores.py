"""From points of a CPU to what the planner reads of one (`cluster.cpu`). Needs no torch.

A layer's passes are fitted as a whole, to the layers and heads that were measured: what an
operation takes within a layer, on data that the one before it has left in the cache, is not what it
takes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np
from numpy.typing import NDArray

from fivefold.calibrate.fit import least_relative_squares
from fivefold.calibrate.points import Point, rounded
from fivefold.calibrate.steps import (
    call_seconds,
    cpu_of,
    process_overhead,
    slowdowns,
    step_s,
    with_cpu,
)
from fivefold.cluster.cluster import Cluster
from fivefold.cluster.cpu import Cpu, MessageRecord, Pass
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.time.cpu import work_of
from fivefold.plan.time.operations import Operations, head_operations, layer_operations
from fivefold.schema import validate

Floats = NDArray[np.float64]

FITTED = ("layer", "head")
"""The points that the rates of passes are fitted to."""
USUAL_BYTES = 2**20
"""Of the arrays that a training step on a CPU copies."""


def fit_cpu(machine: Cluster, cores: int, points: Sequence[Point]) -> Cpu:
    """What was measured on the cores of a machine whose file has nothing of them yet."""
    cpu = Cpu(
        cores=cores,
        forward=_fit_pass(points, machine, "forward"),
        backward=_fit_pass(points, machine, "backward"),
        copy_byte=rounded(_copy_byte(points)),
        optimizer_element=rounded(_optimizer_element(points)),
        messages=message_records(points, cores),
    )
    if any(point.what == "step" for point in points):
        cluster = replace(machine, cpu=cpu)
        cluster = with_cpu(cluster, step=rounded(step_s(points, cluster)))
        calls = call_seconds(points, cluster)
        cluster = with_cpu(cluster, calls=calls, overhead=process_overhead(points, cluster))
        cpu = cpu_of(with_cpu(cluster, slowdown=slowdowns(points, cluster)))
    return cpu


# --- passes ------------------------------------------------------------------------------------


def _fit_pass(points: Sequence[Point], cluster: Cluster, part: str) -> Pass:
    chosen = [p for p in points if p.what in FITTED and p.sizes["part"] == part]
    work = np.array([block_work(point, cluster) for point in chosen])
    rates = least_relative_squares(work, np.array([point.cpu_s for point in chosen]))
    rounded_rates = map(rounded, rates.tolist())
    return validate(Pass, dict(zip(Pass.model_fields, rounded_rates, strict=True)), f"{part} pass")


def pass_errors(points: Sequence[Point], cluster: Cluster) -> dict[str, Floats]:
    """How far the cores of a cluster are from the layers and heads that were measured, relative, by
    kind of pass."""
    errors: dict[str, list[float]] = {"forward": [], "backward": []}
    core = cpu_of(cluster)  # as it works by itself
    for point in points:
        if point.what in FITTED:
            part = str(point.sizes["part"])
            seconds = getattr(core, part).seconds(block_work(point, cluster))
            errors[part].append(abs(float(seconds) / point.cpu_s - 1))
    return {part: np.array(each) for part, each in errors.items()}


def block_work(point: Point, cluster: Cluster) -> Floats:
    """What a measured layer or head has to do [5], in the order of `Pass`."""
    config, batch = _config(point), int(point.sizes["batch"])
    job = Job(config, cluster, int(point.sizes["sequence"]), batch, "fp32", ENGINES["fivefold"])
    layouts = LayoutBatch.of([Layout(micro_batch=batch)])
    return work_of(job, _operations(point, job, layouts))[:, 0]


def _operations(point: Point, job: Job, layouts: LayoutBatch) -> Operations:
    if point.what == "head":
        return head_operations(job, layouts)
    return layer_operations(job, layouts, job.config.layer_kinds[0])


def _config(point: Point) -> ModelConfig:
    """The model that a part was taken of."""
    sizes = point.sizes
    keys = {
        "model_type": "mixtral" if "experts" in sizes else "llama",
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["width"],
        "num_hidden_layers": 1,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "rms_norm_eps": 1e-5,
    }
    if "experts" in sizes:
        keys |= {
            "num_local_experts": sizes["experts"],
            "num_experts_per_tok": sizes["experts_per_token"],
            "router_aux_loss_coef": 0.02,
        }
    return load_config(keys)


# --- single numbers ----------------------------------------------------------------------------


def _copy_byte(points: Sequence[Point]) -> float:
    """Of a copy of usual size."""
    copies = [p for p in points if p.what == "memory" and p.sizes["op"] == "copy"]
    usual = min(copies, key=lambda p: abs(log(int(p.sizes["bytes"]) / USUAL_BYTES)))
    return usual.cpu_s / (2 * int(usual.sizes["bytes"]))


def _optimizer_element(points: Sequence[Point]) -> float:
    """Of norm and update together, in the largest case that was measured."""
    largest: dict[str, tuple[int, float]] = {}
    for point in points:
        if point.what == "optimizer":
            elements = int(point.sizes["tensors"]) * int(point.sizes["elements"])
            op = str(point.sizes["op"])
            largest[op] = max(largest.get(op, (0, 0.0)), (elements, point.cpu_s / elements))
    return sum(seconds for _, seconds in largest.values())


# --- messages ----------------------------------------------------------------------------------


def message_records(points: Sequence[Point], cores: int) -> list[MessageRecord]:
    """Busy and waiting seconds of a call, by operation, ranks of the group and payload: of messages
    that all processes sent at the same time. Where there are more of them than cores, each waits
    for its turn on a core as well, which is no part of the message."""
    processes = max((_talking(p) for p in points if p.what == "message"), default=1)
    records = []
    for point in points:
        sizes = point.sizes
        talking = point.what == "message" and _talking(point) == processes
        if not talking or not sizes["bytes"] or sizes["op"] == "all_to_all_rows":
            continue
        turns = max(1.0, processes / cores)
        records.append(
            MessageRecord(
                op=sizes["op"],  # pyright: ignore[reportArgumentType]  # pydantic checks it
                ranks=int(sizes["size"]),
                bytes=int(sizes["bytes"]),
                busy_s=rounded(point.cpu_s),
                wait_s=rounded(max(0.0, point.wall_s - turns * point.cpu_s)),
            )
        )
    return records


def _talking(point: Point) -> int:
    return int(point.sizes["size"]) * int(point.sizes["groups"])
