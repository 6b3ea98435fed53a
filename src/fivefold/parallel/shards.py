"""How the parameters of a stage are split, and how they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fivefold.model.parameters import initial_value
from fivefold.model.transformer import Stage
from fivefold.parallel.comm import Axis


@dataclass
class Shards:
    """What the splits decide about parameters, by name. A parameter that is not named here is
    whole and the same on all ranks of its stage."""

    placements: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]] = field(default_factory=dict)
    partial: dict[str, Axis] = field(default_factory=dict)
    """Parameters whose gradient each rank of the axis has a part of, to be summed."""

    def split(self, name: str, mesh: DeviceMesh, *placements: Placement) -> None:
        self.placements[name] = (mesh, placements)

    def pieces(self, name: str) -> int:
        """Into how many different pieces the parameter is split within a stage (without ZeRO)."""
        if name not in self.placements:
            return 1
        mesh, placements = self.placements[name]
        pieces = 1
        for dimension, placement in enumerate(placements):
            if isinstance(placement, Shard):
                pieces *= mesh.size(dimension)
        return pieces


def local_slice(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a whole tensor. Parts are those of torch.chunk: ceil(n / parts) rows,
    the last one shorter (a vocabulary of 127 over 2 ranks: 64 and 63; nothing is padded)."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for place, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            whole = whole.chunk(size, placement.dim)[place]
    # A copy: a view would keep the whole alive.
    return whole.clone(memory_format=torch.contiguous_format)


def materialise(stage: Stage, shards: Shards, seed: int, device: torch.device) -> None:
    """Give the parameters of a stage that was built on the meta device their first values, or on
    that device their local shapes alone.

    One parameter at a time exists whole, and only until this rank has taken its part.
    """
    for owner_name, owner in stage.named_modules():
        for short_name, p in list(owner.named_parameters(recurse=False)):
            name = f"{owner_name}.{short_name}"
            whole = p.detach() if device.type == "meta" else initial_value(name, p.shape, seed)
            owner.register_parameter(short_name, _place(name, whole, shards, device))


def _place(name: str, whole: Tensor, shards: Shards, device: torch.device) -> nn.Parameter:
    if name not in shards.placements:
        return nn.Parameter(whole.to(device))
    mesh, placements = shards.placements[name]
    local = local_slice(whole, mesh, placements).to(device)
    return nn.Parameter(
        DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    )
