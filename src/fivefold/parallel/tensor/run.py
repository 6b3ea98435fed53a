"""Tensor parallelism, and megatron sequence parallelism on the same ranks: how it runs.

The first matrix of a pair is split by columns (output features), the second by rows (input
features), so that a pair needs one sum over the ranks; attention is split by heads, embedding,
head and loss by vocabulary (Megatron-LM, arXiv:1909.08053). With megatron sequence parallelism
the activations between the pairs are split along the sequence, and the sum becomes a
reduce-scatter with an all-gather before the next pair (arXiv:2205.05198).
"""

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
    """Activations are the same on all tp ranks; their gradient is summed over them."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, grad: Tensor) -> Pending:
        return comm.start_all_reduce(grad.contiguous(), self.axis)


class SequenceSlices:
    """Each tp rank has a slice of the sequence; the linear layers need all of it."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def gather(self, x: Tensor) -> Tensor:
        return comm.all_gather(x.contiguous(), self.axis)

    def reduce(self, grad: Tensor) -> Pending:
        return comm.start_reduce_scatter(grad, self.axis)


class _SumOverRanks(torch.autograd.Function):
    """Partial results in, their sum out, on every rank; the gradient is every rank's already."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return comm.all_reduce(x.contiguous(), axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _SumToSequenceSlices(torch.autograd.Function):
    """Partial results of the whole sequence in, this rank's slice of their sum out."""

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
    """Join the loss's row maxima ("max") or sums ("sum") over the vocabulary's parts."""
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
    rows = -(-stage.config.vocab_size // axes.tp.size)
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
