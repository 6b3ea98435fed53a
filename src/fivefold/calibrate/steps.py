"""Whole training steps of a tiny model: what a step takes beside the layers, the messages and the
optimizer that were measured one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.calibrate.points import Point
from fivefold.cluster.cluster import Cluster
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import ModelConfig, load_config
from fivefold.plan.estimate import simulate
from fivefold.plan.job import ENGINES, Job

SEQUENCE_LENGTH, GLOBAL_BATCH, VOCABULARY = 128, 8, 512
STEPS = 8
LAYOUTS = ("mb2", "dp2 zero3 mb2")
"""One process, whose step has nothing else in it; and ZeRO 3, whose every layer is gathered and
reduced by FSDP2."""


def tiny_model() -> ModelConfig:
    return load_config(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        }
    )


def layout_of(text: str) -> Layout:
    """With the accumulation that makes up the batch."""
    layout = parse(text)
    sequences = GLOBAL_BATCH // layout.dp // layout.micro_batch
    return parse(f"{text} ga{sequences}")


def measure_step(text: str) -> Point:
    """Run by each process of the layout, once the default process group exists."""
    import torch
    import torch.distributed as dist

    from fivefold.parallel.comm import Recorder
    from fivefold.train.data import Samples
    from fivefold.train.runfile import Optimizer
    from fivefold.train.trainer import Trainer

    layout = layout_of(text)
    trainer = Trainer(
        tiny_model(),
        layout,
        Samples(_Tokens(), SEQUENCE_LENGTH, GLOBAL_BATCH, seed=0),  # pyright: ignore
        Optimizer(lr=1e-4),
        "fp32",
        seed=0,
        rank=dist.get_rank(),
        recorder=Recorder(),
        device=torch.device("cpu"),
    )
    walls, cpus = [], []
    for step in range(STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.step(step, 1e-4)
        cpus.append(time.process_time() - cpu)
        walls.append(time.perf_counter() - wall)
    wall_s, cpu_s = statistics.median(walls[2:]), statistics.median(cpus[2:])
    return Point("step", {"layout": text, "size": layout.world_size}, wall_s, cpu_s)


@dataclass(frozen=True)
class _Tokens:
    """Random tokens that stand for a token file."""

    eos_id: int = 0
    vocab_size: int = VOCABULARY
    tokens: int = 100_000

    @property
    def ids(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab_size, self.tokens).astype(np.uint16)


# --- what they say -----------------------------------------------------------------------------


def step_and_zero_call_s(points: Sequence[Point], cluster: Cluster) -> tuple[float, float]:
    """Seconds once a step, and of a gather or reduction of ZeRO beside message and copies: what is
    left of measured steps when the planned rest is taken off. `cluster` has all but these two."""
    alone, sharded = (
        next(p for p in points if p.what == "step" and p.sizes["layout"] == text)
        for text in LAYOUTS
    )
    step, _ = _left_s(alone, cluster)
    rest, calls = _left_s(sharded, cluster)
    return max(step, 0.0), max((rest - step) / calls, 0.0)


def _left_s(point: Point, cluster: Cluster) -> tuple[float, float]:
    """Processor seconds of a rank that are not planned, and its gathers and reductions."""
    layout = layout_of(str(point.sizes["layout"]))
    job = Job(
        tiny_model(),
        cluster.with_devices(layout.world_size),
        SEQUENCE_LENGTH,
        GLOBAL_BATCH,
        "fp32",
        ENGINES["fivefold"],
    )
    rank = simulate(job, [layout])[0].stages.time.ranks["first"]
    planned = float(np.ravel(rank.micro_batches * rank.busy + rank.once)[0])
    calls = sum(
        float(np.ravel(row.transfer.calls)[0])
        for row in rank.rows
        if row.transfer.op in ("all_gather", "reduce_scatter")
    )
    return point.cpu_s - planned, calls
