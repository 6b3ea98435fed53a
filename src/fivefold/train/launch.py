"""How the processes of a training run start, fail and end.

On one machine `launch` starts the workers itself. On a CPU under Linux it forks them from a
parent that has imported everything (`preload`) but computed nothing: 8 workers are ready in about
half a second, where 8 fresh interpreters take tens of seconds to import torch. Elsewhere they are
spawned, because neither CUDA nor the macOS frameworks survive a fork. Under torchrun the
processes exist already and `join` connects them.

Every worker writes where it is into `where`, memory it shares with its parent, so that the parent
can say in which step and call a worker was even when the kernel killed it without a word.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

GRACE_S = 1.0
"""How long after the first failure the parent listens for the one that caused it."""


class _Record(ctypes.Structure):
    _fields_ = [
        ("coordinates", ctypes.c_char * 96),
        ("step", ctypes.c_int64),  # -1: not in a step
        ("doing", ctypes.c_char * 256),
    ]


class Where:
    """Where a worker is. Writing a field costs well under a microsecond and takes no lock; text
    that is too long for the record (96 and 256 bytes) is cut."""

    def __init__(self, record: _Record) -> None:
        self.record = record

    @property
    def coordinates(self) -> str:
        """The worker's place in the layout, such as "pp1 tp0"."""
        return self.record.coordinates.decode(errors="ignore")

    @coordinates.setter
    def coordinates(self, text: str) -> None:
        self.record.coordinates = text.encode()[:96]

    @property
    def step(self) -> int | None:
        return None if self.record.step < 0 else self.record.step

    @step.setter
    def step(self, step: int | None) -> None:
        self.record.step = -1 if step is None else step

    @property
    def doing(self) -> str:
        """The call it is in, such as "all_reduce of 4,096 bytes over tp"."""
        return self.record.doing.decode(errors="ignore")

    @doing.setter
    def doing(self, text: str) -> None:
        self.record.doing = text.encode()[:256]


where = Where(_Record(b"", -1, b""))
"""Where this process is. The training loop and the collectives keep it up to date."""


class WorkerFailure(Exception):
    """A worker failed. The message says which one, where it was, and why; errors that this failure
    caused in other workers are left out. `traceback` is the worker's, or "" if it left none."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


def preload() -> None:
    """Import all that a worker needs, so that forked workers need not. Computes nothing: a parent
    with running threads or a CUDA context is not one to fork from."""
    import torch
    import torch._dynamo  # the first DTensor or optimizer imports it, which takes half a second
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.checkpoint  # noqa: F401


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> list[Any]:
    """Call `function(*args)` in `world_size` new local workers and return the results by rank.

    Each worker has a process group (gloo on "cpu", NCCL with one GPU a rank on "cuda") whose
    collectives give up after `timeout_s` seconds. Results must be picklable; so must `function`
    and `args` where workers are spawned. If a worker raises, exits or is killed, all are ended
    within seconds, and `WorkerFailure` says what happened where; a worker's UserError comes out
    as it is. Ctrl-C ends the workers and comes out as KeyboardInterrupt.
    """
    check_machine(world_size, device)
    preload()
    context = _context(device)
    records = RawArray(_Record, [(b"", -1, b"start-up")] * world_size)
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
            results = _collect(processes, pipes, [Where(record) for record in records])
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
                f"{world_size} ranks need a GPU each and {gpus} are visible: use {fits}"
            )


def _context(device: str) -> ForkContext | SpawnContext:
    if device == "cpu" and sys.platform == "linux":
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers start. They inherit the hold, so that it reaches the parent
    alone, which then ends them without a traceback from each."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# --- the worker's side -------------------------------------------------------------------------

DIED, RAISED, TIMED_OUT, CUT_OFF = range(4)
"""Kinds of failure. The lowest is the likeliest cause of the others."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: int  # DIED, RAISED, TIMED_OUT or CUT_OFF
    time_s: float  # of the monotonic clock, which all processes of a machine share
    what: str  # "failed", or how the worker died
    error: str = ""
    traceback: str = ""
    is_user_error: bool = False
    hung: bool = False  # the cause may be where other ranks stand


@dataclass(frozen=True)
class _Worker:
    rank: int
    world_size: int
    device: str
    timeout_s: float
    directory: str  # private to this launch; the workers find each other through a file in it
    records: ctypes.Array[_Record]
    pipe: connection.Connection
    parent: int  # process id

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_with_parent(self.parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the terminal's input is the parent's
        where.record = self.records[self.rank]
        try:
            self._make_process_group()
            where.doing = ""
            # Plain pickle copies a tensor; Connection.send would open shared memory for each.
            answer = pickle.dumps([function(*args)])
            where.doing = "finished"
        except BaseException as error:  # SystemExit and CheckpointException are no Exceptions
            answer = pickle.dumps(_describe(self.rank, error))
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
        _init_process_group(
            store, self.rank, self.world_size, self.device, self.rank, self.timeout_s
        )


def _init_process_group(
    store: Store, rank: int, world_size: int, device: str, local_rank: int, timeout_s: float
) -> None:
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


_TIMED_OUT = re.compile(r"time[d ]?-? ?out", re.IGNORECASE)
_CUT_OFF = re.compile(
    r"closed by peer|reset by peer|broken pipe|pair closure|socket closed|connection closed"
    r"|communicator was aborted|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)


def _describe(rank: int, error: BaseException) -> _Failure:
    """The report of an exception, to be sent to the parent."""
    kind = RAISED
    for cause in (error, error.__cause__):
        if isinstance(cause, RuntimeError):  # as all of torch.distributed's errors are
            if _CUT_OFF.search(str(cause)):
                kind = CUT_OFF
            elif _TIMED_OUT.search(str(cause)):
                kind = TIMED_OUT
    message = str(error).split("\nException raised from")[0].strip()  # C++ frames follow
    return _Failure(
        rank,
        kind,
        time.monotonic(),
        what="failed",
        error=message if isinstance(error, UserError) else f"{type(error).__name__}: {message}",
        traceback="".join(traceback.format_exception(error)),
        is_user_error=isinstance(error, UserError),
        hung=kind in (TIMED_OUT, CUT_OFF),
    )


# --- the parent's side -------------------------------------------------------------------------


def _collect(
    processes: list[BaseProcess], pipes: list[connection.Connection], places: list[Where]
) -> list[Any]:
    """Wait for all workers: their results by rank, or the failure that came first."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    pending = set(range(len(processes)))
    listen_until = float("inf")
    while pending and time.monotonic() < listen_until:
        connection.wait([pipes[rank] for rank in pending], timeout=0.1)
        for rank in sorted(pending):
            answer = _answer(rank, processes[rank], pipes[rank])
            if answer is None:
                continue
            pending.remove(rank)
            if isinstance(answer, _Failure):
                failures.append(answer)
                listen_until = min(listen_until, time.monotonic() + GRACE_S)
            else:
                [results[rank]] = answer
    if failures:
        culprit = min(failures, key=lambda it: (it.kind, it.time_s))
        standings = _standings(places) if culprit.hung else ""
        raise _explain(culprit, places[culprit.rank], standings)
    return [results[rank] for rank in sorted(results)]


def _answer(
    rank: int, process: BaseProcess, pipe: connection.Connection
) -> _Failure | list[Any] | None:
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
    return _Failure(rank, DIED, time.monotonic(), what, hung=code == -signal.SIGABRT)


def _explain(culprit: _Failure, at: Where, standings: str = "") -> Exception:
    if culprit.is_user_error:
        return UserError(culprit.error)
    message = f"{_name(culprit.rank, at)} {culprit.what}"
    if at.step is not None:
        message += f" in step {at.step}"
    if at.doing:
        message += f" during {at.doing}"
    if culprit.error:
        message += f": {culprit.error}"
    if standings:
        message += "\n" + standings
    return WorkerFailure(message, culprit.rank, culprit.traceback)


def _name(rank: int, at: Where) -> str:
    return f"rank {rank} ({at.coordinates})" if at.coordinates else f"rank {rank}"


def _standings(places: list[Where]) -> str:
    """One line for each place where ranks stand, the fewest ranks first: in a hang the odd one
    out is usually the one that the others wait for."""
    groups: dict[tuple[int | None, str], list[str]] = {}
    for rank, at in enumerate(places):
        groups.setdefault((at.step, at.doing), []).append(_name(rank, at))
    lines = []
    for (step, doing), names in sorted(groups.items(), key=lambda group: len(group[1])):
        in_step = "" if step is None else f" in step {step}"
        lines.append(f"{', '.join(names)}{in_step}: {doing or 'computing'}")
    return "\n".join(lines)


# --- under torchrun ----------------------------------------------------------------------------


def joined_by_torchrun() -> bool:
    """Whether torchrun, or anything that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def processes_of_torchrun() -> int:
    return _number("WORLD_SIZE")


def check_world_size(layout_world_size: int) -> None:
    """Refuse, before any process group is made, a number of processes the layout is not for."""
    started = processes_of_torchrun()
    if started != layout_world_size:
        raise UserError(
            f"the layout is for {layout_world_size} ranks, but {started} were started "
            f"(WORLD_SIZE={started}): start {layout_world_size} or choose a layout for {started}"
        )


def join(device: str, timeout_s: float = 300.0) -> None:
    """Make the default process group from torchrun's environment variables. Raises UserError if
    not all ranks have met at MASTER_ADDR:MASTER_PORT after `timeout_s` seconds, which is also how
    long a collective may take."""
    import torch

    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    store = _meet(rank, world_size, timeout_s)
    local_rank = 0
    if device == "cuda":
        gpus = torch.cuda.device_count()
        local_rank = int(os.environ.get("LOCAL_RANK", rank % max(gpus, 1)))
        if local_rank >= gpus:
            raise UserError(
                f"rank {rank} is number {local_rank} of its machine (from 0), where {gpus} GPUs "
                f"are visible: start at most {gpus} processes there"
            )
    _init_process_group(store, rank, world_size, device, local_rank, timeout_s)


def describe_here(rank: int, error: Exception) -> Exception:
    """An error of this process as `launch` would report one of its workers'."""
    failure = _describe(rank, error)
    if failure.kind == CUT_OFF:
        # Another rank's failure, which is the one to read. Let torchrun end this process first.
        time.sleep(5 * GRACE_S)
    return _explain(failure, where)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UserError(f"the environment variable {name} must be a whole number, not {text!r}")
    return int(text)


def _meet(rank: int, world_size: int, timeout_s: float) -> Store:
    """The store that the ranks share, once all have signed in."""
    from torch.distributed.distributed_c10d import PrefixStore

    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT must lie between 1 and 65535, not {port}")
    # torchrun's own process may hold the store; else rank 0 does, and if it has to give up it
    # does so last, so that the others can still look who is missing.
    holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    give_up = time.monotonic() + timeout_s + (2 if holds_store else 0)
    try:
        if holds_store:
            store = _store("127.0.0.1", port, timeout_s, serve=True)
            _knock(host, port, give_up)  # is MASTER_ADDR this machine?
        else:
            _knock(host, port, give_up)
            store = _store(host, port, timeout_s, serve=False)
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"rank 0 cannot listen at {host}:{port}: another process has taken the port; "
                "set MASTER_PORT to a free one"
            ) from error
        raise UserError(
            f"rank {rank} found no rank 0 at {host}:{port} (MASTER_ADDR:MASTER_PORT) within "
            f"{timeout_s:g} s ({error}): check that the address is right and that rank 0 runs"
        ) from error

    # A restart by torchrun finds the old attempt's keys in the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"fivefold/attempt_{attempt}", store)
    keys = [f"rank_{other}" for other in range(world_size)]
    try:
        store.set(keys[rank], "here")
        store.wait(keys, timedelta(seconds=max(give_up - time.monotonic(), 1)))
    except RuntimeError as error:
        raise UserError(_who_is_missing(store, keys, f"{host}:{port}", timeout_s)) from error
    return store


def _store(host: str, port: int, timeout_s: float, serve: bool) -> Store:
    import torch.distributed as dist

    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # it could not say which ranks are missing
    )


def _knock(host: str, port: int, give_up: float) -> None:
    """Wait until something listens at the address. TCPStore would wait too, but twice as long as
    asked and with pages of warnings. Raises the last OSError at time `give_up`."""
    while True:
        try:
            patience_s = max(give_up - time.monotonic(), 0.1)
            return socket.create_connection((host, port), patience_s).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def _who_is_missing(store: Store, keys: list[str], address: str, timeout_s: float) -> str:
    try:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return f"rank 0 left {address} before all {len(keys)} ranks had joined; it has said why"
    return (
        f"of {len(keys)} ranks (WORLD_SIZE) these did not join at {address} within "
        f"{timeout_s:g} s: {', '.join(missing)}; start them too, or set WORLD_SIZE to the number "
        "that run"
    )
