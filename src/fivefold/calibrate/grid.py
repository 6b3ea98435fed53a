"""What is measured: shapes and sizes, for a CPU, for a GPU, and few of them for a quick look."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fivefold.model.counts import count_parameters
from fivefold.model.huggingface.load import load_config

KB, MB = 2**10, 2**20


Shape = tuple[int, int, int]


def _cube(sizes: tuple[int, ...]) -> list[Shape]:
    """Every m, n, k of these."""
    return [(m, n, k) for m in sizes for n in sizes for k in sizes]


@dataclass(frozen=True)
class Block:
    """A model of one layer, and the micro-batch that goes through it."""

    sequence: int
    batch: int
    model: dict[str, Any]  # a config.json


@dataclass(frozen=True)
class Grid:
    """Sizes are counts of elements, or bytes where they say so."""

    products: tuple[Shape, ...]  # m rows, n outputs, k inputs
    short_products: tuple[tuple[int, int, int], ...]  # also in other precisions
    grouped: tuple[tuple[int, int, int, int], ...]  # groups, and m, n, k of each
    attention: tuple[tuple[int, int, int, int, int], ...]  # batch, heads, kv heads, head, sequence
    light: tuple[tuple[int, int], ...]  # rows, width
    losses: tuple[tuple[int, int], ...]  # rows, vocabulary
    memory_bytes: tuple[int, ...]
    optimizer: tuple[tuple[int, int], ...]  # tensors, elements of each
    message_bytes: tuple[int, ...]
    blocks: tuple[Block, ...]
    patience_s: float  # for one measurement


def _dense(hidden: int, width: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    """A config.json of the llama kind."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
    }


def _mixture(
    hidden: int, width: int, heads: int, kv_heads: int, vocabulary: int, experts: int
) -> dict[str, Any]:
    """Of the mixtral kind, with two experts a token."""
    return _dense(hidden, width, heads, kv_heads, vocabulary) | {
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    }


SKINNY = ((512, 8, 128), (2048, 8, 256), (16, 512, 256), (64, 1408, 512), (2048, 1024, 128))
"""A router, a few rows, and a head: shapes at the edge of what a kernel is made for."""

CPU = Grid(
    products=(
        *_cube((64, 256, 1024)),
        *SKINNY,
        (512, 128, 128),
        (512, 384, 128),
        (512, 704, 256),
        (512, 256, 704),
        (2048, 256, 256),
        (512, 2048, 512),
        (256, 2048, 2048),
    ),
    short_products=((256, 256, 256), (1024, 256, 1024), (1024, 1024, 1024)),
    grouped=((8, 128, 128, 128), (8, 64, 352, 256), (4, 256, 128, 128), (16, 32, 256, 256)),
    attention=(
        (2, 4, 2, 32, 128),
        (2, 2, 1, 32, 256),
        (2, 8, 4, 32, 256),
        (1, 8, 8, 64, 512),
        (2, 16, 4, 64, 256),
        (1, 8, 2, 128, 512),
        (1, 4, 4, 64, 1024),
        (1, 2, 2, 64, 2048),
    ),
    light=tuple(itertools.product((64, 512, 4096), (64, 256, 1024))),
    losses=((64, 1024), (512, 1024), (512, 8192), (2048, 4096)),
    memory_bytes=(64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB),
    optimizer=((1, 4096), (16, 4096), (1, 2**18), (16, 2**16), (1, 2**22), (16, 2**18)),
    message_bytes=(256, 4 * KB, 64 * KB, 512 * KB, MB, 4 * MB, 16 * MB),
    blocks=(
        Block(128, 1, _dense(128, 384, 4, 2, 1024)),
        Block(256, 2, _dense(128, 384, 4, 2, 1024)),
        Block(256, 2, _dense(256, 704, 8, 4, 1024)),
        Block(512, 1, _dense(512, 1408, 8, 8, 4096)),
        Block(256, 2, _mixture(128, 128, 4, 2, 1024, experts=8)),
        Block(256, 2, _mixture(256, 352, 8, 4, 1024, experts=8)),
    ),
    patience_s=0.08,
)

GPU = Grid(
    products=(
        *_cube((512, 2048, 8192)),
        *SKINNY,
        (64, 64, 64),
        (128, 4096, 4096),
        (4096, 4096, 4096),
        (4096, 14336, 4096),
        (4096, 4096, 14336),
        (8192, 1024, 8192),
        (4096, 32768, 4096),
        (16384, 16384, 16384),
    ),
    short_products=((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)),
    grouped=(
        (8, 1024, 1024, 4096),
        (8, 2048, 14336, 4096),
        (64, 512, 1408, 2048),
        (128, 128, 768, 2048),
    ),
    attention=(
        (4, 32, 8, 128, 1024),
        (2, 32, 8, 128, 4096),
        (1, 32, 8, 128, 8192),
        (2, 32, 32, 64, 4096),
        (1, 16, 16, 128, 16384),
    ),
    light=tuple(itertools.product((512, 4096, 16384), (1024, 4096, 8192))),
    losses=((4096, 32768), (16384, 32768), (8192, 131072)),
    memory_bytes=(64 * KB, MB, 16 * MB, 64 * MB, 256 * MB, 1024 * MB),
    optimizer=((1, 2**22), (64, 2**20), (16, 2**24)),
    message_bytes=(256, 4 * KB, 64 * KB, MB, 16 * MB, 128 * MB, 512 * MB),
    blocks=(
        Block(2048, 4, _dense(2048, 8192, 32, 8, 32768)),
        Block(4096, 2, _dense(4096, 14336, 32, 8, 32768)),
        Block(4096, 1, _dense(8192, 28672, 64, 8, 32768)),
        Block(1024, 1, _dense(1024, 2816, 16, 4, 32768)),
        Block(4096, 1, _mixture(2048, 1408, 16, 16, 32768, experts=64)),
        Block(4096, 1, _mixture(4096, 14336, 32, 8, 32768, experts=8)),
    ),
    patience_s=0.1,
)


def quick(grid: Grid) -> Grid:
    """A few of everything, each looked at for a shorter time."""
    return replace(
        grid,
        products=grid.products[::4],
        short_products=grid.short_products[:2],
        grouped=grid.grouped[:2],
        attention=grid.attention[:3],
        light=grid.light[::2],
        losses=grid.losses[::2],
        memory_bytes=grid.memory_bytes[::2],
        optimizer=grid.optimizer[::2],
        message_bytes=grid.message_bytes[::2],
        blocks=grid.blocks[1:5],  # with their heads more points than a pass has terms
        patience_s=grid.patience_s / 4,
    )


MOST_SHARE = 0.25
"""Of a device's memory that the operands of one measurement may take, gradients included."""
T = TypeVar("T")


def fitting(grid: Grid, memory_bytes: float) -> Grid:
    """What of a grid a device with so much memory has room for. Messages stay: all devices must
    send the same."""

    def kept(sizes: tuple[T, ...], needed_bytes: Callable[[T], float]) -> tuple[T, ...]:
        fit = tuple(each for each in sizes if needed_bytes(each) <= MOST_SHARE * memory_bytes)
        return fit or (min(sizes, key=needed_bytes),)

    def product_bytes(shape: Shape) -> float:
        m, n, k = shape
        return 8.0 * (m * n + m * k + 2 * n * k)

    return replace(
        grid,
        products=kept(grid.products, product_bytes),
        short_products=kept(grid.short_products, product_bytes),
        grouped=kept(grid.grouped, lambda each: each[0] * product_bytes(each[1:])),
        light=kept(grid.light, lambda each: 24.0 * each[0] * each[1]),
        losses=kept(grid.losses, lambda each: 14.0 * each[0] * each[1]),
        memory_bytes=kept(grid.memory_bytes, lambda size: 4.0 * size),
        optimizer=kept(grid.optimizer, lambda each: 16.0 * each[0] * each[1]),
        blocks=kept(grid.blocks, _block_bytes),
    )


def _block_bytes(block: Block) -> float:
    """Weights, their gradients and a copy in 16 bits, and the logits with their gradient."""
    config = load_config(block.model)
    logits = block.sequence * block.batch * config.vocab_size
    return 10.0 * count_parameters(config).total + 14.0 * logits
