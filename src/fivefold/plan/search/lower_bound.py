"""A lower bound of the step time, far cheaper than the step time itself.

What a layer takes for one micro-batch, its exposed messages over tp and ep included, depends on
few degrees (`LAYER_DEGREES`), so it is worked out once for each of their combinations, with the
ranks where these messages are fastest. The bound is the pipeline of such layers: without context
parallel, data parallel and pipeline messages, without the optimizer, and without what selective
recomputation adds. A layout whose bound is above the time of a layout that fits cannot be better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.cluster.constants import Constants
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import ORDER
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.parallel.workload import ROLES, stage_work
from fivefold.plan.engines import Job
from fivefold.plan.time import accelerator as compute
from fivefold.plan.time.operations import embedding_operations, head_operations
from fivefold.plan.time.pipeline import pipeline_step_s
from fivefold.plan.time.step import estimate_time, machine_of

LAYER_DEGREES = ("tp", "sp", "cp", "ep", "etp", "micro_batch")
MANY_MICRO_BATCHES = 2**20
"""So many that what happens once a step takes no part of a micro-batch."""
PLACED_OTHERWISE = ("ring", "ulysses")
"""Axes whose messages the bound leaves out, for another rank order may make them faster."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro-batch, arrays over combinations of `LAYER_DEGREES`."""

    forward: Elementwise
    backward: Elementwise
    weight_gradient: Elementwise
    again: Elementwise  # what recomputation adds to the backward pass


class Bound:
    """Lower bounds of the step times of layouts of one job."""

    def __init__(self, job: Job, constants: Constants, layouts: LayoutBatch) -> None:
        """Prepares for these layouts: for any with the same combinations of `LAYER_DEGREES`."""
        self.job, self.constants = replace(job, mtp=False), constants
        if job.cluster.cores:  # so few layouts fit on one that all are looked at
            return
        self.widest = [int(getattr(layouts, name).max(initial=0)) + 1 for name in LAYER_DEGREES]
        self.codes, index = np.unique(self._code(layouts), return_index=True)
        few = _alone(layouts.take(index))
        kinds = dict.fromkeys(job.config.layer_kinds)
        self.layers = {kind: self._layer_time(few, kind) for kind in kinds}
        self.embedding = compute.seconds(job, constants, embedding_operations(job, few))
        self.head = compute.seconds(job, constants, head_operations(job, few))

    def of(self, layouts: LayoutBatch) -> NDArray[np.float64]:
        """Seconds that a step takes at least [n]."""
        if self.job.cluster.cores:
            return np.zeros(len(layouts))
        number = np.searchsorted(self.codes, self._code(layouts))
        stages = [self._stage(layouts, number, role) for role in ROLES]
        forward, backward, weight_gradient = np.array(stages).swapaxes(0, 1)
        pipeline = pipeline_step_s(
            layouts.schedule,
            layouts.pp,
            layouts.vpp,
            layouts.accumulation,
            forward,
            backward,
            weight_s=weight_gradient,
        )
        return np.asarray(
            machine_of(self.job, self.constants).whole_step_seconds(layouts, pipeline)
        )

    def _code(self, layouts: LayoutBatch) -> NDArray[np.int64]:
        code = np.zeros(len(layouts), np.int64)
        for name, size in zip(LAYER_DEGREES, self.widest, strict=True):
            code = code * size + getattr(layouts, name)
        return code

    def _layer_time(self, few: LayoutBatch, kind: LayerKind) -> LayerTime:
        """Of a layer of this kind, as the middle stage of a model of three such layers has it."""
        full = replace(few, recompute=np.full_like(few.recompute, "full"))
        forward, backward, weight_gradient = self._passes(few, kind)
        _, recomputing, _ = self._passes(full, kind)
        return LayerTime(forward, backward, weight_gradient, recomputing - backward)

    def _passes(
        self, few: LayoutBatch, kind: LayerKind
    ) -> tuple[Elementwise, Elementwise, Elementwise]:
        job = replace(self.job, config=_three_layers(self.job.config, kind))
        rank = estimate_time(job, few, self.constants).ranks["middle"]
        left_out: dict[str, Elementwise] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for row in rank.rows:
            if row.transfer.axis in PLACED_OTHERWISE:
                hidden = self.constants.contention * (row.seconds - row.exposed)
                left_out[row.transfer.phase] += (row.exposed + hidden) / MANY_MICRO_BATCHES
        layers = rank.layers
        return (
            layers.forward - left_out["forward"],
            layers.backward - left_out["backward"],
            layers.weight_gradient,
        )

    def _stage(self, layouts: LayoutBatch, number: Any, role: str) -> list[NDArray[np.float64]]:
        """Forward, backward and weight gradients of one virtual stage of a pipeline rank."""
        job = self.job
        work = stage_work(job.config, layouts, job.sequence_length, self.job.activations, role)
        forward = backward = weight_gradient = np.zeros(len(layouts))
        for (kind, count), recomputed in zip(work.layers, work.recomputed, strict=True):
            layer, count = self.layers[kind], count / work.chunks
            forward = forward + count * _at(layer.forward, number)
            backward = backward + count * _at(layer.backward, number)
            backward = backward + recomputed / work.chunks * _at(layer.again, number)
            weight_gradient = weight_gradient + count * _at(layer.weight_gradient, number)
        # Of two ranks the second is the middle one too, but no stage between has the head.
        ends = ((self.embedding, work.first), (self.head, work.last)) if role != "middle" else ()
        for outside, here in ends:
            forward = forward + here * _at(outside.forward, number)
            backward = backward + here * _at(outside.backward, number)
            weight_gradient = weight_gradient + here * _at(outside.weight_gradient, number)
        return [forward, backward, weight_gradient]


def _at(values: Any, number: NDArray[np.int64]) -> Any:
    """Some numbers are the same for all layouts."""
    return values[number] if np.ndim(values) else values


def _alone(layouts: LayoutBatch) -> LayoutBatch:
    """The layouts with the degrees that a layer's time depends on, and the least of the others."""
    one = np.ones_like(layouts.tp)
    ranks, experts = layouts.tp * layouts.cp, layouts.etp * layouts.ep
    return replace(
        layouts,
        pp=3 * one,
        vpp=one,
        dp=experts // np.gcd(ranks, experts),
        dp_replicate=one,
        zero=0 * one,
        ulysses=one,
        ring=layouts.cp,
        accumulation=MANY_MICRO_BATCHES * one,
        recompute=np.full_like(layouts.recompute, "none"),
        recompute_layers=0 * one,
        schedule=np.full_like(layouts.schedule, "1f1b"),
        order=ORDER,
        layers=None,
    )


def _three_layers(config: ModelConfig, kind: LayerKind) -> ModelConfig:
    moe = config.moe and replace(config.moe, layers=(kind.moe,) * 3)
    windows = config.windows and (kind.window,) * 3
    return replace(config, num_layers=3, moe=moe, windows=windows, mtp_layers=0)
