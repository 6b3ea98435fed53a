"""How the parameters of a stage are split, as the table of weights says, and how they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fivefold.model.parameters import initial_value
from fivefold.model.transformer import Stage
from fivefold.model.weights import Weight, embedding_weight, head_weights, layer_weights
from fivefold.parallel.comm import Axis
from fivefold.parallel.mesh import Axes


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


def stage_weights(stage: Stage) -> Iterator[Weight]:
    """The rows of the table of weights for the parameters of a stage, by their whole names."""
    config = stage.config
    if stage.has_table:
        yield embedding_weight(config)
    for index in stage.layers:
        for weight in layer_weights(config, config.layer_kinds[int(index)]):
            yield replace(weight, name=f"model.layers.{index}.{weight.name}")
    if stage.last:
        yield from head_weights(config)


def split_weights(stage: Stage, axes: Axes, shards: Shards) -> None:
    """Enter the weights of a stage (on the meta device) into `shards`, as the table splits them
    over the tp ranks, and those of experts over the ep and etp ranks."""
    tp_mesh, kv_mesh = _tp_meshes(axes)
    for weight in stage_weights(stage):
        if weight.is_routed:
            _split_expert(weight, axes, shards)
        elif tp_mesh is not None:
            _split_dense(weight, axes, shards, tp_mesh, kv_mesh)


def _split_expert(weight: Weight, axes: Axes, shards: Shards) -> None:
    """Experts over ep; inside an expert its width over etp."""
    if axes.ep.size * axes.etp.size == 1:
        return
    assert axes.expert_mesh is not None
    names = tuple(name for name in axes.expert_mesh.mesh_dim_names or () if name != "fsdp")
    inside = Shard(weight.width_dim) if weight.width_dim else Replicate()
    shards.split(
        weight.name,
        axes.expert_mesh[names],
        *(Shard(0) if name == "ep" else inside for name in names),
    )


def _tp_meshes(axes: Axes) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The tp ranks in one dimension, and in two where some of several kv heads are copied."""
    if axes.tp.size == 1 or axes.dense_mesh is None:
        return None, None
    if "kv" not in (axes.dense_mesh.mesh_dim_names or ()):
        return axes.dense_mesh["tp"], None
    kv_mesh = axes.dense_mesh["kv", "copies"]
    return kv_mesh._flatten("tp"), kv_mesh


def _split_dense(
    weight: Weight, axes: Axes, shards: Shards, tp_mesh: DeviceMesh, kv_mesh: DeviceMesh | None
) -> None:
    if weight.partial == "tp" or (weight.partial == "sp" and axes.layout.sp):
        shards.partial[weight.name] = axes.tp
    elif weight.partial == "kv" and axes.kv_copies.size > 1:
        # Fewer kv heads than ranks: neighbours hold a copy of one and sum its gradient.
        shards.partial[weight.name] = axes.kv_copies
        if kv_mesh is not None:  # else there is one head, and all ranks have it whole
            shards.split(weight.name, kv_mesh, Shard(0), Replicate())
        return
    if weight.split in ("rows", "kv"):
        shards.split(weight.name, tp_mesh, Shard(0))
    elif weight.split == "columns":
        shards.split(weight.name, tp_mesh, Shard(1))


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
