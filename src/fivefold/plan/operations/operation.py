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

    An operation allocates each of `peaks` and frees it again, one after the other; then it
    allocates what it makes and keeps, together with `workspace`. Its backward pass does the same
    with `backward_peaks`, then the gradients of its inputs together with `backward_workspace`.
    """

    name: str
    kind: str  # matmul, grouped, attention, elementwise, norm, copy or collective
    reads: tuple[str, ...] = ()  # the tensors that get a gradient from it
    makes: Mapping[str, Bytes] = field(default_factory=dict)
    keeps: Mapping[str, Bytes] = field(default_factory=dict)  # for its backward pass alone
    saved: tuple[str, ...] = ()  # tensors of the layer that its backward pass reads
    replaced: tuple[str, ...] = ()  # part of `saved`, freed at once where it was recomputed
    lasting: tuple[str, ...] = ()  # of `keeps`, what its node holds though nothing is saved
    holds: tuple[str, ...] = ()  # variables that live until this operation is over
    workspace: Bytes = 0.0
    peaks: tuple[Bytes, ...] = ()
    backward_workspace: Bytes = 0.0
    backward_peaks: tuple[Bytes, ...] = ()
    passes: tuple[str, ...] = ()  # inputs whose gradient is that of its (first) output
    # Sizes of inputs' gradients, where they differ from the input's.
    gradients: Mapping[str, Bytes] = field(default_factory=dict)
    weights: tuple[str, ...] = ()  # ends of the names of weights whose gradients it makes
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
