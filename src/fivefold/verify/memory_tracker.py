"""Every tensor that PyTorch code allocates and frees, and what was alive at the peak.

PyTorch's own `MemTracker` follows module hooks and looks for gradients in `.grad`; here gradients
are added into buffers, and weights are gathered by hand (docs/decisions.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")
"""What memory is for. Temporary memory has no other kind: it is freed before the pass ends."""


class Allocation:
    """One storage, from the operation that made it until its last tensor is gone."""

    __slots__ = ("kind", "reference")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.reference: weakref.ref | None = None


class MemoryTracker(TorchDispatchMode):
    """Adds up the storages on one type of device while it is active (as a context).

    A storage counts from the operation that returns it, with its own size: neither the rounding of
    an allocator nor its cache is in it. Tensors that were there before are counted when they are
    named (`name`). Sizes are those of the tensors, so it makes no difference whether they have
    values (`meta` tensors have none).
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.now = 0
        """Bytes allocated."""
        self.peak = 0
        self.doing = ""
        """What the program does; kept as `peak_doing` with the operation's name."""
        self.peak_doing = ("", "")
        self._alive: dict[Allocation, int] = {}
        self._by_storage: dict[int, Allocation] = {}
        self._at_peak: dict[Allocation, int] = {}
        self._rising = False  # is this moment the peak so far?

    # What is what

    def name(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """These tensors are of a kind, from the first to the last moment of their storages."""
        for tensor in tensors:
            if tensor is None or tensor.device.type != self.device_type:
                continue
            self._see(tensor, "")
            self._by_storage[tensor.untyped_storage()._cdata].kind = kind

    def name_rest(self, kind: str) -> None:
        """Whatever is alive now and has no kind is of this one."""
        for allocation in self._alive:
            if allocation.kind is None:
                allocation.kind = kind

    def peak_by_kind(self) -> dict[str, int]:
        """Bytes at the peak, in all of `KINDS`."""
        self._keep_peak()
        sums: dict[str, int] = dict.fromkeys(KINDS, 0)
        for allocation, size in self._at_peak.items():
            sums[allocation.kind or "temporary"] += size
        return sums

    def now_by_kind(self) -> dict[str, int]:
        """Bytes that are alive, of what has been named."""
        sums: dict[str, int] = dict.fromkeys(KINDS, 0)
        for allocation, size in self._alive.items():
            if allocation.kind is not None:
                sums[allocation.kind] += size
        return sums

    # What happens

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back with the local tensors
        func = IN_PLACE.get(func, func)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._see(out, func)
        elif isinstance(out, (tuple, list)):
            for each in out:
                if isinstance(each, Tensor):
                    self._see(each, func)
        workspace = WORKSPACES.get(func)
        if workspace:
            passing = Allocation()
            self._grow(passing, workspace(*args), func)
            self._shrink(passing)
        return out

    def __enter__(self):
        unwatched = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            result = unwatched(storage, size)
            self._resized(storage)
            return result

        # FSDP2 frees and allocates its copies by it, and no dispatch shows that.
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exc):
        self._patch.stop()
        return super().__exit__(*exc)

    def _see(self, tensor: Tensor, func: object) -> None:
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._by_storage:
            return
        allocation = self._by_storage[key] = Allocation()

        def died(_, key=key, allocation=allocation) -> None:
            self._by_storage.pop(key, None)
            self._shrink(allocation)

        allocation.reference = weakref.ref(storage, died)
        self._grow(allocation, storage.nbytes(), func)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        allocation = self._by_storage.get(storage._cdata)
        if allocation is not None:
            self._shrink(allocation)
            self._grow(allocation, storage.nbytes(), "resize_")

    def _grow(self, allocation: Allocation, size: int, func: object) -> None:
        self._alive[allocation] = size
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            self.peak_doing = self.doing, str(func)
            self._rising = True

    def _shrink(self, allocation: Allocation) -> None:
        self._keep_peak()
        self.now -= self._alive.pop(allocation)

    def _keep_peak(self) -> None:
        """Remember what is alive if this is the peak: before the first thing goes."""
        if self._rising:
            self._at_peak = dict(self._alive)
            self._rising = False


IN_PLACE = {
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}
"""What autograd's formulas for `index_select` and `topk` do to zeros that they have just made. They
do it out of place while anybody watches."""


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, *_) -> int:
    """FlashAttention-2's backward kernel adds up the query's gradient in fp32, and the gradients of
    grouped keys and values for each query head (Dao-AILab/flash-attention, mha_bwd)."""
    queries = 4 * q.numel() + 4 * q.numel() // q.shape[-1]
    grouped = 0 if k.shape[1] == q.shape[1] else 2 * k.numel() // k.shape[1] * q.shape[1]
    return queries + grouped * k.element_size()


WORKSPACES = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}
"""Bytes that kernels of a GPU allocate inside, which no dispatch shows, from their arguments."""
