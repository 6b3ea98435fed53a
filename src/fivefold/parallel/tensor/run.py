"""Tensor parallelism: the collectives of the tp ranks (see the package for the scheme)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fivefold.model.layers import MLP, Attention, Embedding
from fivefold.model.transformer import Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending
from fivefold.parallel.mesh import Axes


class ReplicatedInput:
    """Without sp: all tp ranks have the same x [s, b, hidden]; its gradient is summed over them."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, grad: Tensor) -> Pending:
        return comm.start_all_reduce(grad.contiguous(), self.axis)


class SequenceSlices:
    """With sp: a tp rank has a slice x [s / tp, b, hidden]; linear layers need [s, b, hidden]."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def gather(self, x: Tensor) -> Tensor:
        return comm.all_gather(x.contiguous(), self.axis)

    def reduce(self, grad: Tensor) -> Pending:
        return comm.start_reduce_scatter(grad, self.axis)


class _SumOverRanks(torch.autograd.Function):
    """Sums partial results [s, b, hidden] over ranks. All ranks have the same gradient, so the
    backward pass sends nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return comm.all_reduce(x.contiguous(), axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _SumToSequenceSlices(torch.autograd.Function):
    """Partial results [s, b, hidden] -> this rank's slice [s / tp, b, hidden] of their sum."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return comm.reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return comm.all_gather(grad.contiguous(), ctx.axis), None


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    return _SumOverRanks.apply(x, axis)


def sum_to_sequence_slices(x: Tensor, axis: Axis) -> Tensor:
    return _SumToSequenceSlices.apply(x, axis)


def join_vocabulary(x: Tensor, op: str, axis: Axis) -> Tensor:
    """Join the loss's row maxima (`op` "max") or sums ("sum") over the vocabulary's parts."""
    return comm.start_all_reduce(x.contiguous(), axis, op).wait()


def apply(stage: Stage, axes: Axes) -> None:
    """Put the collectives of the tp ranks into the hooks of a stage."""
    if axes.tp.size == 1:
        return
    if axes.layout.sp:
        input_collective = SequenceSlices(axes.tp)
        output_collective = partial(sum_to_sequence_slices, axis=axes.tp)
    else:
        input_collective = ReplicatedInput(axes.tp)
        output_collective = partial(sum_over_ranks, axis=axes.tp)
    rows = -(-stage.config.vocab_size // axes.tp.size)  # of the vocabulary, as torch.chunk splits
    stage.first_id = rows * axes.tp.index
    stage.input_collective = input_collective
    stage.join = partial(join_vocabulary, axis=axes.tp)
    for module in stage.modules():
        if isinstance(module, Attention | MLP):
            module.input_collective = input_collective
            module.output_collective = output_collective
        elif isinstance(module, Embedding):
            module.output_collective = output_collective
            module.first_id = stage.first_id
