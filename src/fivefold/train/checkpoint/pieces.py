"""Which part of each weight and of its optimizer state this rank holds, by global name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fivefold.model.config import ModelConfig
from fivefold.model.counts import parameter_shapes
from fivefold.model.parameters import local_tensor
from fivefold.train.trainer import Trainer


@dataclass(frozen=True)
class Piece:
    """What this rank has of a tensor."""

    local: Tensor  # shares memory with the trainer's own
    offset: tuple[int, ...]  # of its first element in the whole tensor
    shape: tuple[int, ...]  # of the whole tensor


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
    says so by the placement _StridedShard, though its mesh dimension comes first. (torch's own
    compute_local_shape_and_global_offset, as of 2.13, gets the place of uneven shards wrong then.)
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


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and whole shapes of what all ranks together save."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        expected |= dict.fromkeys((name, f"{name}.exp_avg", f"{name}.exp_avg_sq"), shape)
        expected[f"{name}.step"] = ()
    return expected
