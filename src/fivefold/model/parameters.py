"""Parameters: their first values, and how a layer reads them and returns their gradients.

A parameter of a split model is a DTensor, so that it keeps its global meaning for checkpoints;
inside a layer all arithmetic is on local tensors. Its gradient goes one of two ways:

- to `main_grad`, an fp32 buffer with the local shape that the data-parallel split attached
  (ZeRO 0): layers add into it directly, over micro-batches and uses, which saves a tensor and
  an addition per weight, and makes accumulation fp32 whatever the compute precision;
- to `.grad` through autograd, where FSDP2 looks for it (ZeRO 1-3).

A split backward pass defers the weights' gradients (`deferred_weight_grads`): layers append a
function per gradient to a list, and the pipeline calls these when its schedule says so.

Where there is a `main_grad` there is a `main_value` too, the local values as a plain tensor: to ask
a DTensor for them in each use of each weight costs processor time that shows in small models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

INITIAL_STD = 0.02


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """First fp32 value of the whole parameter, a function of seed and global name alone.

    So every layout starts from the same bits. Matrices and embeddings are normal with standard
    deviation 0.02, norms are ones, biases zeros.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, INITIAL_STD, generator=generator)


def local_tensor(p: Tensor) -> Tensor:
    """The local values of a parameter, outside autograd."""
    with torch.no_grad():
        return p.to_local() if isinstance(p, DTensor) else p.detach()


def differentiable(p: Tensor) -> Tensor:
    """What to hand to an autograd function in place of `p`: it must see that p needs a gradient,
    and get a plain tensor where autograd itself is to receive the gradient."""
    if hasattr(p, "main_grad") or not isinstance(p, DTensor):
        return p
    return p.to_local()


def compute_value(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Local values in the compute dtype. Below fp32 the copy is kept until the next step, so that
    micro-batches in flight share it."""
    value = getattr(p, "main_value", None)
    if value is None:
        return local_tensor(p).to(dtype)
    if value.dtype == dtype:
        return value
    if getattr(p, "compute_copy", None) is None:
        p.compute_copy = value.to(dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return p.compute_copy  # pyright: ignore[reportAttributeAccessIssue]


_deferred: list[Callable[[], None]] | None = None


@contextmanager
def deferred_weight_grads(later: list[Callable[[], None]]) -> Iterator[None]:
    """While backward passes run here, the work on weights' gradients is not done but added to
    `later`, in the order in which it would have been done."""
    # Not a context variable: autograd may run a backward pass in a thread of its own.
    global _deferred
    _deferred = later
    try:
        yield
    finally:
        _deferred = None


def are_deferred() -> bool:
    return _deferred is not None


def do_or_defer(work: Callable[[], None]) -> None:
    """Run `work`, which needs weights' gradients, now; or after these when they are deferred."""
    if _deferred is None:
        work()
    else:
        _deferred.append(work)


class _Later(torch.autograd.Function):
    """A backward pass of weights alone. What a backward function returns autograd keeps as a
    gradient, while it makes a copy of one that `torch.autograd.backward` is given."""

    @staticmethod
    def forward(ctx, compute: Callable[[], Sequence[Tensor | None]], *parameters: Tensor):
        ctx.compute = compute
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, *ctx.compute()


def weight_gradients(
    parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]]
) -> Sequence[Tensor | None]:
    """What the backward of an autograd function returns for its parameters: the gradients that
    `compute` makes, None where it has added one to main_grad; or None for all when deferred."""
    if not are_deferred():
        return compute()
    assert _deferred is not None

    def later() -> None:
        if all(hasattr(p, "main_grad") for p in parameters):
            compute()
            return
        with torch.enable_grad():
            _Later.apply(compute, *parameters).backward()

    _deferred.append(later)
    return [None] * len(parameters)


def accumulate_into_main_grad(p: Tensor, grad: Tensor) -> Tensor | None:
    """Add a weight's gradient to main_grad and return None; without one, return it to autograd in
    the weight's dtype."""
    main_grad = getattr(p, "main_grad", None)
    if main_grad is None:
        return grad.to(p.dtype)
    main_grad += grad
    return None


def small_weight_gradient(p: Tensor, grad: Tensor) -> Tensor | None:
    """What an autograd function's backward returns for its only parameter: so small a one that its
    gradient is computed at once, and only its accumulation deferred."""
    return weight_gradients([p], lambda: [accumulate_into_main_grad(p, grad)])[0]


class _Use(torch.autograd.Function):
    """The local values of a parameter in the compute dtype; backward accumulates its gradient."""

    @staticmethod
    def forward(ctx, p: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.parameter = p
        return compute_value(p, dtype).view_as(local_tensor(p))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return small_weight_gradient(ctx.parameter, grad), None


def use(p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A small weight (a norm, a bias) as a local tensor for ordinary differentiable code."""
    return _Use.apply(differentiable(p), dtype)
