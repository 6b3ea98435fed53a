"""Checkpoints that resume in any other layout, by torch.distributed.checkpoint (DCP).

A checkpoint is a folder `step-000123`: the state after 123 steps. Each rank writes the pieces
that it holds, under the parameter's global name and with their place in the whole tensor, so a
rank of another layout can pick together the pieces it needs. It is written into a hidden folder,
brought to the disk, and then renamed: a folder with the right name is complete, whenever the
processes or the machine died.

DCP keeps its table of pieces (.metadata) as a pickle, which could run any code of whoever wrote
it. Here it is read by an unpickler that knows the few classes of that table and nothing else.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters, parameter_shapes
from fivefold.model.parameters import local_tensor
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
        for name, shape in _expected(config).items()
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
    planner = _SavePlanner(set(_expected(trainer.config)))
    writer = _Writer(folder, overwrite=False)
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


class _Writer(filesystem.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without the folder's hidden name


class _SavePlanner(DefaultSavePlanner):
    """Plans to save `Piece`s. Adds a check to DCP's own: that takes a piece from one of the ranks
    that hold it, whether or not they agree, and does not know which tensors there must be."""

    state_dict: dict[str, Piece]

    def __init__(self, expected: set[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._expected = expected

    def create_local_plan(self) -> SavePlan:
        pieces = {name: piece for name, piece in self.state_dict.items() if piece.local.numel()}
        items = [
            WriteItem(
                index=MetadataIndex(name, piece.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.local),
                    size=torch.Size(piece.shape),
                ),
            )
            for name, piece in pieces.items()
        ]
        checksums = [_checksum(piece.local) for piece in pieces.values()]
        return SavePlan(items, planner_data=checksums)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        first_holder: dict[MetadataIndex, tuple[int, int]] = {}
        for rank, plan in enumerate(all_plans):
            for item, checksum in zip(plan.items, plan.planner_data, strict=True):
                holder, expected = first_holder.setdefault(item.index, (rank, checksum))
                if checksum != expected:
                    raise ValueError(f"ranks {holder} and {rank} hold different {item.index.fqn}")
        names = {index.fqn for index in first_holder}
        if names != self._expected:
            different = sorted(names ^ self._expected)
            raise ValueError(f"{len(different)} tensors too few or too many: {different[:3]}")
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def _checksum(x: Tensor) -> int:
    """Sum of the bits of fp32 values; equal for equal tensors."""
    return int(x.contiguous().view(torch.int32).sum(dtype=torch.int64))


# --- loading -----------------------------------------------------------------------------------


def load(trainer: Trainer, saved: Saved) -> None:
    """Read a checkpoint into a trainer of any layout, in place. All ranks call this. Raises
    UserError if a file cannot be read; the trainer is then of no use."""
    try:
        state_dict_loader.load(
            pieces(trainer), storage_reader=_Reader(saved.folder), planner=_LoadPlanner()
        )
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise UserError(
            f"rank {rank} cannot read the checkpoint {saved.folder} ({type(cause).__name__}: "
            f"{_first_sentence(cause)}): move it away to resume from an older one"
        ) from cause


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to load into `Piece`s. All of them must be in the checkpoint."""

    state_dict: dict[str, Piece]

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != piece.shape:
                raise ValueError(f"there is no {name} of shape {tuple(piece.shape)}")
            found: list[ReadItem] = []
            if piece.local.numel():
                found = create_read_items_for_chunk_list(name, saved, [piece.chunk])
            if sum(item.lengths.numel() for item in found) != piece.local.numel():
                raise ValueError(f"a part of {name} is missing")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


ALLOWED: dict[tuple[str, str], Any] = {
    (thing.__module__, thing.__qualname__): thing
    for thing in (
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,  # a look-up by name
    )
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in ALLOWED:
            return ALLOWED[module_name, global_name]
        value = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(
            f"its table of pieces names {module_name}.{global_name}, which does not belong there"
        )


def read_metadata(folder: Path) -> Metadata:
    """DCP's table of the pieces in a checkpoint. Runs no code from the file."""
    with (folder / ".metadata").open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("its table of pieces is no such table")
    for piece in metadata.storage_data.values():
        if Path(piece.relative_path).name != piece.relative_path:
            raise pickle.UnpicklingError(f"it points out of its folder, to {piece.relative_path}")
    return metadata


# --- what is saved -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """What this rank has of a tensor. DCP knows such pieces as local values of a DTensor, but
    (torch 2.13) gets the place of uneven FSDP shards of a tensor-parallel part wrong."""

    local: Tensor  # shares memory with the trainer's own
    offset: tuple[int, ...]  # of its first element in the whole tensor
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)


def pieces(trainer: Trainer) -> dict[str, Piece]:
    """What this rank has of the weights and of AdamW's state, by global name."""
    held: dict[str, Piece] = {}
    for stage in trainer.stages.values():
        for name, p in stage.named_parameters():
            offset, shape = offset_in_whole(p), tuple(p.shape)
            adam = trainer.optimizer.state(name)
            held[name] = Piece(local_tensor(p), offset, shape)
            held[f"{name}.exp_avg"] = Piece(adam["exp_avg"], offset, shape)
            held[f"{name}.exp_avg_sq"] = Piece(adam["exp_avg_sq"], offset, shape)
            held[f"{name}.step"] = Piece(adam["step"], (), ())
    return held


def offset_in_whole(p: Tensor) -> tuple[int, ...]:
    """Where in the whole parameter this rank's part begins.

    FSDP2 shards what the other splits have left to a rank. Where both go along one dimension, it
    says so by the placement _StridedShard, though its mesh dimension comes first.
    """
    if not isinstance(p, DTensor):
        return (0,) * p.dim()
    coordinate = p.device_mesh.get_coordinate()
    assert coordinate is not None
    splits = [
        split
        for split in zip(p.placements, coordinate, p.device_mesh.shape, strict=True)
        if not split[0].is_replicate()
    ]
    splits.sort(key=lambda split: isinstance(split[0], _StridedShard))
    offset, sizes = [0] * p.dim(), list(p.shape)
    for placement, index, parts in splits:
        dim = cast(Shard, placement).dim
        largest = -(-sizes[dim] // parts)
        start = min(index * largest, sizes[dim])
        offset[dim] += start
        sizes[dim] = min(largest, sizes[dim] - start)
    assert p.to_local().shape == tuple(sizes)
    return tuple(offset)


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and whole shapes of what all ranks together save."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        expected |= dict.fromkeys((name, f"{name}.exp_avg", f"{name}.exp_avg_sq"), shape)
        expected[f"{name}.step"] = ()
    return expected


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
