"""What the processes of a run are doing, and the error that is reported when one fails.

Every worker writes its step and call into `status`, memory it shares with its parent, so the parent
can report them even for a worker that the kernel killed.
"""

from __future__ import annotations

import ctypes
import errno
import re
import time
import traceback
from dataclasses import dataclass

from fivefold.errors import UserError

GRACE_S = 1.0
"""How long after the first failure to listen for the one that caused it."""


class StatusRecord(ctypes.Structure):
    """The shared memory of a `WorkerStatus`."""

    _fields_ = [
        ("coordinates", ctypes.c_char * 96),
        ("step", ctypes.c_int64),  # -1: not in a step
        ("doing", ctypes.c_char * 256),
    ]


@dataclass(frozen=True)
class _Text:
    """A text in the record, cut to its bytes."""

    field: str
    size: int

    def __get__(self, status: WorkerStatus, owner: type) -> str:
        return getattr(status.record, self.field).decode(errors="ignore")

    def __set__(self, status: WorkerStatus, text: str) -> None:
        setattr(status.record, self.field, text.encode()[: self.size])


class WorkerStatus:
    """What a worker is doing. Writing a field takes well under a microsecond and no lock; text that
    is too long for the record (96 and 256 bytes) is cut."""

    coordinates = _Text("coordinates", 96)
    """The worker's place in the layout, such as "pp1 tp0"."""
    doing = _Text("doing", 256)
    """The call it is in, such as "all_reduce of 4,096 bytes over tp"."""

    def __init__(self, record: StatusRecord) -> None:
        self.record = record

    @property
    def step(self) -> int | None:
        return None if self.record.step < 0 else self.record.step

    @step.setter
    def step(self, step: int | None) -> None:
        self.record.step = -1 if step is None else step


status = WorkerStatus(StatusRecord(b"", -1, b""))
"""That of this process. The training loop and the collectives keep it up to date."""


class WorkerFailure(Exception):
    """A worker failed. The message says which one, in which step and call, and why; errors that
    this failure caused in other workers are left out. `traceback` is the worker's, or "" if it left
    none."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


DIED, RAISED, TIMED_OUT, CUT_OFF = range(4)
"""Kinds of failure. The lowest is the likeliest cause of the others."""


@dataclass(frozen=True)
class Failure:
    """How one process ended, reported by itself or by its parent."""

    rank: int
    kind: int  # DIED, RAISED, TIMED_OUT or CUT_OFF
    time_s: float  # of the monotonic clock, which all processes of a machine share
    what: str  # "failed", or how the worker died
    error: str = ""
    traceback: str = ""
    is_user_error: bool = False
    is_closed_output: bool = False  # nobody reads what it prints
    hung: bool = False  # the cause may be what other ranks are doing


_SAYS_TIMED_OUT = re.compile(r"time[d ]?-? ?out", re.IGNORECASE)
_SAYS_CUT_OFF = re.compile(
    r"closed by peer|reset by peer|broken pipe|pair closure|socket closed|connection closed"
    r"|communicator was aborted|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)


def describe(rank: int, error: BaseException) -> Failure:
    """The report of an exception, to be sent to the parent."""
    kind = RAISED
    for cause in (error, error.__cause__):
        if isinstance(cause, RuntimeError):  # as all of torch.distributed's errors are
            if _SAYS_CUT_OFF.search(str(cause)):
                kind = CUT_OFF
            elif _SAYS_TIMED_OUT.search(str(cause)):
                kind = TIMED_OUT
    message = str(error).split("\nException raised from")[0].strip()  # C++ frames follow
    return Failure(
        rank,
        kind,
        time.monotonic(),
        what="failed",
        error=message if isinstance(error, UserError) else f"{type(error).__name__}: {message}",
        traceback="".join(traceback.format_exception(error)),
        is_user_error=isinstance(error, UserError),
        is_closed_output=isinstance(error, BrokenPipeError),
        hung=kind in (TIMED_OUT, CUT_OFF),
    )


def explain(culprit: Failure, at: WorkerStatus, report: str = "") -> Exception:
    """What to raise for a failure of the rank with status `at`: the worker's UserError or
    BrokenPipeError as it is, else a WorkerFailure. `report` tells what all ranks are doing."""
    if culprit.is_user_error:
        return UserError(culprit.error)
    if culprit.is_closed_output:
        return BrokenPipeError(errno.EPIPE, culprit.error)
    message = f"{_name(culprit.rank, at)} {culprit.what}"
    if at.step is not None:
        message += f" in step {at.step}"
    if at.doing:
        message += f" during {at.doing}"
    if culprit.error:
        message += f": {culprit.error}"
    if report:
        message += "\n" + report
    return WorkerFailure(message, culprit.rank, culprit.traceback)


def _name(rank: int, at: WorkerStatus) -> str:
    return f"rank {rank} ({at.coordinates})" if at.coordinates else f"rank {rank}"


def worker_report(statuses: list[WorkerStatus]) -> str:
    """One line per step and call, the one with the fewest ranks first: in a hang the odd one out is
    usually the one that the others wait for."""
    groups: dict[tuple[int | None, str], list[str]] = {}
    for rank, at in enumerate(statuses):
        groups.setdefault((at.step, at.doing), []).append(_name(rank, at))
    lines = []
    for (step, doing), names in sorted(groups.items(), key=lambda group: len(group[1])):
        in_step = "" if step is None else f" in step {step}"
        lines.append(f"{', '.join(names)}{in_step}: {doing or 'computing'}")
    return "\n".join(lines)
