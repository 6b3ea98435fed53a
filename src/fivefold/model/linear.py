"""Matrix products with weights, and the hook where tensor parallelism enters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fivefold.model.parameters import (
    accumulate_into_main_grad,
    are_deferred,
    compute_value,
    differentiable,
    use,
    weight_gradients,
)


def unchanged(x: Tensor) -> Tensor:
    """The default of a hook."""
    return x


class PendingSum(Protocol):
    """A sum over ranks that is under way."""

    def wait(self) -> Tensor: ...


class InputCollective(Protocol):
    """How activations come into a group of linear layers that share their input."""

    def gather(self, x: Tensor) -> Tensor:
        """The input that the local weights need, from what this rank holds."""
        ...

    def reduce(self, grad: Tensor) -> PendingSum:
        """Begin to sum the input's gradient over ranks, back to what this rank holds."""
        ...


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. CPUs without bf16 units are 80 times slower in bf16 than in fp32: there the product
    is taken in fp32 and rounded."""
    if a.device.type == "cpu" and a.dtype == torch.bfloat16:
        return (a.float() @ b.float()).to(torch.bfloat16)
    return a @ b


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a temporary where the dtypes allow it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += product(a, b)


class _Linears(torch.autograd.Function):
    """y_i = x w_i^T + b_i [..., out_i] for weights [out_i, hidden] that share x [..., hidden].

    Only this rank's part of x is kept for the backward pass and gathered again for the weight
    gradients. Their computation overlaps the sum of the input gradient over ranks, unless they are
    deferred.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, collective: InputCollective | None, count: int, *parameters: Tensor
    ):
        weights = [compute_value(p, x.dtype) for p in parameters[:count]]
        biases = [compute_value(p, x.dtype) for p in parameters[count:]]
        ctx.collective, ctx.parameters, ctx.count = collective, parameters, count
        ctx.save_for_backward(x, *weights)
        full = _gathered(x, collective)
        rows = full.reshape(-1, full.shape[-1])
        outputs = []
        for i, weight in enumerate(weights):
            y = product(rows, weight.t())
            if biases:
                y += biases[i]
            outputs.append(y.view(*full.shape[:-1], weight.shape[0]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        x = x.detach()  # its graph would keep the stage's input until deferred products are done
        collective, count, parameters = ctx.collective, ctx.count, ctx.parameters
        rows_of = [g.reshape(-1, g.shape[-1]) for g in grads]
        dx = pending = None
        if ctx.needs_input_grad[0]:
            dx = product(rows_of[0], weights[0])
            for g, weight in zip(rows_of[1:], weights[1:], strict=True):
                add_product(dx, g, weight)
            dx = dx.view(*grads[0].shape[:-1], x.shape[-1])
        # Gathered before the sum over ranks begins, which the products then overlap.
        full = None if are_deferred() else _gathered(x, collective)
        if dx is not None and collective:
            pending = collective.reduce(dx)

        def of_weights() -> list[Tensor | None]:
            inputs = _gathered(x, collective) if full is None else full
            rows = inputs.reshape(-1, inputs.shape[-1])
            found = [
                _weight_gradient(p, g, rows)
                for p, g in zip(parameters[:count], rows_of, strict=True)
            ]
            for p, g in zip(parameters[count:], rows_of, strict=False):
                found.append(accumulate_into_main_grad(p, g.float().sum(0).to(g.dtype)))
            return found

        of_parameters = weight_gradients(parameters, of_weights)
        return (pending.wait() if pending else dx, None, None, *of_parameters)


def _gathered(x: Tensor, collective: InputCollective | None) -> Tensor:
    return x if collective is None else collective.gather(x)


def _weight_gradient(p: Tensor, grad: Tensor, rows: Tensor) -> Tensor | None:
    """grad^T rows [out, in], for autograd; None where it was added to main_grad."""
    main_grad = getattr(p, "main_grad", None)
    if main_grad is None:
        return product(grad.t(), rows)
    add_product(main_grad, grad.t(), rows)
    return None


def column_parallel_linears(
    x: Tensor, layers: Sequence[nn.Linear], collective: InputCollective | None = None
) -> list[Tensor]:
    """Apply linear layers that share the input x [..., hidden] (all with a bias or none)."""
    weights = [differentiable(layer.weight) for layer in layers]
    biases = [differentiable(layer.bias) for layer in layers if layer.bias is not None]
    return list(_Linears.apply(x, collective, len(layers), *weights, *biases))


def row_parallel_linear(
    x: Tensor, layer: nn.Linear, collective: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply the last linear layer of a part to x [..., in / tp], and sum over ranks; then add the
    bias once."""
    (y,) = _Linears.apply(x, None, 1, differentiable(layer.weight))
    y = collective(y)
    return y if layer.bias is None else y + use(layer.bias, y.dtype)
