"""FSDP2 with the messages of `comm`: its gathers and reductions, and what it prefetches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fivefold.model.moe import MoE
from fivefold.model.transformer import Layer, Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending


def set_prefetches(stage: Stage, layers: list[Layer]) -> None:
    """Tell each unit which ones to gather the weights of while it computes.

    FSDP2's own guess follows the order of the last forward passes, which under a pipeline is that
    of other micro-batches. A layer's experts are the first that its backward pass needs, so they
    are gathered with it then.
    """
    experts = {layer: _sharded_experts(layer) for layer in layers}
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        _set_prefetch(layer, "forward", [*experts[layer], *([after] if after else [])])
    for layer, before in zip(layers, [None, *layers], strict=False):
        _set_prefetch(layer, "backward", [before, *experts[before]] if before else [])
        for unit in experts[layer]:
            _set_prefetch(unit, "backward", [])
    _set_prefetch(stage, "forward", layers[:1])
    _set_prefetch(stage, "backward", [unit for x in layers[-1:] for unit in (x, *experts[x])])


def _sharded_experts(layer: Layer) -> list[nn.Module]:
    mixture = [layer.mlp.experts] if isinstance(layer.mlp, MoE) else []
    return [experts for experts in mixture if isinstance(experts, FSDPModule)]


def _set_prefetch(unit: nn.Module, phase: str, others: Sequence[nn.Module]) -> None:
    assert isinstance(unit, FSDPModule)
    if phase == "forward":
        unit.set_modules_to_forward_prefetch(list(others))  # pyright: ignore[reportArgumentType]
    else:  # with none FSDP2 would guess; a unit that names itself gathers nothing
        unit.set_modules_to_backward_prefetch(list(others) or [unit])  # pyright: ignore


class _Gathering(dist.Work):
    """An all-gather that FSDP2 waits for when it needs the weights."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: object = None) -> bool:
        self._pending.wait()
        return True


class RecordedAllGather(AllGather):
    """FSDP2's all-gather of weights, issued and recorded by `comm`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op=False
    ) -> dist.Work | None:
        pending = comm.start_all_gather(input_tensor, self.axis, out=output_tensor)
        if async_op:
            return _Gathering(pending)
        pending.wait()
        return None


class Reduction:
    """The reduce-scatter that overlaps the backward pass. One at a time, as FSDP2 has it on
    GPUs: until it is done, the unsharded gradients of its unit are held."""

    def __init__(self) -> None:
        self._under_way: tuple[Pending, RecordedReduceScatter] | None = None
        self.units: list[RecordedReduceScatter] = []

    def begin_step(self) -> None:
        for unit in self.units:
            unit.total = None

    def start(self, pending: Pending, unit: RecordedReduceScatter) -> None:
        self._under_way = pending, unit

    def wait(self) -> None:
        if self._under_way is not None:
            pending, unit = self._under_way
            unit.add(pending.wait())
            self._under_way = None


class RecordedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of a unit's gradients, issued and recorded by `comm`.

    FSDP2 takes the tensor it allocates here for the gradient, and finds none that it would have to
    add to: the sum over micro-batches is made when a message is done.
    """

    def __init__(self, axis: Axis, reduction: Reduction) -> None:
        self.axis, self.reduction = axis, reduction
        self.total: Tensor | None = None  # of the micro-batches so far
        reduction.units.append(self)

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.reduction.wait()  # gives its memory back first
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op,
        async_op=False,
    ) -> None:
        pending = comm.start_reduce_scatter(input_tensor, self.axis, out=output_tensor)
        self.reduction.start(pending, self)
        if not input_tensor.is_cpu:
            self.reduction.wait()  # of the stream that FSDP2 has for it, not of the host

    def add(self, reduced: Tensor) -> None:
        if self.total is not None:
            reduced += self.total
        self.total = reduced
