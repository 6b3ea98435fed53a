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
from torch.distributed.tensor import Replicate, Shard

from fivefold.model.layers import MLP, Attention
from fivefold.model.moe import MoE
from fivefold.model.transformer import Layer, Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending
from fivefold.parallel.mesh import Axes
from fivefold.parallel.shards import Shards


class ReplicatedEntry:
    """Activations are the same on all tp ranks; their gradient is summed over them."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, grad: Tensor) -> Pending:
        return comm.start_all_reduce(grad.contiguous(), self.axis)


class SequenceEntry:
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


def apply(stage: Stage, axes: Axes, shards: Shards) -> None:
    """Split a stage (on the meta device) over the tp ranks."""
    if axes.tp.size > 1:
        _TensorSplit(axes, shards).split(stage)


class _TensorSplit:
    def __init__(self, axes: Axes, shards: Shards) -> None:
        assert axes.dense_mesh is not None
        self.axes, self.shards, self.sp = axes, shards, axes.layout.sp
        if self.sp:
            self.entry = SequenceEntry(axes.tp)
            self.leave = partial(sum_to_sequence_slices, axis=axes.tp)
        else:
            self.entry = ReplicatedEntry(axes.tp)
            self.leave = partial(sum_over_ranks, axis=axes.tp)
        mesh = axes.dense_mesh
        self.kv_mesh = None
        if "kv" in (mesh.mesh_dim_names or ()):
            self.kv_mesh = mesh["kv", "copies"]
            self.mesh = self.kv_mesh._flatten("tp")
        else:
            self.mesh = mesh["tp"]

    def split(self, stage: Stage) -> None:
        for index, layer in stage.layers.items():
            self._split_layer(layer, f"model.layers.{index}")
        rows = -(-_vocab_size(stage) // self.axes.tp.size) if stage.first or stage.last else 0
        first_id = rows * self.axes.tp.index
        if hasattr(stage.model, "embed_tokens"):
            stage.model.embed_tokens.first_id = first_id
            stage.model.embed_tokens.leave = self.leave
            self._by_rows("model.embed_tokens.weight")
        if stage.last:
            stage.first_id = first_id
            stage.entry = self.entry
            stage.join = partial(join_vocabulary, axis=self.axes.tp)
            if not stage.tied:
                self._by_rows("lm_head.weight")
            self._partial_under_sp("model.norm.weight")

    def _split_layer(self, layer: Layer, name: str) -> None:
        self._split_attention(layer.self_attn, f"{name}.self_attn")
        self._partial_under_sp(f"{name}.input_layernorm.weight")
        self._partial_under_sp(f"{name}.post_attention_layernorm.weight")
        if isinstance(layer.mlp, MLP):
            self._split_mlp(layer.mlp, f"{name}.mlp")
            return
        assert isinstance(layer.mlp, MoE)
        # Each tp rank routes its own slice of the tokens.
        self.shards.partial[f"{name}.mlp.gate.weight"] = self.axes.tp
        if hasattr(layer.mlp, "shared_expert"):
            self._split_mlp(layer.mlp.shared_expert, f"{name}.mlp.shared_expert")
        if hasattr(layer.mlp, "shared_expert_gate"):
            self._partial_under_sp(f"{name}.mlp.shared_expert_gate.weight")

    def _split_attention(self, attention: Attention, name: str) -> None:
        attention.entry, attention.leave = self.entry, self.leave
        has_bias = attention.q_proj.bias is not None
        for kind in ("weight", "bias") if has_bias else ("weight",):
            self._by_rows(f"{name}.q_proj.{kind}")
            for projection in ("k_proj", "v_proj"):
                self._kv_by_rows(f"{name}.{projection}.{kind}")
        self.shards.split(f"{name}.o_proj.weight", self.mesh, Shard(1))
        if attention.o_proj.bias is not None:
            self._partial_under_sp(f"{name}.o_proj.bias")
        if attention.qk_norm:
            # The norm's weight is shared by all heads, and each rank has some of them.
            for norm in ("q_norm", "k_norm"):
                self.shards.partial[f"{name}.{norm}.weight"] = self.axes.tp

    def _split_mlp(self, mlp: MLP, name: str) -> None:
        mlp.entry, mlp.leave = self.entry, self.leave
        has_bias = mlp.gate_proj.bias is not None
        for kind in ("weight", "bias") if has_bias else ("weight",):
            self._by_rows(f"{name}.gate_proj.{kind}")
            self._by_rows(f"{name}.up_proj.{kind}")
        self.shards.split(f"{name}.down_proj.weight", self.mesh, Shard(1))
        if has_bias:
            self._partial_under_sp(f"{name}.down_proj.bias")

    def _by_rows(self, name: str) -> None:
        self.shards.split(name, self.mesh, Shard(0))

    def _kv_by_rows(self, name: str) -> None:
        """With fewer kv heads than ranks, neighbours hold a copy of one and sum its gradient."""
        if self.axes.kv_copies.size == 1:
            self._by_rows(name)
            return
        self.shards.partial[name] = self.axes.kv_copies
        if self.kv_mesh is not None:  # else there is one head, and all ranks have it whole
            self.shards.split(name, self.kv_mesh, Shard(0), Replicate())

    def _partial_under_sp(self, name: str) -> None:
        """A weight used on slices of the sequence gets a part of its gradient on each rank."""
        if self.sp:
            self.shards.partial[name] = self.axes.tp


def _vocab_size(stage: Stage) -> int:
    table = stage.model.embed_tokens if hasattr(stage.model, "embed_tokens") else stage.lm_head
    return table.weight.shape[0]
