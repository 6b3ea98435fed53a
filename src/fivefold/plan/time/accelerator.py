"""Seconds of the operations of one rank on its device.

A product takes the longer of its arithmetic and its reads and writes. Arithmetic runs at the
device's peak times what large products reach, less what small ones lose: the last wave of tiles
leaves part of the device idle, short inner dimensions do not fill its pipelines, and a tile is
computed whole (NVIDIA, "Matrix Multiplication Background User's Guide"). Everything here is
elementwise over arrays of layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.cluster.constants import Constants
from fivefold.plan.constants import (
    ALIGNED,
    ATTENTION_BACKWARD,
    ATTENTION_BACKWARD_PRODUCTS,
    NARROW,
    TILE_COLUMNS,
    TILE_ROWS,
)
from fivefold.plan.engines import PRODUCT_BYTES, Job
from fivefold.plan.time.operations import Attention, Matmul, Operations


@dataclass(frozen=True)
class Seconds:
    """Of one layer and one micro-batch on one rank, messages not included."""

    forward: Elementwise
    input_gradient: Elementwise  # the part of the backward pass that the stage before waits for
    weight_gradient: Elementwise
    attention_forward: Elementwise  # part of `forward`: what ring messages can hide behind
    attention_backward: Elementwise
    products: Elementwise  # part of `forward`
    split_products: Elementwise  # part of `forward`: the products beside which TP sends
    elementwise: Elementwise  # part of `forward`: what selective recomputation may run again

    @property
    def backward(self) -> Elementwise:
        return self.input_gradient + self.weight_gradient


def seconds(job: Job, constants: Constants, operations: Operations) -> Seconds:
    """The time of a layer's operations."""
    products = [product_s(job, constants, p) for p in operations.products]
    forward_products = sum(products, 0.0)
    split = sum((s for s, p in zip(products, operations.products, strict=True) if p.split), 0.0)
    input_products = sum(
        (product_s(job, constants, _for_input(p)) for p in operations.products), 0.0
    )
    weight_products = sum(
        (product_s(job, constants, _for_weight(p)) for p in operations.products), 0.0
    )
    attention_forward, attention_backward = _attention_s(job, constants, operations.attention)
    elementwise = _elementwise_s(job, constants, operations.elements_moved)
    quantize = sum((_quantize_s(job, constants, p) for p in operations.products), 0.0)
    accumulate = sum((_accumulate_s(job, constants, p) for p in operations.products), 0.0)
    launch = 0.0 if job.engine.cuda_graphs else operations.kernels * constants.launch_s
    forward = np.maximum(forward_products + attention_forward + elementwise + quantize, launch)
    input_gradient = input_products + attention_backward + constants.light_backward * elementwise
    input_gradient = np.maximum(input_gradient + quantize, launch)
    return Seconds(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_products + accumulate,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
        products=forward_products,
        split_products=split,
        elementwise=elementwise,
    )


def _for_input(p: Matmul) -> Matmul:
    """The product for the input's gradient: [m, n] x [n, k]."""
    return replace(p, n=p.k, k=p.n)


def _for_weight(p: Matmul) -> Matmul:
    """The product for the weight's gradient: [n, m] x [m, k]."""
    return replace(p, m=p.n, n=p.k, k=p.m)


def selected_s(job: Job, layer: Seconds) -> Elementwise:
    """Seconds of one layer's forward pass that recompute=selective runs again."""
    return {
        "attention": layer.attention_forward,
        "elementwise": layer.elementwise,
        "products": layer.forward - layer.attention_forward - layer.products / 2,
    }[job.engine.selective]


def product_s(job: Job, constants: Constants, product: Matmul) -> Elementwise:
    """Seconds of the forward product."""
    device = job.cluster.device
    low = product.quantized and job.is_low_precision
    precision = job.precision if low else device.half
    peak = device.matmul_flops(precision, constants)
    grouped = np.where(np.asarray(product.groups) > 1, constants.grouped, 1.0)
    rows = np.ceil(product.m / TILE_ROWS) * TILE_ROWS
    # Grouped products run one after the other, unless one kernel has the tiles of all.
    together = product.groups if job.engine.fused_experts else 1.0
    waves = together * rows * product.n / (TILE_ROWS * TILE_COLUMNS) / constants.processors
    losses = 1 + constants.wave_loss / waves
    if product.name != "head":  # vocabularies are padded
        aligned = (product.n % ALIGNED == 0) & (product.k % ALIGNED == 0)
        losses = losses * np.where(aligned, 1.0, 1 + constants.misaligned_loss)
    arithmetic = 2.0 * product.groups * rows * product.n * product.k * losses / (peak * grouped)
    element = PRODUCT_BYTES[precision]
    read = element * product.k * (product.m + product.n)
    moved = product.groups * (read + 2.0 * product.m * product.n)
    return np.maximum(arithmetic, moved / (device.memory_bandwidth * constants.memory))


def _accumulate_s(job: Job, constants: Constants, product: Matmul) -> Elementwise:
    """A weight's gradient is added to what is there: read and written once a micro-batch, after
    the product's last tile."""
    elements = product.groups * product.n * product.k
    moved = 2.0 * job.engine.gradient_bytes * elements
    return moved / (job.cluster.device.memory_bandwidth * constants.memory)


def _attention_s(job: Job, constants: Constants, attention: Attention | None):
    """Forward and backward. The backward pass does 2.5 times the products of the forward pass
    (FlashAttention-2, arXiv:2307.08691, section 4.1)."""
    if attention is None:
        return 0.0, 0.0
    device = job.cluster.device
    peak = device.peak_flops(device.half)
    if job.engine.flash_attention:
        losses = (1 + NARROW / attention.qk_dim) / (1 + NARROW / 128)
        if not job.engine.tuned_attention:
            losses = losses / constants.portable_attention
        forward = attention.flops * losses / (peak * constants.attention)
        return forward, ATTENTION_BACKWARD_PRODUCTS * forward / ATTENTION_BACKWARD
    # Separate kernels: two products over all scores, masked or not, and passes over the scores.
    scores = attention.tokens * attention.sequence * attention.heads
    flops = 2.0 * scores * (attention.qk_dim + attention.v_dim)
    products = flops / (peak * constants.unfused_attention)
    passes = 2.0 * scores / (device.memory_bandwidth * constants.memory)
    return products + constants.score_passes * passes, 2 * products + (
        constants.score_passes * passes
    )


def _elementwise_s(job: Job, constants: Constants, elements: Elementwise) -> Elementwise:
    """Seconds of operations that read and write so many 16-bit elements."""
    factor = 1.0 if job.engine.fused_kernels else constants.unfused_light
    return 2.0 * elements * factor / (job.cluster.device.memory_bandwidth * constants.memory)


def _quantize_s(job: Job, constants: Constants, product: Matmul) -> Elementwise:
    """A product's input is read once and written in low precision twice: as it is for this
    product, and transposed for the weight's gradient."""
    if not product.quantized or not job.is_low_precision:
        return 0.0
    if job.engine.fused_experts and product.name.startswith("experts"):
        return 0.0
    low = PRODUCT_BYTES[job.precision]
    moved = product.groups * product.m * product.k * (2.0 + 2 * low)
    return constants.quantize * moved / (job.cluster.device.memory_bandwidth * constants.memory)
