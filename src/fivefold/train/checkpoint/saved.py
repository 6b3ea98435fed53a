"""The checkpoints that a folder holds, and what is checked of them before a run starts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters
from fivefold.train.checkpoint.dcp import first_sentence, read_metadata
from fivefold.train.checkpoint.pieces import expected_shapes
from fivefold.train.data.samples import Samples

FORMAT = 1
HEADER = "checkpoint.json"
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
    identity: dict[str, object]  # see `identity`


def identity(config: ModelConfig, samples: Samples) -> dict[str, object]:
    """What a run must share with the one that it resumes, in the types of JSON."""
    values = {
        "model": asdict(config),
        "seed": samples.seed,
        "global_batch": samples.global_batch,
        "data": samples.token_file.key,
        "sequence_length": samples.sequence_length,
        "isolate_documents": samples.isolate_documents,
    }
    return json.loads(json.dumps(values))


def find(folder: Path) -> tuple[list[Saved], list[Path]]:
    """The complete checkpoints in a folder, oldest first, and the partial ones."""
    complete, partial = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if COMPLETE.fullmatch(path.name) and (path / HEADER).is_file():
            complete.append(_read_header(path))
        elif COMPLETE.fullmatch(path.name) or PARTIAL.fullmatch(path.name):
            partial.append(path)
    return sorted(complete, key=lambda saved: saved.step), sorted(partial)


def _read_header(folder: Path) -> Saved:
    try:
        header = json.loads((folder / HEADER).read_text())
        written = header.pop("format")
        if written == FORMAT:
            return Saved(folder, **header)
        problem = f"it has format {written}, and this version reads format {FORMAT}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"{HEADER} is damaged: {type(error).__name__}: {error}"
    raise UserError(
        f"the checkpoint {folder} cannot be read ({problem}): move it away to resume from an "
        "older one"
    )


def check_resumable(saved: Saved, config: ModelConfig, samples: Samples) -> None:
    """Raises UserError if a checkpoint is of another run, or has not all of the model."""
    differences = _differences(saved.identity, identity(config, samples))
    if differences:
        raise UserError(
            f"the run differs from the run of the checkpoint {saved.folder}: "
            f"{'; '.join(differences)}; change it back, or start a new run with another out"
        )
    try:
        found = read_metadata(saved.folder).state_dict_metadata
    except Exception as error:  # whatever damage makes of a pickle
        raise UserError(
            f"the checkpoint {saved.folder} cannot be read ({first_sentence(error)}): move it "
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


def _differences(saved: object, now: object, key: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*saved, *now]))
        nested = (_differences(saved.get(k), now.get(k), f"{key}.{k}" if key else k) for k in keys)
        return [difference for found in nested for difference in found]
    if saved == now:
        return []
    if key == "data":
        return ["the data files or the tokenizer have changed"]
    return [f"{key} was {json.dumps(saved)} and is now {json.dumps(now)}"]


def check_room(folder: Path, config: ModelConfig, keep: int, saves: int) -> None:
    """Raises UserError if the disk has no room for the checkpoints of a run that saves `saves`
    times and keeps `keep`, plus one: an old one is removed only after the new one is complete."""
    size = BYTES_PER_PARAMETER * count_parameters(config).total
    there = len(find(folder)[0])
    exists = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(exists).free
    wanted = min(saves, max(1, keep + 1 - there))
    if wanted * size <= free:
        return
    fits = free // size + there - 1
    cure = f"set checkpoint.keep to {fits}" if 1 <= fits < keep else "make room, or omit every"
    raise UserError(
        f"{wanted} checkpoints of {_size(size)} ({BYTES_PER_PARAMETER} bytes per parameter; keep "
        f"{keep} and the new one) need more than the {_size(free)} available at {exists}: "
        f"{cure}"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
