"""One operation of a layer: what it reads, makes, keeps for the backward pass and computes.

A layer is a list of these in the model's order (`layer.layer_operations`). What a layer keeps, what
it needs at most while it runs, and what it computes are folds over the list (`memory.fold`, and
`flops` here); tests compare all three with the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fivefold.plan.time.operations import Attention, Matmul

Bytes = NDArray[np.floating] | NDArray[np.integer] | float
"""Sizes [layout], or one size for all layouts."""

INPUT = "x"
"""The layer's input in every list."""


@dataclass(frozen=True)
class Operation:
    """Sizes are in bytes. The backward pass makes a gradient of the size of each input, unless
    the operation says otherwise.

    An operation first allocates what it makes and keeps, beside `workspace`; its backward pass the
    gradients of its inputs, beside `backward_workspace`. `peaks` and `backward_peaks` are
    allocated and freed before that, one after the other.
    """

    name: str
    kind: str  # matmul, grouped, attention, elementwise, norm, copy or collective
    reads: tuple[str, ...] = ()  # the tensors that get a gradient from it
    makes: Mapping[str, Bytes] = field(default_factory=dict)
    keeps: Mapping[str, Bytes] = field(default_factory=dict)  # for its backward pass alone
    saved: tuple[str, ...] = ()  # of the tensors of the layer, what its backward pass reads
    replaced: tuple[str, ...] = ()  # of `saved`, what goes at once if nothing else holds it
    lasting: tuple[str, ...] = ()  # of `keeps`, what its node holds though nothing is saved
    holds: tuple[str, ...] = ()  # variables that live until this operation is over
    workspace: Bytes = 0.0
    peaks: tuple[Bytes, ...] = ()
    backward_workspace: Bytes = 0.0
    backward_peaks: tuple[Bytes, ...] = ()
    passes: tuple[str, ...] = ()  # inputs whose gradient is that of its (first) output
    gradients: Mapping[str, Bytes] = field(
        default_factory=dict
    )  # that differ in size from the input
    weights: tuple[str, ...] = ()  # whose gradients it makes, by the end of their names
    gathered: Bytes = 0.0  # the input as it is gathered for the weights' gradients
    products: tuple[Matmul, ...] = ()
    attention: Attention | None = None

    @property
    def is_routed(self) -> bool:
        """Does it use the weights of routed experts?"""
        return any(weight.startswith("experts.") for weight in self.weights)

    @property
    def flops(self) -> Bytes:
        """Floating-point operations of the forward pass in matrix products and attention."""
        attention = 0.0 if self.attention is None else self.attention.flops
        return sum((product.flops for product in self.products), attention)
