"""Saving a checkpoint, and removing the old ones."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from fivefold.errors import UserError
from fivefold.train.checkpoint.dcp import SavePlanner, Writer, first_failure, read_metadata
from fivefold.train.checkpoint.pieces import expected_shapes, pieces
from fivefold.train.checkpoint.saved import FORMAT, HEADER, Saved, find, identity
from fivefold.train.trainer import Trainer

T = TypeVar("T")


def save(trainer: Trainer, step: int, tokens: int, learning_rate: float, folder: Path) -> None:
    """Write the state after `step` steps, in which `tokens` were seen, into `folder`; the next
    step would have `learning_rate`. All ranks call this. `folder` is one that all nodes share.

    Raises UserError if the disk rejects it, and RuntimeError if ranks hold different values of the
    same piece; on all ranks, and then no checkpoint has been made.
    """
    saved = Saved(
        folder / f"step-{step:06d}",
        step,
        tokens,
        str(trainer.layout),
        learning_rate,
        identity(trainer.config, trainer.samples),
    )
    aside = folder / _broadcast(f".{saved.folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write(trainer, aside)
        failure = _complete(aside, saved) if dist.get_rank() == 0 else None
        if failure := _broadcast(failure):
            raise UserError(failure)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(trainer: Trainer, folder: Path) -> None:
    planner = SavePlanner(set(expected_shapes(trainer.config)))
    writer = Writer(folder, overwrite=False)
    try:
        state_dict_saver.save(pieces(trainer), storage_writer=writer, planner=planner)
    except CheckpointException as error:
        rank, cause = first_failure(error)
        if isinstance(cause, OSError):
            raise UserError(_disk_error(folder.parent, rank, cause)) from cause
        raise RuntimeError(f"no checkpoint was made: {cause}") from cause


def _complete(aside: Path, saved: Saved) -> str | None:
    """The last steps, on rank 0: what went wrong, if anything did."""
    try:
        pieces = read_metadata(aside).storage_data.values()
        missing = {piece.relative_path for piece in pieces} - {p.name for p in aside.iterdir()}
        if missing:
            return (
                f"{len(missing)} files of the checkpoint, such as {min(missing)}, are not in "
                f"{aside.parent} on the node of rank 0: out must be a folder that all nodes share"
            )
        header = {"format": FORMAT, **asdict(saved)}
        del header["folder"]
        with (aside / HEADER).open("w") as file:
            json.dump(header, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(aside)
        if saved.folder.exists():  # of the same step, when a run goes over it again
            _set_aside(saved.folder)
        os.rename(aside, saved.folder)
        _sync_folder(aside.parent)
    except OSError as error:
        return _disk_error(aside.parent, 0, error)
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`, and what cut-off saves have left. For rank 0,
    after a save."""
    complete, partial = find(folder)
    for saved in complete[:-keep]:
        partial.append(_set_aside(saved.folder))
    for path in partial:
        shutil.rmtree(path, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Takes the name from a checkpoint first: half removed, it must not look complete."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
    os.rename(folder, aside)
    return aside


def _broadcast(value: T) -> T:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _disk_error(folder: Path, rank: int, error: OSError) -> str:
    return f"rank {rank} cannot write the checkpoint to {folder}: {error.strerror or error}"


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, as fsync does for the content of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
