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

LARGE = 16_384
"""Elements from which an all-reduce over more than two ranks sends each rank a slice to sum,
instead of everything to everyone."""


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
    if axis.size > 2 and op == "sum" and x.numel() >= LARGE:
        return _start_all_reduce_in_two_hops(x, axis)
    parts = _own_and_empty(x, axis)
    works = _exchange([x] * axis.size, parts, axis)
    if op == "max":
        return Pending(works, lambda: x.copy_(torch.stack(parts).amax(0)))
    return Pending(works, lambda: _sum_in_order(parts, x))


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
    works = _exchange([x] * axis.size, list(copies), axis)
    own = copies[axis.index]
    if own.data_ptr() != x.data_ptr():  # FSDP2's x is a part of out
        own.copy_(x)
    return Pending(works, lambda: out)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of this rank's slice of `x` along dimension 0."""
    return start_reduce_scatter(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    if axis.size == 1 and out is None:
        return Pending([], lambda: x)
    axis.recorder.record(axis, "reduce_scatter", size_in_bytes(x))
    if out is None:
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    x = x.contiguous()
    slices = x.view(axis.size, *out.shape)
    if axis.recorder.dry:
        return Pending([], lambda: out.copy_(slices[axis.index]))
    if not _is_gloo(x):
        work = dist.reduce_scatter_single(out, x, group=axis.group, async_op=True)
        return Pending([work], lambda: out)
    parts = _own_and_empty(slices[axis.index], axis)
    works = _exchange(list(slices), parts, axis)
    return Pending(works, lambda: _sum_in_order(parts, out))


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Slice i of `x` along dimension 0 goes to rank i; slice i of the result comes from it."""
    if axis.size == 1:
        return x
    axis.recorder.record(axis, "all_to_all", size_in_bytes(x))
    if axis.recorder.dry:
        return x
    rows = [x.shape[0] // axis.size] * axis.size
    return _all_to_all(x, axis, rows, rows)


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
    if axis.recorder.dry:
        return x.new_zeros(sum(receive), *x.shape[1:])
    return _all_to_all(x, axis, send, receive)


def _all_to_all(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    if not _is_gloo(x):
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.group)
        return out
    leaving, arriving = x.split(list(send)), out.split(list(receive))
    works = _exchange(leaving, arriving, axis)
    arriving[axis.index].copy_(leaving[axis.index])
    return Pending(works, lambda: out).wait()


def all_gather_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """All ranks' rows, concatenated; rank i has `counts[i]` of them (routing decides)."""
    if axis.size == 1:
        return x
    out = x.new_empty(sum(counts), *x.shape[1:])
    axis.recorder.record(axis, "all_gather", size_in_bytes(out), routed=True)
    if axis.recorder.dry:
        return out.zero_()
    copies = out.split(list(counts))
    works = _exchange([x] * axis.size, copies, axis)
    copies[axis.index].copy_(x)
    return Pending(works, lambda: out).wait()


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Sum over ranks of this rank's `counts[index]` rows: the reverse of all_gather_rows."""
    if axis.size == 1:
        return x
    axis.recorder.record(axis, "reduce_scatter", size_in_bytes(x), routed=True)
    slices = x.split(list(counts))
    own = slices[axis.index]
    if axis.recorder.dry:
        return own.clone()
    parts = _own_and_empty(own, axis)
    works = _exchange(slices, parts, axis)
    return Pending(works, lambda: _sum_in_order(parts, torch.empty_like(own))).wait()


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the next rank of the ring and receive the previous rank's."""
    axis.recorder.record(axis, "send", size_in_bytes(x))
    out = torch.empty_like(x)
    if axis.recorder.dry:
        return Pending([], lambda: out.copy_(x))
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    return Pending(_start_messages([(x, after)], [(out, before)], axis), lambda: out)


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


def _start_messages(
    send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], axis: Axis
) -> Sequence[dist.Work | None]:
    """Start messages to and from ranks of the axis (by their index on it)."""
    ops = [(dist.irecv, x, axis.ranks[index]) for x, index in receive]
    ops += [(dist.isend, x.contiguous(), axis.ranks[index]) for x, index in send]
    if all(_is_gloo(x) for _, x, _ in ops):
        return [start(x, rank, group=axis.group) for start, x, rank in ops]
    # On NCCL messages that cross must be started together, or each side waits for the other.
    return dist.batch_isend_irecv([dist.P2POp(*op, group=axis.group) for op in ops])


def _exchange(
    send: Sequence[Tensor], receive: Sequence[Tensor], axis: Axis
) -> Sequence[dist.Work | None]:
    """send[i] goes to rank i of the axis, receive[i] is filled from it. What a rank has for
    itself stays where it is, and empty messages are not sent."""
    others = [(axis.index + step) % axis.size for step in range(1, axis.size)]
    return _start_messages(
        [(send[i], i) for i in others if send[i].numel()],
        [(receive[i], i) for i in reversed(others) if receive[i].numel()],
        axis,
    )


def _own_and_empty(own: Tensor, axis: Axis) -> list[Tensor]:
    """This rank's tensor in its place among tensors to be filled by the other ranks."""
    return [own if i == axis.index else own.new_empty(own.shape) for i in range(axis.size)]


def _sum_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Put the sum in rank order into `out`, which may be one of the parts. Shorter floats are
    added in fp32 and rounded once."""
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=out)
    short = out.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if short else out.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)


def _start_all_reduce_in_two_hops(x: Tensor, axis: Axis) -> Pending:
    """All-to-all, local sum, all-gather: two hops for any number of ranks."""
    slices = x.view(-1).tensor_split(axis.size)
    own = slices[axis.index]
    parts = _own_and_empty(own, axis)
    first_hop = _exchange(slices, parts, axis)

    def finish() -> Tensor:
        _sum_in_order(parts, own)
        return Pending(_exchange([own] * axis.size, slices, axis), lambda: x).wait()

    return Pending(first_hop, finish)
