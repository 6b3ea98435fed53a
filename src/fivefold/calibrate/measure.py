"""Measures the machine at hand, in local processes or in those that torchrun started."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fivefold.calibrate import steps
from fivefold.calibrate.grid import Grid, fitting
from fivefold.calibrate.points import Point, merged
from fivefold.cluster import host as machine
from fivefold.train.launch import launch, preload
from fivefold.train.metrics import peak_flops_per_s
from fivefold.train.torchrun import describe_here, join

PATIENCE_S = 1800.0
"""How long a process may wait for the others: most wait while a few measure products."""


@dataclass(frozen=True)
class Measured:
    """All that was seen of a machine."""

    device: str  # "cpu" or "cuda"
    name: str  # of the device
    memory_bytes: int  # of a device; on a CPU the share of a process
    processes: int
    processes_per_node: int
    cores: int  # of a node, which its processes share; on a CPU
    processors: int  # multiprocessors of a GPU
    peak: dict[str, float]  # FLOP/s by precision, of the data sheet where it is known
    points: list[Point]


def measure_locally(grid: Grid, device: str, processes: int) -> Measured:
    """Start processes on this machine, and measure in them."""
    preload()  # importing is no part of a start
    wall, cpu = time.perf_counter(), _children_s()
    launch(_nothing, processes, device=device)
    wall, cpu = time.perf_counter() - wall, _children_s() - cpu
    start = Point("launch", {"size": processes}, wall, cpu / processes)
    cores = machine.cores()
    by_rank = launch(
        _work, processes, grid, device, cores, processes, device=device, timeout_s=PATIENCE_S
    )
    whole = list(_steps(processes)) if device == "cpu" else []
    return _measured(by_rank, device, processes, processes, [start, *whole])


def _steps(processes: int) -> Iterator[Point]:
    """Whole steps of small models, of up to so many processes where there are more than one."""
    for model, text in steps.cases(processes) if processes > 1 else ():
        world_size = steps.layout_of(text).world_size
        yield from merged(launch(steps.measure_step, world_size, model, text))


def measure_joined(grid: Grid, device: str) -> Measured | None:
    """Measure as one of the processes of torchrun. The result is rank 0's; None on the others."""
    import torch.distributed as dist

    join(device, PATIENCE_S)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    by_rank: list = [None] * world_size
    try:
        dist.all_gather_object(by_rank, _work(grid, device, machine.cores(), local))
        dist.destroy_process_group()
    except Exception as error:
        raise describe_here(rank, error) from error
    return _measured(by_rank, device, world_size, local, []) if rank == 0 else None


def _nothing() -> None:
    pass


def _children_s() -> float:
    """Processor seconds of the processes that have been started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


Seen = tuple[str, int, int, list[Point]]
"""What one process brings back: name, memory and processors of its device, and points."""


def _measured(
    by_rank: list[Seen], device: str, processes: int, local: int, points: list[Point]
) -> Measured:
    name, memory_bytes, processors, _ = by_rank[0]
    return Measured(
        device=device,
        name=name,
        memory_bytes=memory_bytes if device == "cuda" else memory_bytes // local,
        processes=processes,
        processes_per_node=local,
        cores=machine.cores(),
        processors=processors,
        peak=_data_sheet(name) if device == "cuda" else {},
        points=points + merged([seen[-1] for seen in by_rank]),
    )


def _data_sheet(name: str) -> dict[str, float]:
    peaks = {precision: peak_flops_per_s(name, precision) for precision in ("bf16", "fp32")}
    return {precision: peak for precision, peak in peaks.items() if peak is not None}


def _work(grid: Grid, device: str, cores: int, processes_per_node: int) -> Seen:
    """What each process does, once the default process group exists.

    On a CPU as many processes as there are cores measure what one process does, all at once: in a
    run, too, the cores share the memory. On GPUs all do."""
    import torch
    import torch.distributed as dist

    from fivefold.calibrate.blocks import blocks
    from fivefold.calibrate.clock import Clock
    from fivefold.calibrate.kernels import Kernels
    from fivefold.calibrate.messages import messages

    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
        here = torch.device("cpu")
    else:
        here = torch.device("cuda", torch.cuda.current_device())
    seen = _device(here)
    grid = fitting(grid, seen[1] / (processes_per_node if device == "cpu" else 1))
    clock = Clock(here, grid.patience_s)
    kernels = Kernels(grid, clock)
    parts: list[tuple[str, Callable[[], Iterator[Point]]]] = [
        ("products", kernels.products),
        ("products of experts", kernels.grouped),
        ("attention", kernels.attention),
        ("light operations", kernels.light),
        ("memory", kernels.memory),
        ("single operations", kernels.host),
        ("the optimizer", kernels.optimizer),
        ("layers", lambda: blocks(grid, clock)),
    ]
    rank = dist.get_rank()
    points: list[Point] = []
    with _progress(rank == 0, len(parts) + 1) as tell:
        for what, part in parts:
            tell(what)
            if device == "cuda" or rank < cores:
                points += part()
        tell("messages")
        dist.barrier()
        points += messages(grid, here, processes_per_node)
    return *seen, points


def _device(device) -> tuple[str, int, int]:
    """Name, memory in bytes and processors."""
    import torch

    if device.type == "cpu":
        return machine.cpu_name(), machine.memory_bytes(), 1
    found = torch.cuda.get_device_properties(device)
    return found.name, found.total_memory, found.multi_processor_count


@contextmanager
def _progress(shown: bool, parts: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that tells what is being measured; where that is no terminal, nothing."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("measuring {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    with bar:
        task = bar.add_task("", total=parts)
        done = -1

        def tell(what: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=what, completed=done)

        yield tell
