"""One rank of a training run: built from a model and a layout, it does one step at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.layout.notation import Layout
from fivefold.layout.stages import rank_stages, split_layers, stage_ranges
from fivefold.ledger import Ledger
from fivefold.model.config import ModelConfig
from fivefold.model.dropout import Dropout
from fivefold.model.transformer import MicroBatch, Stage, rotary_angles
from fivefold.parallel import comm
from fivefold.parallel.comm import Recorder
from fivefold.parallel.context import run as context
from fivefold.parallel.context.positions import context_positions
from fivefold.parallel.data.run import DataParallel, LocalParameter, sum_copies
from fivefold.parallel.expert import run as expert
from fivefold.parallel.mesh import make_axes
from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.run import PipelineRank, StepSums
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.shards import Shards, materialise, split_weights
from fivefold.parallel.tensor import run as tensor
from fivefold.step_trace import StepTrace
from fivefold.train.data.samples import IGNORED, Batch, Samples
from fivefold.train.failures import status
from fivefold.train.optimizer import AdamW
from fivefold.train.runfile import Optimizer

if TYPE_CHECKING:
    from fivefold.train.prepare import Prepared

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank."""

    loss: float  # mean over the valid tokens of the global batch
    balance_loss: float  # of the mixtures, already scaled by their coefficient
    grad_norm: float  # before clipping
    tokens: int  # valid ones in the global batch
    skipped: bool  # the gradient was not finite, and nothing was changed


class Trainer:
    """This rank's stages, optimizer and place in the layout.

    Every rank of the world makes one, after the default process group exists. Legality of the
    layout has been checked (`fivefold.layout.legality`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        samples: Samples,
        optimizer: Optimizer,
        precision: str,
        seed: int,
        rank: int,
        recorder: Recorder,
        device: torch.device,
        dropout: float = 0.0,
    ) -> None:
        self.config, self.layout, self.samples, self.device = config, layout, samples, device
        self.clip = optimizer.clip
        self.dropout = Dropout(dropout, seed)
        self.recorder = recorder
        self.axes = make_axes(layout, rank, recorder, config.num_kv_heads)
        self.dtype = DTYPES[precision]
        self.shards = Shards()
        own_stages = rank_stages(layout, self.axes.coordinates["pp"])
        self.stages = {s: self._build_stage(s, seed) for s in own_stages}
        self.data = {
            s: DataParallel(stage, self.axes, self.shards, self.dtype)
            for s, stage in self.stages.items()
        }
        schedule = build(layout.schedule, layout.pp, layout.vpp, layout.accumulation)
        validate(schedule)
        self.pipeline = PipelineRank(
            schedule,
            self.stages,
            self.data,
            self.axes,
            (self._hidden_sequence(), layout.micro_batch, config.hidden_size),
            self.dtype,
            device,
        )
        self.optimizer = AdamW(self.stages.values(), optimizer)
        self.ledger = Ledger()
        self.step_trace = StepTrace()
        self._angles: tuple[Tensor, Tensor] | None = None

    def _build_stage(self, index: int, seed: int) -> Stage:
        layout = self.layout
        layers = layout.layers or split_layers(self.config.num_layers, layout.stages)
        with torch.device("meta"):
            stage = Stage(
                self.config,
                stage_ranges(layers)[index],
                first=index == 0,
                last=index == layout.stages - 1,
                recompute=layout.recompute,
                recompute_layers=layout.recompute_layers,
                dtype=self.dtype,
                dropout=self.dropout,
            )
        tensor.apply(stage, self.axes)
        context.apply(stage, self.axes)
        expert.apply(stage, self.axes)
        split_weights(stage, self.axes, self.shards)
        materialise(stage, self.shards, seed, self.device)
        return stage

    def _hidden_sequence(self) -> int:
        """Positions of a sequence whose hidden states this rank holds between layers."""
        split = self.layout.cp * (self.layout.tp if self.layout.sp else 1)
        return self.samples.sequence_length // split

    # One step

    def step(self, step: int, lr: float) -> StepResult:
        """Forward, backward and optimizer step number `step` (from 0) with learning rate `lr`."""
        sums, parameters = self.gradients(step)
        result = self.finish_step(sums, parameters, lr)
        self.step_trace.end()
        return result

    def finish_step(
        self, sums: StepSums, parameters: list[LocalParameter], lr: float
    ) -> StepResult:
        """The optimizer's part of a step: clipping and AdamW."""
        with self.step_trace.doing("optimizer"):
            totals = self._total(sums, parameters)
            result = self._result(totals)
            if not result.skipped:
                clip = 1.0
                if self.clip is not None:
                    clip = min(1.0, self.clip / (result.grad_norm + 1e-6))
                self.optimizer.step(parameters, lr, grad_scale=clip / result.tokens)
        return result

    def gradients(self, step: int) -> tuple[StepSums, list[LocalParameter]]:
        """Forward and backward passes: gradients of the sum of the global batch's token losses."""
        self.recorder.ledger = self.ledger = Ledger()
        self.recorder.step_trace = self.step_trace = StepTrace()
        self.recorder.phase = "forward"
        with self.step_trace.doing("data"):
            micro_batches = self._read(step)
        sums = self.pipeline.run_step(micro_batches)
        self.recorder.phase = "optimizer"
        with self.step_trace.doing("optimizer"):
            parameters = [x for data in self.data.values() for x in data.finish()]
            sum_copies(parameters)
        return sums, parameters

    def _read(self, step: int) -> list[MicroBatch]:
        place, layout = self.axes.coordinates, self.layout
        ids = self.samples.ids_for(
            step, place["dp"], layout.dp, layout.micro_batch, layout.accumulation
        )
        places = np.arange(layout.global_batch).reshape(-1, layout.dp, layout.micro_batch)
        batches = [self.samples.read(row) for row in ids]
        self._valid_tokens = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
        return [
            self._micro_batch(batch, place_in_batch, step)
            for batch, place_in_batch in zip(batches, places[:, place["dp"]], strict=True)
        ]

    def _micro_batch(self, batch: Batch, places: np.ndarray, step: int) -> MicroBatch:
        place, layout = self.axes.coordinates, self.layout
        length = batch.tokens.shape[1]
        held = context_positions(
            length, layout.ring, place["ring"], layout.ulysses, place["ulysses"]
        )

        def part(x: np.ndarray) -> Tensor:  # [batch, sequence] -> [part of the sequence, batch]
            return torch.from_numpy(np.ascontiguousarray(x[:, held].T)).to(self.device)

        mask = None
        if self.samples.isolate_documents:
            documents = torch.from_numpy(batch.documents).to(self.device)
            mask = context.document_masks(documents, layout, place["ring"])
            angles = rotary_angles(self.config, part(batch.positions))
        else:
            if self._angles is None:
                positions = torch.from_numpy(held).to(self.device).unsqueeze(1)
                self._angles = rotary_angles(self.config, positions)
            angles = self._angles
        token_ids = part(places[:, None] * length + np.arange(length))
        if layout.sp:
            token_ids = token_ids.chunk(layout.tp)[place["tp"]]
        valid = (batch.labels != IGNORED).sum(1).astype(np.float32)
        return MicroBatch(
            tokens=part(batch.tokens),
            labels=part(batch.labels),
            angles=angles,
            mask=mask,
            sequence_length=length,
            valid=torch.from_numpy(valid).to(self.device),
            token_ids=token_ids,
            step=step,
        )

    def _total(self, sums: StepSums, parameters: list[LocalParameter]) -> Tensor:
        """Loss, valid tokens, balance loss and squared gradient norm, summed over the world in
        one message. What several ranks hold alike is divided by their number first."""
        world_size, layout = self.layout.world_size, self.layout
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        # In fp64: of a million elements PyTorch's fp32 norm is wrong in the fourth digit on CPUs.
        norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            [x.grad for x in parameters], 2, dtype=torch.float64
        )
        for x, norm in zip(parameters, norms, strict=True):
            squares += norm.square() / x.replicas
        tokens = torch.tensor(
            self._valid_tokens * layout.dp / world_size, dtype=torch.float64, device=self.device
        )
        loss, balance = sums.loss.double() / layout.tp, sums.balance.double()
        return comm.all_reduce(torch.stack([loss, tokens, balance, squares]), self.axes.world)

    def _result(self, totals: Tensor) -> StepResult:
        loss, tokens, balance, squares = totals.tolist()
        count = round(tokens)
        scale = max(count, 1)
        return StepResult(
            loss=loss / scale,
            balance_loss=balance / scale,
            grad_norm=math.sqrt(squares) / scale if squares >= 0 else math.nan,
            tokens=count,
            skipped=count == 0 or not math.isfinite(squares),
        )


def make_trainer(prepared: Prepared, optimizer: Optimizer, precision: str) -> Trainer:
    """This rank's trainer of a prepared run, once the default process group exists. From now on
    `status` has this rank's place in the layout and the call it is in."""
    device = torch.device(prepared.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    trainer = Trainer(
        prepared.config,
        prepared.layout,
        prepared.samples,
        optimizer,
        precision,
        prepared.run.seed,
        dist.get_rank(),
        Recorder(on_call=partial(setattr, status, "doing")),
        device,
        prepared.run.dropout,
    )
    status.coordinates = trainer.axes.describe()
    return trainer
