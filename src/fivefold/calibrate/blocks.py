"""One process: real parts of a model, forward and backward. They check what is fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fivefold.calibrate.clock import Clock
from fivefold.calibrate.grid import Block, Grid
from fivefold.calibrate.kernels import DTYPES
from fivefold.calibrate.points import Point
from fivefold.layout.notation import parse
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.model.moe import MoE
from fivefold.model.transformer import MicroBatch, Stage, rotary_angles
from fivefold.parallel.comm import Recorder
from fivefold.parallel.data.run import DataParallel
from fivefold.parallel.mesh import make_axes
from fivefold.parallel.shards import Shards, materialise


def blocks(grid: Grid, clock: Clock) -> Iterator[Point]:
    """A decoder layer, the mixture in it, the embedding, and the last norm with head and loss."""
    precision = "bf16" if clock.device.type == "cuda" else "fp32"
    for block in grid.blocks:
        yield from _Model(block, clock, precision).points()


class _Model:
    """The parts of one model at one micro-batch."""

    def __init__(self, block: Block, clock: Clock, precision: str) -> None:
        config = self.config = load_config(block.model)
        self.clock, self.precision = clock, precision
        self.dtype, self.device = DTYPES[precision], clock.device
        self.axes = make_axes(parse(""), 0, Recorder(), kv_heads=1)  # of one process: no groups
        self.sequence, self.batch = block.sequence, block.batch
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
        batch = self.micro_batch
        shape = (self.sequence, self.batch, self.config.hidden_size)
        x = torch.randn(shape, device=self.device).to(self.dtype).requires_grad_()
        layer = self._stage(range(1), first=False, last=False)
        yield from self._measure("layer", partial(layer, x, batch), x)
        mlp = layer.layers["0"].mlp
        if isinstance(mlp, MoE):
            call = partial(mlp, x, batch.sequence_length, batch.valid)
            yield from self._measure("mixture", call, x)
        first = self._stage(range(0), first=True, last=False)
        yield from self._measure("embedding", partial(first, batch.tokens, batch), None)
        last = self._stage(range(0), first=False, last=True)
        yield from self._measure("head", partial(last, x, batch), x)

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
