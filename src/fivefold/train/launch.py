"""The local processes of a training run: how they start and end.

On a CPU under Linux `launch` forks the workers from a parent that has imported everything
(`preload`) but computed nothing: 8 workers are ready in about half a second, where 8 fresh
interpreters take tens of seconds to import torch. Elsewhere they are spawned, because neither CUDA
nor the macOS frameworks survive a fork.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, TypeVar

from fivefold.errors import UserError
from fivefold.train.failures import (
    DIED,
    GRACE_S,
    Failure,
    StatusRecord,
    WorkerStatus,
    describe,
    explain,
    status,
    worker_report,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def preload() -> None:
    """Import what workers need before they are forked. Computes nothing: a parent with running
    threads or a CUDA context cannot be forked."""
    import torch
    import torch._dynamo  # the first DTensor or optimizer imports it, which takes half a second
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.checkpoint  # noqa: F401


def launch(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> list[T]:
    """Call `function(*args)` in `world_size` new local workers and return the results by rank.

    Each worker has a process group (gloo on "cpu", NCCL with one GPU per rank on "cuda") whose
    collectives give up after `timeout_s` seconds. Results must be picklable; so must `function`
    and `args` where workers are spawned. If a worker raises, exits or is killed, all are ended
    within seconds, and `WorkerFailure` says what happened; a worker's UserError or BrokenPipeError
    is raised as it is. Ctrl-C ends the workers and raises KeyboardInterrupt.
    """
    check_machine(world_size, device)
    preload()
    context = _context(device)
    records = RawArray(StatusRecord, [(b"", -1, b"start-up")] * world_size)
    processes: list[BaseProcess] = []
    pipes: list[connection.Connection] = []
    with tempfile.TemporaryDirectory(prefix="fivefold-") as directory:
        try:
            with _interrupts_held():
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    worker = _Worker(
                        rank, world_size, device, timeout_s, directory, records, theirs, os.getpid()
                    )
                    process = context.Process(target=worker.run, args=(function, args))
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
            results = _collect(processes, pipes, [WorkerStatus(record) for record in records])
            for pipe in pipes:
                with suppress(OSError):
                    pipe.send_bytes(b"all done")
            for process in processes:
                process.join(timeout=5)
            return results
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(timeout=5)
            for pipe in pipes:
                pipe.close()


def check_machine(world_size: int, device: str) -> None:
    """Raises UserError if this machine cannot start so many workers on a device ("cpu", "cuda")."""
    if world_size < 1:
        raise UserError(f"a run needs at least 1 worker, not {world_size}")
    if sys.platform == "win32":
        raise UserError("local workers need Linux or macOS; on Windows run fivefold inside WSL")
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if world_size > gpus:
            fits = (
                f"a layout for at most {gpus} or torchrun on more machines" if gpus else "the CPU"
            )
            raise UserError(
                f"{world_size} ranks need one GPU each, but {gpus} are visible: use {fits}"
            )


def _context(device: str) -> ForkContext | SpawnContext:
    if device == "cpu" and sys.platform == "linux":
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C while workers start. They inherit the block: it reaches the parent alone, which
    ends them without a traceback from each."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# --- the worker's side -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Worker:
    rank: int
    world_size: int
    device: str
    timeout_s: float
    directory: str  # private to this launch; the workers find each other through a file in it
    records: ctypes.Array[StatusRecord]
    pipe: connection.Connection
    parent: int  # process id

    def run(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_with_parent(self.parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the terminal's input is the parent's
        status.record = self.records[self.rank]
        try:
            self._make_process_group()
            status.doing = ""
            # Plain pickle copies a tensor; Connection.send would open shared memory for each.
            answer = pickle.dumps([function(*args)])
            status.doing = "finished"
        except BaseException as error:  # SystemExit and CheckpointException are no Exceptions
            answer = pickle.dumps(describe(self.rank, error))
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self.pipe.send_bytes(answer)
        # Stay until the parent has heard from all: leaving now would break connections that
        # others still use, and bury the first error under theirs.
        self.pipe.recv_bytes()
        import torch.distributed as dist

        dist.destroy_process_group()

    def _make_process_group(self) -> None:
        import torch
        import torch.distributed as dist

        if self.device == "cpu":
            # One core a worker. After a fork more would hang: the parent's OpenMP threads are gone.
            torch.set_num_threads(1)
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        path = os.path.join(self.directory, "store")
        store = dist.FileStore(path, self.world_size)  # pyright: ignore[reportPrivateImportUsage]
        init_process_group(
            store, self.rank, self.world_size, self.device, self.rank, self.timeout_s
        )


def init_process_group(
    store: Store, rank: int, world_size: int, device: str, local_rank: int, timeout_s: float
) -> None:
    """Make the default process group over a store; a GPU is that of `local_rank`."""
    import torch
    import torch.distributed as dist

    gpu = torch.device("cuda", local_rank) if device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        BACKENDS[device],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=gpu,
    )


def _end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


# --- the parent's side -------------------------------------------------------------------------


def _collect(
    processes: list[BaseProcess], pipes: list[connection.Connection], statuses: list[WorkerStatus]
) -> list:
    """Wait for all workers: their results by rank, or the failure that came first."""
    results: dict[int, object] = {}
    failures: list[Failure] = []
    pending = set(range(len(processes)))
    listen_until = float("inf")
    while pending and time.monotonic() < listen_until:
        connection.wait([pipes[rank] for rank in pending], timeout=0.1)
        for rank in sorted(pending):
            answer = _answer(rank, processes[rank], pipes[rank])
            if answer is None:
                continue
            pending.remove(rank)
            if isinstance(answer, Failure):
                failures.append(answer)
                listen_until = min(listen_until, time.monotonic() + GRACE_S)
            else:
                [results[rank]] = answer
    if failures:
        culprit = min(failures, key=lambda it: (it.kind, it.time_s))
        report = worker_report(statuses) if culprit.hung else ""
        raise explain(culprit, statuses[culprit.rank], report)
    return [results[rank] for rank in sorted(results)]


def _answer(rank: int, process: BaseProcess, pipe: connection.Connection) -> Failure | list | None:
    """A worker's result in a list of one, or its failure; None while it is at work."""
    gone = process.exitcode is not None  # looked at before the pipe: no answer can slip between
    try:
        if pipe.poll():
            return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        gone = True
    if not gone:
        return None
    process.join(timeout=GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        what = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    else:
        what = f"exited without a report (exit code {code})"
    # NCCL's watchdog ends a process that waited too long by SIGABRT.
    return Failure(rank, DIED, time.monotonic(), what, hung=code == -signal.SIGABRT)
