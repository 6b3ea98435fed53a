"""Our pieces in the terms of torch.distributed.checkpoint (DCP): how it writes and reads them.

DCP would take pieces from DTensors, but (torch 2.13) gets the place of some of them wrong, see
`pieces.offset_in_whole`; so it is told.

DCP keeps its table of pieces (.metadata) as a pickle, which could run any code of whoever wrote
it. Here it is read by an unpickler that knows the few classes of that table and nothing else.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
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

from fivefold.train.checkpoint.pieces import Piece

# --- writing -----------------------------------------------------------------------------------


class Writer(filesystem.FileSystemWriter):
    """Writes to a folder, whose name it leaves out of the table of pieces."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class SavePlanner(DefaultSavePlanner):
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
                    chunk=_chunk(piece),
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


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), piece.local.shape)


# --- reading -----------------------------------------------------------------------------------


class LoadPlanner(DefaultLoadPlanner):
    """Plans to load into `Piece`s. All of them must be in the checkpoint."""

    state_dict: dict[str, Piece]

    def set_up_planner(
        self,
        state_dict: dict[str, Piece],
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
                found = create_read_items_for_chunk_list(name, saved, [_chunk(piece)])
            if sum(item.lengths.numel() for item in found) != piece.local.numel():
                raise ValueError(f"a part of {name} is missing")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class Reader(filesystem.FileSystemReader):
    """Reads from a folder, its table of pieces by `read_metadata`."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return read_metadata(Path(self.path))


ALLOWED: dict[tuple[str, str], object] = {
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
    def find_class(self, module_name: str, global_name: str) -> object:
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


# --- errors ------------------------------------------------------------------------------------


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The lowest rank that failed, and why."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return rank, cause


def first_sentence(error: BaseException) -> str:
    return re.split(r"\n|\. ", str(error), maxsplit=1)[0]
