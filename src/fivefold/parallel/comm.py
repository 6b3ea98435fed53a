"""Every message of a run is issued here, and written into the ledger and the step trace here.

An `Axis` is a group of ranks along one axis of the layout together with the split whose traffic
it carries. The functions take and return local tensors; gradients are the business of the split
that calls them. Collectives work along dimension 0, so tensors are `[sequence, batch, ...]` or
`[tokens, ...]`.

On gloo the collectives (but for large all-reduces) are made of all-to-alls, which cost less
processor time than gloo's own rings (docs/decisions.md has the figures), and sums run in rank order
in fp32, so that all ranks get the same bits. On NCCL the library's own collectives are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.ledger import Ledger, Transfer
from fivefold.step_trace import Message, StepTrace

LARGE = 2**18
"""Elements from which gloo's own ring all-reduce, which works in place, costs less processor time
than copies from all ranks. It too gives all ranks the same bits."""


@dataclass
class Recorder:
    """Where the messages of this process are written down.

    In a `dry` run nothing is sent: every peer is taken to send what this rank sends. That gives
    right shapes, right sizes and plausible (balanced) counts, and wrong values.
    """

    ledger: Ledger = field(default_factory=Ledger)
    step_trace: StepTrace = field(default_factory=StepTrace)
    phase: str = "forward"
    dry: bool = False
    on_call: Callable[[str], None] | None = None  # told of each call before it is made

    def record(self, axis: Axis, op: str, payload_bytes: int, routed: bool = False) -> Message:
        """Written down just before it is issued. `Pending` adds when it was waited for."""
        if self.on_call:
            self.on_call(f"{op} of {payload_bytes:,} bytes over {axis.name} ({self.phase})")
        self.ledger.add(Transfer(axis.split, self.phase, op, axis.size, payload_bytes, 1, routed))
        return self._begin(axis, op, payload_bytes)

    def record_receive(self, axis: Axis) -> Message:
        """The sender's is the one that the ledger counts."""
        return self._begin(axis, "receive", 0)

    def _begin(self, axis: Axis, op: str, payload_bytes: int) -> Message:
        message = Message(
            axis.split,
            self.phase,
            op,
            axis.size,
            payload_bytes,
            axis.name,
            axis.ranks,
            perf_counter(),
        )
        self.step_trace.messages.append(message)
        return message


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

    def accounted_as(self, split: str) -> Axis:
        """The same ranks carrying the traffic of another split."""
        return Axis(self.name, split, self.ranks, self.index, self.group, self.recorder)


class Pending:
    """A message under way. `wait` finishes it and returns its result."""

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], Tensor],
        message: Message | None = None,
    ) -> None:
        """`message` is its record; None for what is not sent, or part of another message."""
        self._works = works
        self._finish = finish
        self._message = message

    def wait(self) -> Tensor:
        if self._message is None:
            return self._wait()
        self._message.wait_start_s = perf_counter()
        result = self._wait()
        self._message.end_s = perf_counter()
        return result

    def _wait(self) -> Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        return self._finish()

    def is_done(self) -> bool:
        """Has the message gone? Lets a sender forget buffers without waiting."""
        done = all(work is None or work.is_completed() for work in self._works)
        if done and self._message is not None:
            self._message.end_s = perf_counter()
        return done


def size_in_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum of `x` over the axis, on every rank, in place where x is contiguous."""
    return start_all_reduce(x, axis).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin to sum (or take the maximum of) contiguous `x` in place."""
    if axis.size == 1:
        return Pending([], lambda: x)
    message = axis.recorder.record(axis, "all_reduce", size_in_bytes(x))
    if _is_echoed(x, axis):
        return Pending([], lambda: x, message)
    if not _is_gloo(x):
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        work = dist.all_reduce(x, reduce_op, group=axis.group, async_op=True)
        return Pending([work], lambda: x, message)
    if x.numel() >= LARGE and x.dtype == torch.float32 and op == "sum":
        work = dist.all_reduce(x, group=axis.group, async_op=True)
        return Pending([work], lambda: x, message)
    if axis.size == 2:
        other = torch.empty_like(x)
        work = _start_swap(x, other, axis)
        combine = torch.maximum if op == "max" else torch.add
        return Pending([work], lambda: combine(x, other, out=x), message)
    if x.numel() < 16_384 or op == "max":
        copies = x.new_empty(axis.size, *x.shape)
        work = _start_all_to_all(copies, _repeat(x, axis), axis)
        if op == "max":
            return Pending([work], lambda: x.copy_(copies.amax(0)), message)
        return Pending([work], lambda: _sum_in_order(copies, x), message)
    return _start_all_reduce_in_two_hops(x, axis, message)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The tensors of all ranks, concatenated along dimension 0."""
    return start_all_gather(x, axis).wait()


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    if axis.size == 1 and out is None:
        return Pending([], lambda: x)
    if out is None:
        out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    message = axis.recorder.record(axis, "all_gather", size_in_bytes(out))
    copies = out.view(axis.size, *x.shape)
    if _is_echoed(x, axis):
        for copy in copies:  # one by one: FSDP2's x is a part of out
            copy.copy_(x)
        return Pending([], lambda: out, message)
    if not _is_gloo(x):
        work = dist.all_gather_single(out, x.contiguous(), group=axis.group, async_op=True)
        return Pending([work], lambda: out, message)
    if axis.size > 2:
        return Pending([_start_all_to_all(copies, _repeat(x, axis), axis)], lambda: out, message)
    work = _start_swap(x, copies[1 - axis.index], axis)
    if copies[axis.index].data_ptr() != x.data_ptr():
        copies[axis.index].copy_(x)
    return Pending([work], lambda: out, message)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of this rank's slice of `x` along dimension 0."""
    return start_reduce_scatter(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    if axis.size == 1 and out is None:
        return Pending([], lambda: x)
    message = axis.recorder.record(axis, "reduce_scatter", size_in_bytes(x))
    if out is None:
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    x = x.contiguous()
    slices = x.view(axis.size, *out.shape)
    if _is_echoed(x, axis):
        return Pending([], lambda: out.copy_(slices[axis.index]), message)
    if not _is_gloo(x):
        work = dist.reduce_scatter_single(out, x, group=axis.group, async_op=True)
        return Pending([work], lambda: out, message)
    if axis.size > 2:
        received = torch.empty_like(slices)
        work = _start_all_to_all(received, slices, axis)
        return Pending([work], lambda: _sum_in_order(received, out), message)
    work = _start_swap(slices[1 - axis.index], out, axis)
    return Pending([work], lambda: out.add_(slices[axis.index]), message)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Slice i of `x` along dimension 0 goes to rank i; slice i of the result comes from it."""
    if axis.size == 1:
        return x
    message = axis.recorder.record(axis, "all_to_all", size_in_bytes(x))
    if _is_echoed(x, axis):
        return x
    out = x.new_empty(x.shape)
    return Pending([_start_all_to_all(out, x.contiguous(), axis)], lambda: out, message).wait()


def all_to_all_rows(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], owned_rows: int
) -> Tensor:
    """Uneven all-to-all of rows: `send[i]` rows of `x` go to rank i, `receive[i]` come from it.

    `owned_rows` is the number of rows on the side of the rank whose tokens they are; it is what
    the ledger counts (see fivefold.ledger).
    """
    _, pending = start_all_to_all_rows(x, axis, send, receive, owned_rows)
    return pending.wait()


def start_all_to_all_rows(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], owned_rows: int
) -> tuple[Tensor, Pending]:
    """Begin `all_to_all_rows`: the tensor of the rows to come, which are there after the wait."""
    if axis.size == 1:
        return x, Pending([], lambda: x)
    row_bytes = x[:1].numel() * x.element_size() if x.shape[0] else _row_bytes(x)
    message = axis.recorder.record(axis, "all_to_all", owned_rows * row_bytes)
    out = x.new_empty(sum(receive), *x.shape[1:])
    if _is_echoed(x, axis):
        return out, Pending([], out.zero_, message)
    work = _start_all_to_all(out, x.contiguous(), axis, receive, send)
    return out, Pending([work], lambda: out, message)


def all_gather_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """All ranks' rows, concatenated; rank i has `counts[i]` of them (routing decides)."""
    if axis.size == 1:
        return x
    out = x.new_empty(sum(counts), *x.shape[1:])
    message = axis.recorder.record(axis, "all_gather", size_in_bytes(out), routed=True)
    if _is_echoed(x, axis):
        return out.zero_()
    leaving = _repeat(x, axis).flatten(0, 1)
    work = _start_all_to_all(out, leaving, axis, counts, [x.shape[0]] * axis.size)
    return Pending([work], lambda: out, message).wait()


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """Sum over ranks of this rank's `counts[index]` rows: the reverse of all_gather_rows."""
    if axis.size == 1:
        return x
    message = axis.recorder.record(axis, "reduce_scatter", size_in_bytes(x), routed=True)
    own = counts[axis.index]
    if _is_echoed(x, axis):
        return x.split(list(counts))[axis.index].clone()
    received = x.new_empty(axis.size, own, *x.shape[1:])
    arriving = received.flatten(0, 1)
    work = _start_all_to_all(arriving, x.contiguous(), axis, [own] * axis.size, counts)
    return Pending([work], lambda: _sum_in_order(received, received[0]), message).wait()


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the next rank of the ring and receive the previous rank's."""
    message = axis.recorder.record(axis, "send", size_in_bytes(x))
    out = torch.empty_like(x)
    if _is_echoed(x, axis):
        return Pending([], lambda: out.copy_(x), message)
    leaving, arriving = [0] * axis.size, [0] * axis.size
    leaving[(axis.index + 1) % axis.size] = arriving[(axis.index - 1) % axis.size] = x.numel()
    work = _start_all_to_all(out.view(-1), x.reshape(-1), axis, arriving, leaving)
    return Pending([work], lambda: out, message)


def start_send(x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the other rank of a two-rank channel."""
    message = axis.recorder.record(axis, "send", size_in_bytes(x))
    if axis.recorder.dry:
        return Pending([], lambda: x, message)
    x = x.contiguous()
    work = dist.isend(x, axis.ranks[1 - axis.index], group=axis.group)
    return Pending([work], lambda: x, message)


def start_receive(shape: Sequence[int], like: Tensor, axis: Axis) -> Pending:
    """Receive a tensor of this shape (dtype and device of `like`) from a channel's other rank."""
    message = axis.recorder.record_receive(axis)
    if axis.recorder.dry:
        zeros = like.new_zeros(*shape)
        return Pending([], lambda: zeros, message)
    out = like.new_empty(*shape)
    work = dist.irecv(out, axis.ranks[1 - axis.index], group=axis.group)
    return Pending([work], lambda: out, message)


def _is_gloo(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _is_echoed(x: Tensor, axis: Axis) -> bool:
    """Does a dry run stand in for the peers? Tensors without values need nobody's: they go the
    way of a GPU's, to a process group that does nothing."""
    return axis.recorder.dry and not x.is_meta


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * int(torch.Size(x.shape[1:]).numel())


def _start_all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Axis,
    receive: Sequence[int] | None = None,
    send: Sequence[int] | None = None,
) -> dist.Work | None:
    """Contiguous `x` is cut along dimension 0 for the ranks, `out` filled from them: in equal
    parts, or with `send[i]` rows to and `receive[i]` rows from rank i."""
    receive, send = receive and list(receive), send and list(send)
    return dist.all_to_all_single(out, x, receive, send, group=axis.group, async_op=True)


def _start_swap(x: Tensor, out: Tensor, axis: Axis) -> dist.Work | None:
    """`x` goes to the other one of two ranks, whose tensor comes to `out`; nothing is copied to
    where it is already."""
    to_other = [0, 0]
    to_other[1 - axis.index] = x.numel()
    return _start_all_to_all(out.view(-1), x.reshape(-1), axis, to_other, to_other)


def _repeat(x: Tensor, axis: Axis) -> Tensor:
    """A copy for each rank of the axis."""
    return x.expand(axis.size, *x.shape).contiguous()


def _sum_in_order(copies: Tensor, out: Tensor) -> Tensor:
    """Put the sum over dimension 0 in rank order into `out`, which may be one of the copies.
    Shorter floats are added in fp32 and rounded once."""
    short = out.dtype in (torch.bfloat16, torch.float16)
    total = copies[0].to(torch.float32 if short else out.dtype, copy=True)
    for copy in copies[1:]:
        total += copy
    return out.copy_(total)


def _start_all_reduce_in_two_hops(x: Tensor, axis: Axis, message: Message) -> Pending:
    """All-to-all, local sum, all-gather: two hops for any number of ranks."""
    flat = x.view(-1)
    length = -(-flat.numel() // axis.size)
    padded = flat.new_zeros(axis.size, length)
    padded.view(-1)[: flat.numel()] = flat
    received = torch.empty_like(padded)
    first_hop = _start_all_to_all(received, padded, axis)

    def finish() -> Tensor:
        own = _sum_in_order(received, received[0])
        second_hop = _start_all_to_all(padded, _repeat(own, axis), axis)
        Pending([second_hop], lambda: padded).wait()
        return x.copy_(padded.view(-1)[: flat.numel()].view_as(x))

    return Pending([first_hop], finish, message)
