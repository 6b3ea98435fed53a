"""Several processes: what the messages of a run take, as `fivefold.parallel.comm` sends them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.calibrate.grid import Grid
from fivefold.calibrate.points import Point
from fivefold.cluster import host as machine
from fivefold.layout.notation import parse
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Recorder
from fivefold.parallel.mesh import make_axes

GROUP_SIZES = (2, 4, 8)
FEW_BYTES = 64 * 2**10
"""Messages of up to this size are sent more often, since what they take depends most on when the
system wakes whom."""
CACHE_BYTES = 8 * 2**20
"""More than the caches hold that a core has for itself."""
ROW = 16
"""Elements of a row of an uneven all-to-all."""
MANY_HEADS = 1 << 20


@dataclass(frozen=True)
class _Group:
    """Groups of the same kind that talk at the same time."""

    axis: Axis  # this rank's
    channel: Axis | None  # to a neighbour, where the groups have two ranks
    groups: int  # of the world that talk
    talks: bool  # whether this rank is in one of them
    stride: int  # between neighbours in a group


def messages(grid: Grid, device: torch.device, processes_per_node: int) -> Iterator[Point]:
    """Every collective at every size, over groups of 2, 4, 8 and all ranks: all groups of a size at
    once, and the first pair alone. Every process of the world runs this."""
    if dist.get_world_size() == 1:
        return
    for group in _groups(processes_per_node):
        for name, make in OPERATIONS.items():
            if name == "send" and group.channel is None:
                continue
            for size in grid.message_bytes:
                point = _measure(name, make, group, size, device)
                if group.talks:
                    yield point
    yield _barrier(device)


def _groups(processes_per_node: int) -> Iterator[_Group]:
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [size for size in GROUP_SIZES if size < world and world % size == 0]
    for size in sizes:
        axes = make_axes(parse(f"tp{size} dp{world // size}"), rank, Recorder(), MANY_HEADS)
        channel = None
        if size == 2:
            pairs = make_axes(parse(f"dp{world // 2} pp2"), rank, Recorder(), MANY_HEADS)
            channel = pairs.channels["forward", 0, 1]
            yield _Group(axes.tp, None, 1, rank < 2, 1)
        yield _Group(axes.tp, channel, world // size, True, 1)
    world_axes = make_axes(parse(f"tp{world}"), rank, Recorder(), MANY_HEADS)
    channel = None
    if world == 2:
        pair = make_axes(parse("pp2"), rank, Recorder(), MANY_HEADS)
        channel = pair.channels["forward", 0, 1]
    yield _Group(world_axes.world, channel, 1, True, 1)
    nodes = world // processes_per_node
    if nodes > 1 and processes_per_node > 1:  # one rank of each node, on all rails at once
        layout = parse(f"tp{processes_per_node} dp{nodes}")
        axes = make_axes(layout, rank, Recorder(), MANY_HEADS)
        yield _Group(axes.dp, None, processes_per_node, True, processes_per_node)


Call = Callable[[], object]


def _all_reduce(x: Tensor, group: _Group) -> tuple[Call, int]:
    return lambda: comm.all_reduce(x, group.axis), x.numel()


def _all_gather(x: Tensor, group: _Group) -> tuple[Call, int]:
    part = x[: x.numel() // group.axis.size]
    return lambda: comm.all_gather(part, group.axis), x.numel()


def _reduce_scatter(x: Tensor, group: _Group) -> tuple[Call, int]:
    return lambda: comm.reduce_scatter(x, group.axis), x.numel()


def _all_to_all(x: Tensor, group: _Group) -> tuple[Call, int]:
    return lambda: comm.all_to_all(x, group.axis), x.numel()


def _all_to_all_rows(x: Tensor, group: _Group) -> tuple[Call, int]:
    size = group.axis.size
    each = max(1, x.numel() // (ROW * size))
    rows = x.new_zeros(each * size, ROW)
    counts = [each] * size
    return lambda: comm.all_to_all_rows(rows, group.axis, counts, counts, each * size), rows.numel()


def _shift(x: Tensor, group: _Group) -> tuple[Call, int]:
    return lambda: comm.start_shift(x, group.axis).wait(), x.numel()


def _send(x: Tensor, group: _Group) -> tuple[Call, int]:
    """One way over the channel of a pipeline: half of the ranks send, half receive."""
    channel = group.channel
    assert channel is not None
    if channel.index == 0:
        return lambda: comm.start_send(x, channel).wait(), x.numel()
    return lambda: comm.start_receive(x.shape, x, channel).wait(), x.numel()


OPERATIONS: dict[str, Callable[[Tensor, _Group], tuple[Call, int]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_rows": _all_to_all_rows,
    "shift": _shift,
    "send": _send,
}


def _measure(
    name: str,
    make: Callable[[Tensor, _Group], tuple[Call, int]],
    group: _Group,
    size_bytes: int,
    device: torch.device,
) -> Point:
    size = group.axis.size
    elements = max(1, size_bytes // 4 // size) * size
    call, sent = make(torch.zeros(elements, device=device), group)
    rounds, calls = (12, 8) if size_bytes <= FEW_BYTES else (6, 2)
    wall_s, cpu_s = _seconds(call if group.talks else None, rounds, calls, device)
    ranks = group.channel.ranks if name == "send" and group.channel else (0, group.stride)
    sizes = {
        "op": name,
        "size": size,
        "groups": group.groups,
        "stride": ranks[1] - ranks[0],
        "bytes": 4 * sent,
    }
    return Point("message", sizes, wall_s, cpu_s, "fp32")


def _barrier(device: torch.device) -> Point:
    wall_s, cpu_s = _seconds(dist.barrier, 12, 8, device)
    sizes = {"op": "barrier", "size": dist.get_world_size(), "groups": 1, "stride": 1, "bytes": 0}
    return Point("message", sizes, wall_s, cpu_s, "fp32")


def _seconds(
    call: Call | None, rounds: int, calls: int, device: torch.device
) -> tuple[float, float]:
    """Medians over rounds of the seconds a call, after one that does not count; ranks without a
    call wait.

    On a CPU something is computed ahead of each call, as in a training step: a message whose bytes
    are still in the cache of the core, between processes that do nothing else, is another thing.
    """
    between = Between(device)
    walls, cpus = [], []
    for _ in range(rounds + 1):
        dist.barrier()
        _finish(device)
        if call is None:
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            between.compute()
            call()
        _finish(device)
        cpus.append((time.process_time() - cpu) / calls - between.cpu_s)
        walls.append((time.perf_counter() - wall) / calls - between.wall_s)
    if call is None:
        return 0.0, 0.0
    least_s = 1e-6  # the difference of two clocks
    return max(least_s, statistics.median(walls[1:])), max(least_s, statistics.median(cpus[1:]))


class Between:
    """What is computed between messages on a CPU, and what it takes a process."""

    def __init__(self, device: torch.device) -> None:
        self.array = torch.ones(CACHE_BYTES // 4) if device.type == "cpu" else None
        self.cpu_s = self.wall_s = 0.0
        if self.array is not None:
            self.cpu_s = min(self._timed() for _ in range(8))
            # Where there are more processes than cores, each waits for its turn.
            self.wall_s = self.cpu_s * max(1.0, dist.get_world_size() / machine.cores())

    def compute(self) -> None:
        if self.array is not None:
            self.array.add_(1.0)

    def _timed(self) -> float:
        began = time.process_time()
        self.compute()
        return time.process_time() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
