"""Data parallelism: how gradients are summed, and what ZeRO shards.

Gradients are sums over tokens; nothing is averaged here. The trainer divides once by the tokens
of the global batch, so uneven numbers of valid tokens are right by construction.

- ZeRO 0: gradients are added up in flat fp32 buffers, a buffer for each layer and kind of weight,
  and all-reduced once per step, during the last micro-batch's backward pass.
- ZeRO 1-3: PyTorch's FSDP2 over dp_shard x cp. Stage 1 reduce-scatters once a step, stage 2 every
  micro-batch (so a rank keeps its shard of the gradients only), stage 3 also gathers the weights
  anew for each pass. The weights of the next unit are gathered while one computes, the gradients
  of the last one reduced.

Expert weights are replicated over `edp` only and are summed and sharded over that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.model.moe import MoE
from fivefold.model.parameters import do_or_defer, local_tensor
from fivefold.model.transformer import Layer, Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending
from fivefold.parallel.data.fsdp import (
    RecordedAllGather,
    RecordedReduceScatter,
    Reduction,
    set_prefetches,
)
from fivefold.parallel.mesh import Axes
from fivefold.parallel.shards import Shards


@dataclass
class LocalParameter:
    """What the optimizer works on: this rank's values and gradient of one parameter."""

    name: str
    parameter: nn.Parameter  # with its global meaning, for checkpoints
    value: Tensor  # fp32, shares memory with the parameter
    grad: Tensor  # fp32, same shape
    replicas: int  # ranks of the world that hold these same values


class _GradientBuffer:
    """Gradients of some parameters that are summed over the same ranks, in one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter], axis: Axis) -> None:
        self.axis = axis
        self.parameters = parameters
        values = [local_tensor(p) for p in parameters]
        self.flat = torch.zeros(sum(v.numel() for v in values), device=values[0].device)
        self.pending: Pending | None = None
        parts = self.flat.split([v.numel() for v in values])
        for p, value, part in zip(parameters, values, parts, strict=True):
            p.main_grad = part.view_as(value)  # pyright: ignore[reportAttributeAccessIssue]
            p.main_value = value  # pyright: ignore[reportAttributeAccessIssue]

    def start(self) -> None:
        self.pending = comm.start_all_reduce(self.flat, self.axis)

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None

    def begin_step(self) -> None:
        self.flat.zero_()
        for p in self.parameters:
            p.compute_copy = None  # pyright: ignore[reportAttributeAccessIssue]


class _BackwardDone(torch.autograd.Function):
    """Identity at a layer's input. Autograd runs what was recorded later first, so when this
    node's turn comes in the backward pass, the layer's weights have their gradients, or those are
    deferred and what is done comes after them."""

    @staticmethod
    def forward(ctx, x: Tensor, done) -> Tensor:
        ctx.done = done
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        do_or_defer(ctx.done)
        return grad, None


class DataParallel:
    """Gradient accumulation and reduction of one stage."""

    def __init__(self, stage: Stage, axes: Axes, shards: Shards, dtype: torch.dtype) -> None:
        self.stage, self.axes, self.shards = stage, axes, shards
        self.zero = axes.layout.zero
        self._last_micro_batch = False
        self._buffers: list[_GradientBuffer] = []
        self._sharded: list[FSDPModule] = []
        self._sharded_parameters: list[nn.Parameter] = []
        self._reduction = Reduction()
        if self.zero == 0:
            self._buffer_all()
        else:
            self._shard_all(dtype)

    # ZeRO 0

    def _buffer_all(self) -> None:
        if hasattr(self.stage.model, "embed_tokens"):
            self._buffer([self.stage.model.embed_tokens.weight], self.axes.dp)
        for layer in self.stage.layers.values():
            buffers = self._buffer(_experts(layer), self.axes.edp)
            buffers += self._buffer(_dense(layer), self.axes.dp)
            self._start_when_backward_done(layer, buffers)
        if self.stage.last:
            head = self._buffer(_head(self.stage), self.axes.dp)
            self._start_when_backward_done(self.stage.model.norm, head)

    def _buffer(self, parameters: list[nn.Parameter], axis: Axis) -> list[_GradientBuffer]:
        made = [_GradientBuffer(parameters, axis)] if parameters else []
        self._buffers += made
        return made

    def _start_when_backward_done(self, module: nn.Module, buffers: list[_GradientBuffer]) -> None:
        """Sum the buffers once the last micro-batch has gone backward through the module."""

        def start() -> None:
            if self._last_micro_batch:
                for buffer in reversed(buffers):
                    buffer.start()

        def hook(module: nn.Module, inputs: tuple):
            x, *rest = inputs
            return (_BackwardDone.apply(x, start), *rest) if x.requires_grad else inputs

        module.register_forward_pre_hook(hook)

    # ZeRO 1-3

    def _shard_all(self, dtype: torch.dtype) -> None:
        layers = list(self.stage.layers.values())
        for layer in layers:
            experts = _experts(layer)
            if isinstance(layer.mlp, MoE) and self.axes.edp_shard.size > 1:
                mesh = self.axes.expert_mesh
                self._shard(layer.mlp.experts, mesh, self.axes.edp_shard, dtype)
            else:  # too few replicas to shard over: as under ZeRO 0
                self._start_when_backward_done(layer, self._buffer(experts, self.axes.edp))
            self._shard(layer, self.axes.dense_mesh, self.axes.dp_shard, dtype, experts)
        self._shard(self.stage, self.axes.dense_mesh, self.axes.dp_shard, dtype)
        if self.stage.first and not self.stage.last:
            # An embedding's backward pass does not need its weights.
            self._sharded[-1].set_unshard_in_backward(False)
        set_prefetches(self.stage, layers)
        self._sharded_parameters = [p for p in self.stage.parameters() if isinstance(p, DTensor)]

    def _shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        axis: Axis,
        dtype: torch.dtype,
        ignored: Sequence[nn.Parameter] = (),
    ) -> None:
        assert mesh is not None
        # Without a pipeline the backward pass follows the head at once: keep its weights.
        at_once = self.axes.layout.backward_follows_at_once
        reshard = self.zero == 3 and not (module is self.stage and at_once)
        fully_shard(
            module,
            mesh=mesh["fsdp"],
            reshard_after_forward=reshard,
            # Counts and angles among the inputs stay in fp32.
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            ignored_params=set(ignored),
        )
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(RecordedAllGather(axis))
        module.set_custom_reduce_scatter(RecordedReduceScatter(axis, self._reduction))
        if local_tensor(next(module.parameters())).is_cpu:  # elsewhere FSDP2 has streams for it
            module._set_unshard_async_op(True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        self._sharded.append(module)

    # One step

    def begin_step(self) -> None:
        for buffer in self._buffers:
            buffer.begin_step()
        self._reduction.begin_step()
        for p in self.stage.parameters():
            p.grad = None

    def begin_backward(self, last_micro_batch: bool, weights: bool = True) -> None:
        """Say, before each micro-batch's backward pass, whether it is the step's last to give
        weights their gradients, and whether it does or defers them."""
        self._last_micro_batch = last_micro_batch
        for p in self._sharded_parameters:
            p.grad = None  # else FSDP2 adds to it at once, and has to wait for the message
        for module in self._sharded:
            reduces = weights and (last_micro_batch or self.zero >= 2)
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_reshard_after_backward(last_micro_batch or self.zero == 3, recurse=False)

    def end_backward(self) -> None:
        """After the last micro-batch's backward pass, start the sums that nothing started yet."""
        if self._last_micro_batch:
            for buffer in self._buffers:
                if buffer.pending is None:
                    buffer.start()

    def end_weights(self) -> None:
        """After gradients that were deferred, which FSDP2's own hooks have missed: add them up or
        reduce them as after a backward pass (as torch.distributed.pipelining does, by hand)."""
        for module in reversed(self._sharded):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.post_backward()
        if self._sharded:
            # Of the stage, which is the root of its units: it waits for their reductions.
            self._sharded[-1]._get_fsdp_state()._root_post_backward_final_callback()
        self.end_backward()

    def finish(self) -> list[LocalParameter]:
        """Complete all sums over ranks; returns parameters with their final gradients."""
        for buffer in reversed(self._buffers):  # as the backward pass has started them
            buffer.wait()
        self._reduction.wait()
        parameters = list(self._local_parameters())
        if self.zero > 0:
            self._sum_replicas(parameters)
        self._sum_parts(parameters)
        self._sum_tied(parameters)
        return parameters

    def _local_parameters(self) -> Iterator[LocalParameter]:
        stage_size = self.axes.layout.world_size // self.axes.layout.pp
        for name, p in self.stage.named_parameters():
            replicas = stage_size // self.shards.pieces(name)
            main_grad = getattr(p, "main_grad", None)
            if main_grad is None:
                axis = self.axes.edp_shard if ".experts." in name else self.axes.dp_shard
                replicas //= axis.size
                assert isinstance(p.grad, DTensor), f"no gradient for {name}"
                main_grad = local_tensor(p.grad)
            if self._is_tied(name):
                replicas *= 1 + (self.axes.layout.pp > 1)
            yield LocalParameter(name, p, local_tensor(p), main_grad, replicas)

    def _is_tied(self, name: str) -> bool:
        return self.stage.tied and name == "model.embed_tokens.weight"

    def _sum_replicas(self, parameters: list[LocalParameter]) -> None:
        """HSDP: FSDP2 summed inside a replica; sum the shards over the replicas, once a step."""
        sharded = [x.grad for x in parameters if not hasattr(x.parameter, "main_grad")]
        _sum_together(sharded, self.axes.dp_replicate)

    def _sum_parts(self, parameters: list[LocalParameter]) -> None:
        """Weights that are whole on several tp ranks, each of which used them on a part."""
        for axis in (self.axes.tp, self.axes.kv_copies):
            named = [x.grad for x in parameters if self.shards.partial.get(x.name) is axis]
            _sum_together(named, axis)

    def _sum_tied(self, parameters: list[LocalParameter]) -> None:
        """A tied embedding lives on the first and on the last stage; here, on different ranks."""
        _sum_together([x.grad for x in parameters if self._is_tied(x.name)], self.axes.tied)


def sum_copies(parameters: list[LocalParameter]) -> None:
    """A rank of a V with both ends of the pipeline holds a tied embedding twice."""
    first: dict[str, LocalParameter] = {}
    for x in parameters:
        if (one := first.setdefault(x.name, x)) is not x:
            one.grad += x.grad
            x.grad.copy_(one.grad)


def _head(stage: Stage) -> list[nn.Parameter]:
    modules = [stage.model.norm] + ([] if stage.tied else [stage.lm_head])
    return [p for module in modules for p in module.parameters()]


def _experts(layer: Layer) -> list[nn.Parameter]:
    return list(layer.mlp.experts.parameters()) if isinstance(layer.mlp, MoE) else []


def _dense(layer: Layer) -> list[nn.Parameter]:
    experts = {id(p) for p in _experts(layer)}
    return [p for p in layer.parameters() if id(p) not in experts]


def _sum_together(grads: list[Tensor], axis: Axis) -> None:
    """Sum several small gradients over an axis in one message."""
    if axis.size == 1 or not any(g.numel() for g in grads):  # a last shard can be empty
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    comm.all_reduce(flat, axis)
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
