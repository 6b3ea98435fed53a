"""What one rank holds and does in a step, as arithmetic: the input of every `cost`.

No torch. Degrees may be integers or NumPy arrays of them (many layouts at once): the formulas are
elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fivefold.layout.notation import Layout
from fivefold.layout.ranks import coordinates, group
from fivefold.layout.stages import split_layers, stage_ranges
from fivefold.model.config import ModelConfig

FP32 = 4
"""Bytes of an element of gradients (accumulated and reduced in fp32), loss and optimizer state."""
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of an element of activations and of gathered weights."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as far as sizes depend on it: the last part of an uneven split is
    smaller."""

    tp: int = 0
    dp_shard: int = 0  # along what ZeRO shards dense weights over
    edp_shard: int = 0
    kv: int = 0  # which kv head, when tp ranks hold copies


@dataclass(frozen=True)
class Work:
    """One chunk of layers on one rank, in one optimizer step."""

    config: ModelConfig
    layout: Layout
    sequence_length: int  # tokens of a whole sequence
    element_bytes: int
    dense_layers: int
    moe_layers: int
    first: bool  # has the embedding
    last: bool  # has the head
    place: Place

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers

    @property
    def micro_batches(self) -> int:
        return self.layout.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.layout.micro_batch * self.sequence_length // self.layout.cp

    @property
    def hidden_bytes(self) -> int:
        """B: bytes of one micro-batch's hidden states on one context-parallel rank."""
        return self.tokens * self.config.hidden_size * self.element_bytes

    @property
    def has_shared_expert(self) -> bool:
        return self.config.moe is not None and self.config.moe.shared_intermediate_size > 0

    @property
    def holds_tied_copy(self) -> bool:
        """Is the embedding here tied to a copy on another pipeline rank?"""
        return self.config.tied_embeddings and self.layout.pp > 1 and (self.first or self.last)


def rank_work(
    config: ModelConfig, layout: Layout, sequence_length: int, rank: int, precision: str
) -> list[Work]:
    """The chunks of one rank: one, or vpp of them."""
    here = coordinates(layout, rank)
    layers = layout.layers or split_layers(config.num_layers, layout.stages)
    ranges = stage_ranges(layers)
    copies = kv_copies(layout, config)
    place = Place(
        tp=here["tp"],
        dp_shard=group(layout, "dp_shard_cp", rank).index(rank),
        edp_shard=group(layout, "edp_shard", rank).index(rank),
        kv=here["tp"] // copies,
    )
    works = []
    for stage in range(here["pp"], layout.stages, layout.pp):
        moe_layers = sum(config.is_moe(layer) for layer in ranges[stage])
        works.append(
            Work(
                config=config,
                layout=layout,
                sequence_length=sequence_length,
                element_bytes=ELEMENT_BYTES[precision],
                dense_layers=len(ranges[stage]) - moe_layers,
                moe_layers=moe_layers,
                first=stage == 0,
                last=stage == layout.stages - 1,
                place=place,
            )
        )
    return works


def kv_copies(layout: Layout, config: ModelConfig) -> int:
    """How many tp ranks hold a copy of one kv head: more than one where heads are too few."""
    return np.maximum(1, layout.tp // config.num_kv_heads)


def part(size: int, parts: int, index: int) -> int:
    """Rows in part `index` of torch.chunk's split: ceil(size / parts), the last ones fewer."""
    rows = -(-size // parts)
    return np.clip(size - rows * index, 0, rows)


@dataclass(frozen=True)
class Weight:
    """One weight tensor, and how tensor and expert parallelism split it."""

    shape: tuple[int, ...]
    split: str = "whole"  # over tp: "rows", "columns", "kv" rows; or "expert" rows / columns
    width_dim: int = 0  # of an expert weight: the dimension that etp splits
    partial: str = ""  # its gradient is in parts over: "tp", "sp" (if on), "kv" copies

    def local_shape(self, work: Work) -> tuple[int, ...]:
        """The shape that one rank holds (without ZeRO)."""
        layout, config, shape = work.layout, work.config, list(self.shape)
        if self.split == "rows":
            shape[0] = part(shape[0], layout.tp, work.place.tp)
        elif self.split == "columns":
            shape[1] = part(shape[1], layout.tp, work.place.tp)
        elif self.split == "kv":
            shape[0] = part(shape[0], np.minimum(layout.tp, config.num_kv_heads), work.place.kv)
        elif self.split == "expert":
            shape[0] = shape[0] // layout.ep
            shape[self.width_dim] = shape[self.width_dim] // layout.etp
        return tuple(shape)

    def elements(self, work: Work) -> int:
        """Elements that one rank holds (without ZeRO)."""
        return _product(self.local_shape(work))

    def shard_elements(self, work: Work) -> int:
        """Elements of this rank's ZeRO shard: dimension 0 of what it holds, split once more."""
        rows, *rest = self.local_shape(work)
        expert = self.split == "expert"
        shards, index = shard_degree(work.layout, expert), work.place.dp_shard
        return part(rows, shards, work.place.edp_shard if expert else index) * _product(rest)

    def is_sharded(self, layout: Layout) -> bool:
        """Does ZeRO shard it? Expert weights need several copies for that."""
        return layout.zero > 0 and shard_degree(layout, self.split == "expert") > 1

    def gradient_elements(self, work: Work) -> int:
        """Elements of its gradient on one rank once data parallelism has reduced it."""
        if self.is_sharded(work.layout):
            return self.shard_elements(work)
        return self.elements(work)

    def padded_elements(self, work: Work) -> int:
        """Elements of all shards together as FSDP2 sends them, each padded to the largest."""
        rows, *rest = self.local_shape(work)
        shards = shard_degree(work.layout, self.split == "expert")
        return -(-rows // shards) * shards * _product(rest)


def shard_degree(layout: Layout, expert: bool) -> int:
    """Over how many ranks ZeRO shards a weight."""
    if expert:
        return layout.edp_shard
    return layout.dp_shard * layout.cp


def _product(numbers) -> int:
    total = 1
    for number in numbers:
        total = total * number
    return total


def layer_weights(config: ModelConfig, moe: bool) -> Iterator[Weight]:
    """All weights of one layer."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield Weight((hidden,), partial="sp")  # input norm
    yield Weight((hidden,), partial="sp")  # post-attention norm
    yield from _linear(q, hidden, "rows", config.qkv_bias)
    for _ in ("k", "v"):
        yield from _linear(kv, hidden, "kv", config.qkv_bias, partial="kv")
    yield from _closing(hidden, q, config.output_bias)
    if config.qk_norm:
        yield Weight((head_dim,), partial="tp")
        yield Weight((head_dim,), partial="tp")
    if not moe:
        yield from _mlp(hidden, config.intermediate_size, config.mlp_bias)
        return
    assert config.moe is not None
    yield Weight((config.moe.num_experts, hidden), partial="tp")  # router
    if config.moe.shared_intermediate_size:
        yield from _mlp(hidden, config.moe.shared_intermediate_size, bias=False)
    if config.moe.shared_gate:
        yield Weight((1, hidden), partial="sp")
    experts, width = config.moe.num_experts, config.moe.expert_intermediate_size
    yield Weight((experts, width, hidden), "expert", width_dim=1)
    yield Weight((experts, width, hidden), "expert", width_dim=1)
    yield Weight((experts, hidden, width), "expert", width_dim=2)


def embedding_weight(config: ModelConfig) -> Weight:
    return Weight((config.vocab_size, config.hidden_size), "rows")


def head_weights(config: ModelConfig) -> list[Weight]:
    """The final norm, and the head's matrix where it is not the embedding."""
    norm = Weight((config.hidden_size,), partial="sp")
    return [norm] if config.tied_embeddings else [norm, embedding_weight(config)]


def work_weights(work: Work) -> list[Weight]:
    """All weights of one chunk."""
    config = work.config
    weights = [embedding_weight(config)] if work.first else []
    weights += list(layer_weights(config, moe=False)) * work.dense_layers
    if work.moe_layers:
        weights += list(layer_weights(config, moe=True)) * work.moe_layers
    if work.last:
        weights += head_weights(config)
        if config.tied_embeddings and not work.first:
            weights.append(embedding_weight(config))
    return weights


def _linear(rows: int, columns: int, split: str, bias: bool, partial: str = "") -> Iterator[Weight]:
    yield Weight((rows, columns), split, partial=partial)
    if bias:
        yield Weight((rows,), split, partial=partial)


def _closing(rows: int, columns: int, bias: bool) -> Iterator[Weight]:
    yield Weight((rows, columns), "columns")
    if bias:
        yield Weight((rows,), partial="sp")


def _mlp(hidden: int, width: int, bias: bool) -> Iterator[Weight]:
    yield from _linear(width, hidden, "rows", bias)
    yield from _linear(width, hidden, "rows", bias)
    yield from _closing(hidden, width, bias)
