"""How the ranks of a group hand tensors to each other; what is made of them is `comm`'s business.

Two ways. `AllToAll` uses torch.distributed and works everywhere. `SharedMemory` is for processes on
the CPUs of one machine: gloo sends each message through TCP and three threads, which costs more
processor time than a small model can hide (docs/decisions.md has figures), where two processes
that share memory need one copy and two semaphores.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[list[Tensor]], Tensor]
"""Makes the result from what came from each rank, in rank order, this rank's own in its place.
The tensors may be other processes' memory: they are read here, and are gone afterwards."""

Wait = Callable[[], Tensor]
"""Waits for a message and returns its result."""


class Exchange(Protocol):
    """All ranks of the group call the same methods in the same order."""

    def to_each(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], finish: Finish
    ) -> Wait:
        """Begin to send send[i] to rank i; a tensor of shapes[i] comes from it."""
        ...

    def to_all(self, x: Tensor, shapes: Sequence[Sequence[int]], finish: Finish) -> Wait:
        """Begin to send x to every rank."""
        ...


def connect(group: dist.ProcessGroup, ranks: Sequence[int]) -> Exchange:
    """The best way between the ranks of a group, of which `ranks` are the global numbers. All of
    them call it at the same point."""
    memory = _share_memory(group, ranks) if dist.get_backend(group) == "gloo" else None
    if memory is None:
        return AllToAll(group, ranks)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return SharedMemory(memory, ranks, timeout.total_seconds())


class AllToAll:
    """By torch.distributed's all-to-all. On gloo too it is the cheapest way: what the calling
    thread sends itself is often interrupted while it holds gloo's lock, and gloo then spins."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group = group
        self.index = list(ranks).index(dist.get_rank())

    def to_each(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], finish: Finish
    ) -> Wait:
        own = send[self.index]
        leaving = [x.reshape(-1) for x in send]
        leaving[self.index] = own.new_empty(0)
        send_counts = [x.numel() for x in leaving]
        counts = [torch.Size(shape).numel() for shape in shapes]
        counts[self.index] = 0
        packed = [x for x in leaving if x.numel()]
        flat = packed[0] if len(packed) == 1 else torch.cat(leaving)
        out = own.new_empty(sum(counts))
        work = dist.all_to_all_single(
            out, flat, counts, send_counts, group=self.group, async_op=True
        )

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            arrived = out.split(counts)
            return finish(
                [
                    own if i == self.index else x.view(shape)
                    for i, (x, shape) in enumerate(zip(arrived, shapes, strict=True))
                ]
            )

        return wait

    def to_all(self, x: Tensor, shapes: Sequence[Sequence[int]], finish: Finish) -> Wait:
        return self.to_each([x] * len(shapes), shapes, finish)


# Shared memory

SLOTS = 2
"""Messages of a group that may be under way at once. A third waits for the first to be read."""

_PLACE_BYTES = 2**32
"""Address space for one message. Only what is written to takes memory."""

_SEMAPHORE_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Semaphore:
    """A POSIX semaphore in shared memory."""

    def __init__(self, address: int) -> None:
        self._pointer = ctypes.c_void_p(address)

    def create(self) -> None:
        between_processes, value = 1, 0
        if _libc.sem_init(self._pointer, between_processes, value) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        _libc.sem_post(self._pointer)

    def wait(self, timeout_s: float) -> bool:
        """False if nobody posted in time."""
        if _libc.sem_trywait(self._pointer) == 0:
            return True
        seconds, rest = divmod(time.time() + timeout_s, 1)
        until = _Timespec(int(seconds), int(rest * 1e9))
        while _libc.sem_timedwait(self._pointer, ctypes.byref(until)) != 0:
            if ctypes.get_errno() == errno.ETIMEDOUT:
                return False
        return True


class _Memory:
    """Memory of a group of `size` ranks: for each pair of sender and receiver two semaphores and
    SLOTS places. The place from a rank to itself is for what it sends to all."""

    def __init__(self, file: int, size: int) -> None:
        self._size = size
        self._map = mmap.mmap(file, self.total_bytes(size))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @staticmethod
    def _header_bytes(size: int) -> int:
        """The key, then the semaphores, in whole pages."""
        return -(-(1 + 2 * size * size) * _SEMAPHORE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def total_bytes(cls, size: int) -> int:
        return cls._header_bytes(size) + size * size * SLOTS * _PLACE_BYTES

    @property
    def key(self) -> int:
        """A random number by which a rank knows that it has the memory of its group."""
        return int.from_bytes(self._map[:8], "little")

    @key.setter
    def key(self, key: int) -> None:
        self._map[:8] = key.to_bytes(8, "little")

    def filled(self, sender: int, receiver: int) -> _Semaphore:
        """Posted by the sender when its next message is in its place."""
        return self._semaphore(2 * (sender * self._size + receiver))

    def taken(self, sender: int, receiver: int) -> _Semaphore:
        """Posted by the receiver when it has read the next message."""
        return self._semaphore(2 * (sender * self._size + receiver) + 1)

    def _semaphore(self, number: int) -> _Semaphore:
        return _Semaphore(self._address + (1 + number) * _SEMAPHORE_BYTES)

    def create_semaphores(self) -> None:
        for number in range(2 * self._size * self._size):
            self._semaphore(number).create()

    def place(
        self, sender: int, slot: int, receiver: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A message's place as a tensor."""
        number = (sender * SLOTS + slot) * self._size + receiver
        count = torch.Size(shape).numel()
        if count * dtype.itemsize > _PLACE_BYTES:
            raise RuntimeError(f"a message of {count:,} x {dtype} is larger than 4 GiB")
        offset = self._header_bytes(self._size) + number * _PLACE_BYTES
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)


@dataclass
class _Message:
    slot: int
    own: Tensor
    place: int | None  # where the senders put it: None in each rank's place for all
    shapes: Sequence[Sequence[int]]
    finish: Finish
    result: Tensor | None = None


class SharedMemory:
    """By memory that all ranks of the group have mapped.

    A rank copies what it sends to its place and posts `filled`; a receiver that has waited for it
    computes with the message where it is and posts `taken`. Messages are finished in the order in
    which they were started, at the latest when their slot is needed again.
    """

    def __init__(self, memory: _Memory, ranks: Sequence[int], timeout_s: float) -> None:
        self._memory, self._ranks, self._timeout_s = memory, ranks, timeout_s
        self._index = index = list(ranks).index(dist.get_rank())
        size = len(ranks)
        self._filled_by = [memory.filled(i, index) for i in range(size)]
        self._taken_from = [memory.taken(i, index) for i in range(size)]
        self._filled_for = [memory.filled(index, i) for i in range(size)]
        self._taken_by = [memory.taken(index, i) for i in range(size)]
        self._receivers: list[list[int]] = [[] for _ in range(SLOTS)]  # of the last message there
        self._unfinished: deque[_Message] = deque()
        self._slot = 0

    def to_each(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], finish: Finish
    ) -> Wait:
        slot = self._free_slot()
        receivers = [i for i, x in enumerate(send) if i != self._index and x.numel()]
        for i in receivers:
            x = send[i]
            self._memory.place(self._index, slot, i, x.shape, x.dtype).copy_(x)
        return self._post(
            receivers, _Message(slot, send[self._index], self._index, shapes, finish)
        )

    def to_all(self, x: Tensor, shapes: Sequence[Sequence[int]], finish: Finish) -> Wait:
        slot = self._free_slot()
        receivers = []
        if x.numel():
            receivers = [i for i in range(len(shapes)) if i != self._index]
            self._memory.place(self._index, slot, self._index, x.shape, x.dtype).copy_(x)
        return self._post(receivers, _Message(slot, x, None, shapes, finish))

    def _free_slot(self) -> int:
        """The next slot, once its last message has been read by everyone."""
        slot = self._slot
        self._slot = (slot + 1) % SLOTS
        if len(self._unfinished) == SLOTS:
            self._finish_oldest()  # the others do the same, so nobody waits for ever
        for receiver in self._receivers[slot]:
            self._await(self._taken_by[receiver], receiver)
        return slot

    def _post(self, receivers: list[int], message: _Message) -> Wait:
        for i in receivers:
            self._filled_for[i].post()
        self._receivers[message.slot] = receivers
        self._unfinished.append(message)

        def wait() -> Tensor:
            while message.result is None:
                self._finish_oldest()
            return message.result

        return wait

    def _finish_oldest(self) -> None:
        message = self._unfinished.popleft()
        parts, senders = [], []
        for i, shape in enumerate(message.shapes):
            if i == self._index:
                parts.append(message.own)
            elif torch.Size(shape).numel() == 0:
                parts.append(message.own.new_empty(shape))
            else:
                self._await(self._filled_by[i], i)
                place = i if message.place is None else message.place
                parts.append(
                    self._memory.place(i, message.slot, place, shape, message.own.dtype)
                )
                senders.append(i)
        message.result = message.finish(parts)
        for i in senders:
            self._taken_from[i].post()

    def _await(self, semaphore: _Semaphore, index: int) -> None:
        if not semaphore.wait(self._timeout_s):
            raise RuntimeError(
                f"timed out after {self._timeout_s:g} s of waiting for rank {self._ranks[index]}"
            )


def _share_memory(group: dist.ProcessGroup, ranks: Sequence[int]) -> _Memory | None:
    """Memory that all ranks of the group have mapped; None where they cannot, such as on several
    machines. It has no name in any file system and is gone with its last process."""
    if sys.platform != "linux":
        return None
    file = memory = None
    ticket = torch.zeros(3, dtype=torch.int64)  # process, file, key
    if ranks[0] == dist.get_rank():
        try:
            file = os.memfd_create("fivefold")
            os.ftruncate(file, _Memory.total_bytes(len(ranks)))
            memory = _Memory(file, len(ranks))
            memory.create_semaphores()
            memory.key = int.from_bytes(os.urandom(7), "little")
            ticket = torch.tensor([os.getpid(), file, memory.key])
        except OSError:
            memory = None
    dist.broadcast(ticket, ranks[0], group=group)
    process, number, key = ticket.tolist()
    if ranks[0] != dist.get_rank():
        memory = _map(f"/proc/{process}/fd/{number}", key, len(ranks))
    all_have_it = torch.tensor(int(memory is not None))
    dist.all_reduce(all_have_it, dist.ReduceOp.MIN, group=group)
    if file is not None:
        os.close(file)
    return memory if all_have_it.item() else None


def _map(path: str, key: int, size: int) -> _Memory | None:
    """The memory of another process, if that is on this machine: on another one the path is that
    of something else, or of nothing."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != _Memory.total_bytes(size):
            return None
        memory = _Memory(file, size)
        return memory if memory.key == key else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
