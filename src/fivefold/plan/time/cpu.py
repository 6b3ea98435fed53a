"""Seconds of the operations of one rank on a core of a CPU (`cluster.cores`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.cluster.cpu import Cpu
from fivefold.plan.constants import KEYS_AT_A_TIME
from fivefold.plan.engines import Job
from fivefold.plan.time.accelerator import Seconds
from fivefold.plan.time.operations import Attention, Matmul, Operations

Floats = NDArray[np.float64]


def work_of(job: Job, operations: Operations) -> Floats:
    """What a forward pass has to do: [5, n], in the order of `cluster.cpu.Pass`. A backward pass is
    counted in the same units: its rates are its own."""
    element, attention = job.element_bytes, operations.attention
    parts = (
        sum((p.flops for p in operations.products), 0.0),
        element * sum((_elements(p) for p in operations.products), 0.0),
        0.0 if attention is None else _attention_flops(attention),
        element * operations.elements_moved,
        operations.kernels,
    )
    return np.array(np.broadcast_arrays(*(np.atleast_1d(part) for part in parts)), dtype=float)


def _attention_flops(attention: Attention) -> Elementwise:
    """With the masked scores that are computed all the same: those in the block of keys in which
    the causal mask's border lies."""
    border = np.minimum(attention.sequence, KEYS_AT_A_TIME) / 2
    return attention.flops * (attention.keys + border) / attention.keys


def _elements(product: Matmul) -> Elementwise:
    """Of the operands and the result of all its groups."""
    m, n, k = product.m, product.n, product.k
    return product.groups * (m * k + k * n + m * n)


PRODUCTS, ATTENTION, ELEMENTWISE = (
    np.array(mask, dtype=float)[:, None]
    for mask in ((1, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 1))
)


def seconds(job: Job, core: Cpu, operations: Operations) -> Seconds:
    """The time of a layer's operations. Of the backward pass, half of the products are for the
    weights' gradients."""
    work = work_of(job, operations)
    extra = core.copy_byte * job.element_bytes * operations.split_elements_moved
    extra = extra + core.backward.operation * operations.split_kernels
    weight_gradient = core.backward.seconds(work * PRODUCTS) / 2
    products = core.forward.seconds(work * PRODUCTS)
    split = sum((p.flops for p in operations.products if p.split), 0.0)
    return Seconds(
        forward=core.forward.seconds(work) + extra,
        input_gradient=core.backward.seconds(work) - weight_gradient + 2 * extra,
        weight_gradient=weight_gradient,
        attention_forward=core.forward.seconds(work * ATTENTION),
        attention_backward=core.backward.seconds(work * ATTENTION),
        products=products,
        split_products=products * split / np.maximum(work[0], 1.0),
        elementwise=core.forward.seconds(work * ELEMENTWISE),
    )
