"""The table of weights decides how every parameter of the program is split."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch.distributed.tensor import Shard

from fivefold.layout.notation import Layout
from fivefold.model.config import ModelConfig
from fivefold.model.weights import Weight
from fivefold.parallel.shards import Shards, stage_weights
from tests.parallel.dry import dry_trainer, fake_world
from tests.parallel.test_cost import COMMON, MODELS, layouts


def degrees(weight: Weight, config: ModelConfig, layout: Layout) -> dict[int, int]:
    """Into how many parts the table cuts each dimension of a weight."""
    if weight.is_routed:
        return {0: layout.ep} | ({weight.width_dim: layout.etp} if weight.width_dim else {})
    kv = min(layout.tp, config.num_kv_heads)
    return {"rows": {0: layout.tp}, "columns": {1: layout.tp}, "kv": {0: kv}}.get(weight.split, {})


def placed(name: str, shards: Shards) -> dict[int, int]:
    """Into how many parts the program cuts each dimension of a parameter."""
    mesh, placements = shards.placements.get(name, (None, ()))
    assert mesh is not None or not placements
    return {
        placement.dim: mesh.size(dimension)
        for dimension, placement in enumerate(placements)
        if isinstance(placement, Shard) and mesh is not None
    }


def partial_axis(weight: Weight, config: ModelConfig, layout: Layout) -> str | None:
    """The axis whose ranks each have a part of the gradient, by the table."""
    if layout.tp == 1:
        return None
    if weight.partial == "kv":
        return "kv_copies" if layout.tp > config.num_kv_heads else None
    return "tp" if weight.partial == "tp" or (weight.partial == "sp" and layout.sp) else None


@given(layouts(largest_world=64))
@settings(max_examples=40, **COMMON)
def test_every_parameter_has_a_row_and_is_split_as_it_says(drawn) -> None:
    name, layout, rank, precision = drawn
    config = MODELS[name]
    with fake_world(rank, layout.world_size):
        trainer = dry_trainer(config, layout, rank, precision)
        for stage in trainer.stages.values():
            weights = {weight.name: weight for weight in stage_weights(stage)}
            shapes = {name: tuple(p.shape) for name, p in stage.named_parameters()}
            assert weights.keys() == shapes.keys()
            for name, weight in weights.items():
                assert torch.Size(weight.shape) == shapes[name]
                wanted = {d: n for d, n in degrees(weight, config, layout).items() if n > 1}
                found = {d: n for d, n in placed(name, trainer.shards).items() if n > 1}
                assert found == wanted, name
                axis = trainer.shards.partial.get(name)
                assert (axis and axis.name) == partial_axis(weight, config, layout), name
