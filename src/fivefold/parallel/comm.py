"""Every message of a run is issued here, and written into the ledger here.

An `Axis` is a group of ranks along one axis of the layout together with the split whose traffic
it carries. The functions take and return local tensors; gradients are the business of the split
that calls them. Collectives work along dimension 0, so tensors are `[sequence, batch, ...]` or
`[tokens, ...]`.

On gloo the collectives are made of direct messages, which cost less processor time than gloo's
own rings (docs/decisions.md has the figures), and sums run in rank order in fp32, so that all
ranks get the same bits. On NCCL the library's own collectives are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.ledger import Ledger, Transfer


@dataclass
class Recorder:
    """Where the messages of this process are written down.

    In a `dry` run nothing is sent: every peer is taken to send what this rank sends. That gives
    right shapes, right sizes and plausible (balanced) counts, and wrong values.
    """

    ledger: Ledger = field(default_factory=Ledger)
    phase: str = "forward"
    dry: bool = False
    on_call: Callable[[str], None] | None = None  # told of each call before it is made

    def record(self, axis: Axis, op: str, payload_bytes: int, routed: bool = False) -> None:
        if self.on_call:
            self.on_call(f"{op} of {payload_bytes:,} bytes over {axis.name} ({self.phase})")
        self.ledger.add(Transfer(axis.split, self.phase, op, axis.size, payload_bytes, 1, routed))


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis of the layout that this rank talks to."""

    name: str  # tp, dp, ring, ...
    split: str  # the split whose traffic it is, as in the ledger
    ranks: tuple[int, ...]  # global ranks, in the order of the axis
    index: int  # of this rank among them
    group: dist.ProcessGroup | None  # None when the axis has one rank
    recorder: Recorder

    @property
    def size(self) -> int:
        return len(self.ranks)

    def on_behalf_of(self, split: str) -> Axis:
        """The same ranks carrying the traffic of another split."""
        return Axis(self.name, split, self.ranks, self.index, self.group, self.recorder)


class Pending:
    """A message under way. `wait` finishes it and returns its result."""

    def __init__(self, works: Sequence[dist.Work | None], finish: Callable[[], Tensor]) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        return self._finish()

    def is_done(self) -> bool:
        """Has the message gone? Lets a sender forget buffers without waiting."""
        return all(work is None or work.is_completed() for work in self._works)


def size_in_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum of `x` over the axis, on every rank, in place where x is contiguous."""
    return start_all_reduce(x, axis).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin to sum (or take the maximum of) contiguous `x` in place."""
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.recorder.record(axis, "all_reduce", size_in_bytes(x))
    if axis.recorder.dry:
        return Pending([], lambda: x)
    if not _is_gloo(x):
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        work = dist.all_reduce(x, reduce_op, group=axis.group, async_op=True)
        return Pending([work], lambda: x)
    if axis.size == 2 or x.numel() < 16_384:
        copies = x.new_empty(axis.size, *x.shape)
        works = _gather_directly(copies, x, axis)

        def finish() -> Tensor:
            return x.copy_(copies.amax(0) if op == "max" else _sum_in_order(copies))

        return Pending(works, finish)
    return Pending([], lambda: _all_reduce_in_two_hops(x, axis))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The tensors of all ranks, concatenated along dimension 0."""
    return start_all_gather(x, axis).wait()


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    if axis.size == 1 and out is None:
        return Pending([], lambda: x)
    if out is None:
        out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    axis.recorder.record(axis, "all_gather", size_in_bytes(out))
    copies = out.view(axis.size, *x.shape)
    if axis.recorder.dry:
        for copy in copies:  # one by one: FSDP2's x is a part of out
            copy.copy_(x)
        return Pending([], lambda: out)
    if not _is_gloo(x):
        work = dist.all_gather_single(out, x.contiguous(), group=axis.group, async_op=True)
        return Pending([work], lambda: out)
    return Pending(_gather_directly(copies, x, axis), lambda: out)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of this rank's slice of `x` along dimension 0."""
    return start_reduce_scatter(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    if axis.size == 1 and out is None:
        return Pending([], lambda: x)
    axis.recorder.record(axis, "reduce_scatter", size_in_bytes(x))
    x = x.contiguous()
    if out is None:
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    if axis.recorder.dry:
        return Pending([], lambda: out.copy_(x.view(axis.size, *out.shape)[axis.index]))
    if not _is_gloo(x):
        work = dist.reduce_scatter_single(out, x, group=axis.group, async_op=True)
        return Pending([work], lambda: out)
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=axis.group, async_op=True)
    slices = received.view(axis.size, *out.shape)
    return Pending([work], lambda: _sum_in_order(slices, out))


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Slice i of `x` along dimension 0 goes to rank i; slice i of the result comes from it."""
    if axis.size == 1:
        return x
    axis.recorder.record(axis, "all_to_all", size_in_bytes(x))
    if axis.recorder.dry:
        return x
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=axis.group)
    return out


def all_to_all_rows(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], owned_rows: int
) -> Tensor:
    """Uneven all-to-all of rows: `send[i]` rows of `x` go to rank i, `receive[i]` come from it.

    `owned_rows` is the number of rows on the side of the rank whose tokens they are; it is what
    the ledger counts (see fivefold.ledger).
    """
    if axis.size == 1:
        return x
    row_bytes = x[:1].numel() * x.element_size() if x.shape[0] else _row_bytes(x)
    axis.recorder.record(axis, "all_to_all", owned_rows * row_bytes)
    out = x.new_empty(sum(receive), *x.shape[1:])
    if axis.recorder.dry:
        return out.zero_()
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.group)
    return out


def all_gather_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """All ranks' rows, concatenated; rank i has `counts[i]` of them (routing decides)."""
    if axis.size == 1:
        return x
    out = x.new_empty(sum(counts), *x.shape[1:])
    axis.recorder.record(axis, "all_gather", size_in_bytes(out), routed=True)
    if axis.recorder.dry:
        return out.zero_()
    copies = list(out.split(list(counts)))
    for work in _exchange_directly([x.contiguous()] * axis.size, copies, axis):
        work.wait()
    return out


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Sum over ranks of this rank's `counts[index]` rows: the reverse of all_gather_rows."""
    if axis.size == 1:
        return x
    axis.recorder.record(axis, "reduce_scatter", size_in_bytes(x), routed=True)
    slices = list(x.contiguous().split(list(counts)))
    own = slices[axis.index]
    if axis.recorder.dry:
        return own.clone()
    received = own.new_empty(axis.size, *own.shape)
    for work in _exchange_directly(slices, list(received), axis):
        work.wait()
    return _sum_in_order(received)


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the next rank of the ring and receive the previous rank's."""
    axis.recorder.record(axis, "send", size_in_bytes(x))
    out = torch.empty_like(x)
    if axis.recorder.dry:
        return Pending([], lambda: out.copy_(x))
    after = axis.ranks[(axis.index + 1) % axis.size]
    before = axis.ranks[(axis.index - 1) % axis.size]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x.contiguous(), after, group=axis.group),
            dist.P2POp(dist.irecv, out, before, group=axis.group),
        ]
    )
    return Pending(works, lambda: out)


def start_send(x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the other rank of a two-rank channel."""
    axis.recorder.record(axis, "send", size_in_bytes(x))
    if axis.recorder.dry:
        return Pending([], lambda: x)
    x = x.contiguous()
    work = dist.isend(x, axis.ranks[1 - axis.index], group=axis.group)
    return Pending([work], lambda: x)


def start_receive(shape: Sequence[int], like: Tensor, axis: Axis) -> Pending:
    """Receive a tensor of this shape (dtype and device of `like`) from a channel's other rank."""
    if axis.recorder.dry:
        return Pending([], lambda: like.new_zeros(*shape))
    out = like.new_empty(*shape)
    work = dist.irecv(out, axis.ranks[1 - axis.index], group=axis.group)
    return Pending([work], lambda: out)


def _is_gloo(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * int(torch.Size(x.shape[1:]).numel())


def _gather_directly(copies: Tensor, x: Tensor, axis: Axis) -> list[dist.Work]:
    x = x.contiguous()
    return _exchange_directly([x] * axis.size, list(copies), axis)


def _exchange_directly(
    send: Sequence[Tensor], receive: Sequence[Tensor], axis: Axis
) -> list[dist.Work]:
    """send[i] goes to rank i of the axis, receive[i] is filled from it; gloo has no self-send."""
    works: list[dist.Work | None] = []
    for step in range(1, axis.size):
        to, source = (axis.index + step) % axis.size, (axis.index - step) % axis.size
        if send[to].numel():
            works.append(dist.isend(send[to], axis.ranks[to], group=axis.group))
        if receive[source].numel():
            works.append(dist.irecv(receive[source], axis.ranks[source], group=axis.group))
    receive[axis.index].copy_(send[axis.index])
    return [work for work in works if work is not None]


def _sum_in_order(copies: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum over dimension 0 in rank order, in fp32 where the values are shorter."""
    if copies.dtype in (torch.bfloat16, torch.float16):
        total = copies.float().sum(0).to(copies.dtype)
        return total if out is None else out.copy_(total)
    out = copies[0].clone() if out is None else out.copy_(copies[0])
    for copy in copies[1:]:
        out += copy
    return out


def _all_reduce_in_two_hops(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all, local sum, all-gather: two hops for any number of ranks."""
    flat = x.view(-1)
    length = -(-flat.numel() // axis.size)
    padded = flat.new_zeros(axis.size, length)
    padded.view(-1)[: flat.numel()] = flat
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=axis.group)
    own = _sum_in_order(received)
    for work in _gather_directly(padded, own, axis):
        work.wait()
    return x.copy_(padded.view(-1)[: flat.numel()].view_as(x))
