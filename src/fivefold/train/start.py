"""Where a run starts: with its first step, or after a checkpoint's."""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.errors import UserError
from fivefold.train import checkpoint
from fivefold.train.checkpoint import Saved
from fivefold.train.learning_rate import learning_rate
from fivefold.train.prepare import Prepared
from fivefold.train.runfile import Run


def choose_start(prepared: Prepared) -> Saved | None:
    """The checkpoint that the run resumes from, which may be that of its last step; None if it
    starts with the first step. Checks that `out` can be written and has room. Raises UserError if
    the run cannot start."""
    run = prepared.run
    if run.out is None:
        return None
    out = Path(run.out)
    _check_writable(out)
    complete, partial = checkpoint.find(checkpoints(run))
    for path in partial:
        print(f"ignored {path}: an interrupted save left it")
    newest = complete[-1] if complete else None
    if newest is not None and not run.checkpoint.resume:
        raise UserError(
            f"{out} holds the checkpoints of an earlier run, up to step {newest.step}: add "
            "--resume to continue that run, or choose another out"
        )
    if newest is not None:
        checkpoint.check_resumable(newest, prepared.config, prepared.samples)
        _announce_resume(newest, run)
    elif run.checkpoint.resume:
        print(f"there is no checkpoint in {checkpoints(run)}: starting with the first step")
    if run.checkpoint.every is not None:
        steps = run.steps - (newest.step if newest else 0)
        saves = -(-steps // run.checkpoint.every)
        checkpoint.check_room(checkpoints(run), prepared.config, run.checkpoint.keep, saves)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out {out} cannot be made: {error.strerror}; choose another out"
        ) from error
    return newest


def checkpoints(run: Run) -> Path:
    """The folder of a run's checkpoints."""
    return Path(str(run.out), "checkpoints")


def agree_on_start(prepared: Prepared) -> Saved | None:
    """`choose_start` on rank 0, for all ranks. All ranks call this."""
    import torch.distributed as dist

    outcome: list[tuple[Saved | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(choose_start(prepared), None)]
        except UserError as error:
            outcome = [(None, str(error))]
    dist.broadcast_object_list(outcome, src=0)
    [(start, rejection)] = outcome
    if rejection is not None:
        raise UserError(rejection)
    return start


def _check_writable(out: Path) -> None:
    exists = next(path for path in (out, *out.parents) if path.exists())
    if not exists.is_dir():
        raise UserError(f"out {out} cannot be made, for {exists} is a file: choose another out")
    if not os.access(exists, os.W_OK | os.X_OK):
        raise UserError(f"out {out} cannot be written: {exists} does not allow it")


def _announce_resume(newest: Saved, run: Run) -> None:
    if newest.step >= run.steps:
        print(
            f"{newest.folder} is after step {newest.step}, and the run has {run.steps} steps: "
            "nothing is left to do"
        )
        return
    print(
        f"resuming after step {newest.step} ({newest.tokens:,} tokens), trained with layout "
        f"{newest.layout}"
    )
    rate = learning_rate(newest.step, run)
    if abs(rate - newest.learning_rate) > 1e-9 * abs(rate):
        print(
            f"note: the learning rate resumes at {rate:.5g}; the checkpoint's run would have used "
            f"{newest.learning_rate:.5g}: lr, lr_schedule or steps have changed"
        )
