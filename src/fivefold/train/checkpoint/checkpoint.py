"""Checkpoints that resume in any other layout, by torch.distributed.checkpoint (DCP).

A checkpoint is a folder `step-000123`: the state after 123 steps. Each rank writes the pieces
that it holds, under the parameter's global name and with their place in the whole tensor, so a
rank of another layout can pick together the pieces it needs. It is written into a hidden folder,
brought to the disk, and then renamed: a folder with the right name is complete, whenever the
processes or the machine died.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters
from fivefold.train.checkpoint.dcp import LoadPlanner, Reader, SavePlanner, Writer, read_metadata
from fivefold.train.checkpoint.pieces import expected_shapes, pieces
from fivefold.train.data.samples import Samples
from fivefold.train.trainer import Trainer

FORMAT = 1
FACTS = "checkpoint.json"
COMPLETE = re.compile(r"step-(\d+)")
PARTIAL = re.compile(r"\.(step-\d+)\.[0-9a-f]{8}(\.old)?")

BYTES_PER_PARAMETER = 12
"""fp32 weight and two fp32 moments."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    step: int  # finished steps
    tokens: int  # seen in them
    layout: str  # that wrote it
    learning_rate: float  # that its run would have taken next
    identity: dict[str, Any]  # see `identity`


def identity(config: ModelConfig, samples: Samples) -> dict[str, Any]:
    """What a run must share with the one that it goes on from, in the types of JSON."""
    values = {
        "model": asdict(config),
        "seed": samples.seed,
        "global_batch": samples.global_batch,
        "data": samples.token_file.key,
        "sequence_length": samples.sequence_length,
        "isolate_documents": samples.isolate_documents,
    }
    return json.loads(json.dumps(values))


# --- before a run ------------------------------------------------------------------------------


def find(folder: Path) -> tuple[list[Saved], list[Path]]:
    """The complete checkpoints in a folder, oldest first, and the partial ones."""
    complete, partial = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if COMPLETE.fullmatch(path.name) and (path / FACTS).is_file():
            complete.append(_read_facts(path))
        elif COMPLETE.fullmatch(path.name) or PARTIAL.fullmatch(path.name):
            partial.append(path)
    return sorted(complete, key=lambda saved: saved.step), sorted(partial)


def _read_facts(folder: Path) -> Saved:
    try:
        facts = json.loads((folder / FACTS).read_text())
        written = facts.pop("format")
        if written == FORMAT:
            return Saved(folder, **facts)
        problem = f"it has format {written}, and this version reads format {FORMAT}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"{FACTS} is damaged: {type(error).__name__}: {error}"
    raise UserError(
        f"the checkpoint {folder} cannot be read ({problem}): move it away to resume from an "
        "older one"
    )


def check_resumable(saved: Saved, config: ModelConfig, samples: Samples) -> None:
    """Raises UserError if a checkpoint is of another run, or has not all of the model."""
    differences = _differences(saved.identity, identity(config, samples))
    if differences:
        raise UserError(
            f"the run differs from that of the checkpoint {saved.folder}: "
            f"{'; '.join(differences)}; change it back, or start anew with another out"
        )
    try:
        found = read_metadata(saved.folder).state_dict_metadata
    except Exception as error:  # whatever damage makes of a pickle
        raise UserError(
            f"the checkpoint {saved.folder} cannot be read ({_first_sentence(error)}): move it "
            "away to resume from an older one"
        ) from error
    lacking = [
        name
        for name, shape in expected_shapes(config).items()
        if not isinstance(table := found.get(name), TensorStorageMetadata) or table.size != shape
    ]
    if lacking:
        raise UserError(
            f"the checkpoint {saved.folder} lacks {len(lacking)} tensors, such as {lacking[0]}: "
            "move it away to resume from an older one"
        )


def _differences(saved: Any, now: Any, key: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*saved, *now]))
        nested = (_differences(saved.get(k), now.get(k), f"{key}.{k}" if key else k) for k in keys)
        return [difference for found in nested for difference in found]
    if saved == now:
        return []
    if key == "data":
        return ["data are other files or another tokenizer"]
    return [f"{key} is {json.dumps(saved)} there and {json.dumps(now)} here"]


def check_room(folder: Path, config: ModelConfig, keep: int, saves: int) -> None:
    """Raises UserError if a disk has no room for the checkpoints of a run that saves `saves` times
    and keeps `keep`, and one more, because an old one goes only when the new one is there."""
    size = BYTES_PER_PARAMETER * count_parameters(config).total
    there = len(find(folder)[0])
    exists = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(exists).free
    wanted = min(saves, max(1, keep + 1 - there))
    if wanted * size <= free:
        return
    fits = free // size + there - 1
    cure = f"set checkpoint.keep to {fits}" if 1 <= fits < keep else "make room, or leave out every"
    raise UserError(
        f"{wanted} checkpoints of {_size(size)} ({BYTES_PER_PARAMETER} bytes a parameter; keep "
        f"{keep} and the new one) need more than the {_size(free)} that are free at {exists}: "
        f"{cure}"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


# --- saving ------------------------------------------------------------------------------------


def save(trainer: Trainer, step: int, tokens: int, learning_rate: float, folder: Path) -> None:
    """Write the state after `step` steps, in which `tokens` were seen, into `folder`; the next
    step would have `learning_rate`. All ranks call this. `folder` is one that all nodes share.

    Raises UserError if the disk refuses, and RuntimeError if ranks do not agree on the values that
    they both hold; on all ranks, and then no checkpoint has been made.
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
        rank, cause = _first_failure(error)
        if isinstance(cause, OSError):
            raise UserError(_refused_by_disk(folder.parent, rank, cause)) from cause
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
        facts = {"format": FORMAT, **asdict(saved)}
        del facts["folder"]
        with (aside / FACTS).open("w") as file:
            json.dump(facts, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(aside)
        if saved.folder.exists():  # of the same step, when a run goes over it again
            _set_aside(saved.folder)
        os.rename(aside, saved.folder)
        _sync_folder(aside.parent)
    except OSError as error:
        return _refused_by_disk(aside.parent, 0, error)
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


# --- loading -----------------------------------------------------------------------------------


def load(trainer: Trainer, saved: Saved) -> None:
    """Read a checkpoint into a trainer of any layout, in place. All ranks call this. Raises
    UserError if a file cannot be read; the trainer is then of no use."""
    try:
        state_dict_loader.load(
            pieces(trainer), storage_reader=Reader(saved.folder), planner=LoadPlanner()
        )
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise UserError(
            f"rank {rank} cannot read the checkpoint {saved.folder} ({type(cause).__name__}: "
            f"{_first_sentence(cause)}): move it away to resume from an older one"
        ) from cause
    trainer.optimizer.update_copies()


# --- small helpers -----------------------------------------------------------------------------


def _broadcast(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return rank, cause


def _first_sentence(error: BaseException) -> str:
    return re.split(r"\n|\. ", str(error), maxsplit=1)[0]


def _refused_by_disk(folder: Path, rank: int, error: OSError) -> str:
    return f"rank {rank} cannot write the checkpoint to {folder}: {error.strerror or error}"


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, as fsync does for the content of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
