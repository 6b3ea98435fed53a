"""The process groups and device meshes of a layout: where ranks meet torch.distributed.

The only module that makes process groups, and the only one that knows how a DeviceMesh is put
together. `Axes` has an `Axis` for everything that this rank talks over, and the meshes that give
DTensors their global meaning.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from fivefold.layout.notation import Layout
from fivefold.layout.ranks import coordinates, dense_ranks, groups, sparse_ranks
from fivefold.layout.stages import stage_ranks
from fivefold.parallel.comm import Axis, Recorder

Channels = dict[tuple[str, int, int], Axis]
"""One-way links of this rank's pipeline, by what they carry ("forward": activations, "backward":
their gradients) and the pipeline ranks from and to which; those that begin or end on this rank.

Each has a process group of its own, so that messages that cross can never wait for each other, and
what one rank reads of another is in the order in which that one writes it.
"""


@dataclass(frozen=True)
class Axes:
    """All that one rank talks over."""

    layout: Layout
    rank: int
    coordinates: dict[str, int]
    recorder: Recorder
    world: Axis
    tp: Axis
    kv_copies: Axis  # tp ranks that hold copies of one kv head (one rank when there are enough)
    ulysses: Axis
    ring: Axis
    sequence: Axis  # ranks that hold parts of the same sequences: ring x ulysses x tp
    dp: Axis  # replicas of a dense weight: dp x cp
    dp_shard: Axis  # what ZeRO shards a dense weight over: dp_shard x cp
    dp_replicate: Axis
    ep: Axis
    etp: Axis
    edp: Axis  # replicas of an expert weight
    edp_shard: Axis  # what ZeRO shards an expert weight over
    tied: Axis  # ranks of the first and the last stage, which both hold a tied embedding
    channels: Channels
    dense_mesh: DeviceMesh | None  # dimensions "fsdp", "tp" (or "kv", "copies"); only split ones
    expert_mesh: DeviceMesh | None  # dimensions "fsdp", "ep", "etp"; only split ones

    def describe(self) -> str:
        """Coordinates for messages to people, such as `pp1 dp0 tp1`."""
        shown = ("pp", "dp", "ring", "ulysses", "tp", "ep")
        sizes = {name: getattr(self.layout, name) for name in shown}
        parts = [f"{name}{self.coordinates[name]}" for name in shown if sizes[name] > 1]
        return " ".join(parts) or "the only process"


def make_axes(layout: Layout, rank: int, recorder: Recorder, kv_heads: int) -> Axes:
    """Make this rank's process groups. Every rank of the world calls this once, and the default
    process group must exist. `kv_heads` of the model: with fewer of them than tp ranks, several
    ranks hold copies of one."""
    make = _GroupMaker(rank, recorder)
    copies = max(1, layout.tp // kv_heads)

    def axis(name: str, split: str, rows: np.ndarray | None = None) -> Axis:
        return make.axis(name, split, groups(layout, name) if rows is None else rows)

    tp_rows = groups(layout, "tp")
    tp = axis("tp", "tp")
    kv_rows = tp_rows.reshape(-1, layout.tp // copies, copies)
    kv_copies = axis("kv_copies", "tp", kv_rows.reshape(-1, copies))
    dp_shard, edp_shard = axis("dp_shard_cp", "dp"), axis("edp_shard", "dp")
    ep, etp = axis("ep", "ep"), axis("etp", "ep")
    zero = layout.zero > 0
    place = coordinates(layout, rank)
    pp, replica = place["pp"], place["dp_replicate"]

    dense = np.sort(dense_ranks(layout)[pp, replica].reshape(-1, layout.tp), axis=0)
    if 1 < copies < layout.tp:
        dense = dense.reshape(-1, layout.tp // copies, copies)
        kv = axis("kv", "tp", kv_rows.swapaxes(1, 2).reshape(-1, layout.tp // copies))
        dense_axes = {"fsdp": dp_shard, "kv": kv, "copies": kv_copies}
    else:
        dense_axes = {"fsdp": dp_shard, "tp": tp}
    experts = sparse_ranks(layout)[pp, replica]
    expert_axes = {"fsdp": edp_shard, "ep": ep, "etp": etp}

    return Axes(
        layout=layout,
        rank=rank,
        coordinates=place,
        recorder=recorder,
        world=make.world(layout.world_size),
        tp=tp,
        kv_copies=kv_copies,
        ulysses=axis("ulysses", "cp"),
        ring=axis("ring", "cp"),
        sequence=axis("sequence", "ep"),
        dp=axis("dp_cp", "dp"),
        dp_shard=dp_shard,
        dp_replicate=axis("dp_replicate", "dp"),
        ep=ep,
        etp=etp,
        edp=axis("edp", "dp"),
        edp_shard=edp_shard,
        tied=axis("tied", "pp", _first_and_last(layout)),
        channels=_make_channels(layout, make),
        dense_mesh=_mesh(dense, dense_axes, zero),
        expert_mesh=_mesh(experts, expert_axes, zero),
    )


class _GroupMaker:
    """Makes each process group once. All ranks make all groups in the same order, members or not,
    as torch.distributed asks (its groups made by members alone collide in the store when two of
    them have the same ranks)."""

    def __init__(self, rank: int, recorder: Recorder) -> None:
        self._rank = rank
        self._recorder = recorder
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def axis(self, name: str, split: str, rows: np.ndarray) -> Axis:
        """The axis whose groups are the rows; a rank that is in none has it to itself."""
        own = (self._rank,)
        for ranks in map(tuple, rows.tolist()):
            if self._rank in ranks:
                own = ranks
            if len(ranks) > 1 and ranks not in self._made:
                self._made[ranks] = self._new_group(ranks)
        group = self._made[own] if len(own) > 1 else None
        return Axis(name, split, own, own.index(self._rank), group, self._recorder)

    def world(self, size: int) -> Axis:
        """All ranks, whose group torch.distributed has made."""
        group = dist.group.WORLD if size > 1 else None
        return Axis("world", "world", tuple(range(size)), self._rank, group, self._recorder)

    def channel(self, name: str, source: int, target: int) -> Axis | None:
        """A one-way link with a group of its own; None for ranks at neither end."""
        group = self._new_group((source, target))
        if self._rank not in (source, target):
            return None
        index = 0 if self._rank == source else 1
        return Axis(name, "pp", (source, target), index, group, self._recorder)

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        # A dry run has no peers to keep in step with.
        if self._recorder.dry and self._rank not in ranks:
            return None
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=_time_limit()))


def _time_limit() -> timedelta:
    """That of the default process group; torch gives new groups its own default of half an hour."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device))
    return getattr(backend.options, "_timeout", default_pg_timeout)


def _first_and_last(layout: Layout) -> np.ndarray:
    if layout.first_and_last_share_rank:
        return np.arange(layout.world_size).reshape(-1, 1)
    return groups(layout, "pp")[:, [0, -1]]


def _make_channels(layout: Layout, make: _GroupMaker) -> Channels:
    """Between the ranks of stages that follow each other: neighbours along the pipeline, which
    chunks close to a ring, or a V makes go both ways."""
    links = set()
    for earlier, later in itertools.pairwise(stage_ranks(layout)):
        if earlier != later:
            links |= {("forward", earlier, later), ("backward", later, earlier)}
    channels: Channels = {}
    for pipeline in groups(layout, "pp").tolist():
        for carries, source, target in sorted(links):
            channel = make.channel(f"pp {carries}", pipeline[source], pipeline[target])
            if channel is not None:
                channels[carries, source, target] = channel
    return channels


def _mesh(ranks: np.ndarray, axes: dict[str, Axis], zero: bool) -> DeviceMesh | None:
    """A mesh over existing groups, with the axes that split something as dimensions."""
    kept = [n for n, axis in axes.items() if axis.size > 1 and (zero or n != "fsdp")]
    if not kept:
        return None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    chosen = cast(list[dist.ProcessGroup], [axes[name].group for name in kept])
    if len(kept) == 1:
        return DeviceMesh.from_group(chosen[0], device, mesh_dim_names=tuple(kept))
    # Only this rank's slice along the axes that are left out.
    place = [slice(None) if name in kept else axes[name].index for name in axes]
    mesh = torch.tensor(ranks[tuple(place)])
    return DeviceMesh.from_group(chosen, device, mesh=mesh, mesh_dim_names=tuple(kept))
