"""One process: real parts of a model, forward and backward. They check what is fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.calibrate.clock import Clock
from fivefold.calibrate.grid import Grid
from fivefold.calibrate.kernels import DTYPES
from fivefold.calibrate.points import Point
from fivefold.layout.notation import parse
from fivefold.model.config import ModelConfig, load_config
from fivefold.model.moe import MoE
from fivefold.model.transformer import MicroBatch, Stage, rotary_angles
from fivefold.parallel.comm import Recorder
from fivefold.parallel.data.run import DataParallel
from fivefold.parallel.mesh import make_axes
from fivefold.parallel.shards import Shards, materialise


def blocks(grid: Grid, clock: Clock) -> Iterator[Point]:
    """A decoder layer, the mixture in it, the embedding, and the last norm with head and loss."""
    precision = "bf16" if clock.device.type == "cuda" else "fp32"
    for case in grid.models:
        yield from _Model(load_config(case["model"]), case, clock, precision).points()


class _Model:
    """The parts of one model at one micro-batch."""

    def __init__(
        self, config: ModelConfig, case: dict[str, Any], clock: Clock, precision: str
    ) -> None:
        self.config, self.clock, self.precision = config, clock, precision
        self.dtype, self.device = DTYPES[precision], clock.device
        self.axes = make_axes(parse(""), 0, Recorder(), kv_heads=1)  # of one process: no groups
        self.sequence, self.batch = case["sequence"], case["batch"]
        self.sizes = _sizes(config, self.sequence, self.batch)
        positions = torch.arange(self.sequence, device=self.device).unsqueeze(1)
        ids = torch.randint(config.vocab_size, (self.sequence, self.batch), device=self.device)
        self.micro_batch = MicroBatch(
            tokens=ids,
            labels=ids,
            angles=rotary_angles(config, positions),
            mask=None,
            sequence_length=self.sequence,
            valid=torch.full((self.batch,), float(self.sequence), device=self.device),
            token_ids=ids,
            step=0,
        )

    def points(self) -> Iterator[Point]:
        nothing, all_layers = range(0, 0), range(0, 1)
        hidden = torch.randn(
            self.sequence, self.batch, self.config.hidden_size, device=self.device
        ).to(self.dtype)
        x = hidden.requires_grad_()
        layer = self._stage(all_layers, first=False, last=False)
        yield from self._measure("layer", lambda: layer(x, self.micro_batch), x)
        mlp = layer.layers["0"].mlp
        if isinstance(mlp, MoE):
            b = self.micro_batch
            call = lambda: mlp(x, b.sequence_length, b.valid)  # noqa: E731
            yield from self._measure("mixture", call, x)
        first = self._stage(nothing, first=True, last=False)
        ids = self.micro_batch.tokens
        yield from self._measure("embedding", lambda: first(ids, self.micro_batch), None)
        last = self._stage(nothing, first=False, last=True)
        yield from self._measure("head", lambda: last(x, self.micro_batch), x)

    def _stage(self, layers: range, first: bool, last: bool) -> Stage:
        """As the trainer builds it, with the gradient buffers of ZeRO 0."""
        with torch.device("meta"):
            stage = Stage(self.config, layers, first, last, dtype=self.dtype)
        shards = Shards()
        materialise(stage, shards, seed=0, device=self.device)
        DataParallel(stage, self.axes, shards, self.dtype)
        return stage

    def _measure(
        self, what: str, call: Callable[[], tuple[Tensor, Tensor | None]], x: Tensor | None
    ) -> Iterator[Point]:
        made: list[Tensor] = []
        grads: list[Tensor] = []

        def forward() -> None:
            y, balance = call()
            made[:] = [y] if balance is None else [y, balance]

        def backward() -> None:
            if not grads:
                grads[:] = [torch.ones_like(y) * 1e-3 for y in made]
            if x is not None:
                x.grad = None
            torch.autograd.backward(made, grads)

        timed = self.clock.two(forward, backward)
        for part, s in zip(("forward", "backward"), timed, strict=True):
            sizes = {"part": part, **self.sizes}
            yield Point(what, sizes, s.wall_s, s.cpu_s, self.precision)


def _sizes(config: ModelConfig, sequence: int, batch: int) -> dict[str, int | str]:
    sizes: dict[str, int | str] = {
        "sequence": sequence,
        "batch": batch,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
    }
    if config.moe is None:
        return sizes | {"width": config.intermediate_size}
    return sizes | {
        "width": config.moe.expert_intermediate_size,
        "experts": config.moe.num_experts,
        "experts_per_token": config.moe.experts_per_token,
    }
