"""AdamW on this rank's parts of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fivefold.model.parameters import local_tensor
from fivefold.parallel.data.run import LocalParameter
from fivefold.train.runfile import Optimizer


class AdamW:
    """torch's fused AdamW (decoupled weight decay, arXiv:1711.05101) over local fp32 values.

    Weight decay is for matrices: not for norms and biases.
    """

    def __init__(self, stages: Iterable[nn.Module], settings: Optimizer) -> None:
        self._values: dict[str, Tensor] = {}
        decayed, others = [], []
        for stage in stages:
            for name, p in stage.named_parameters():
                value = self._values[name] = local_tensor(p)
                (decayed if is_decayed(name) else others).append(value)
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.torch = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )
        for group in self.torch.param_groups:
            group["fused"] = True  # the constructor refuses it for tensors without values

    def step(self, parameters: list[LocalParameter], lr: float, grad_scale: float) -> None:
        """Update with gradients times `grad_scale`."""
        gradients = [x.grad for x in parameters]
        torch._foreach_mul_(gradients, grad_scale)  # pyright: ignore[reportPrivateImportUsage]
        for x in parameters:
            self._values[x.name].grad = x.grad
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Moments and step count of one parameter (by global name); made if need be."""
        value = self._values[name]
        state = self.torch.state[value]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"] = torch.zeros_like(value)
            state["exp_avg_sq"] = torch.zeros_like(value)
        return state


def is_decayed(name: str) -> bool:
    """Is weight decay for this parameter? For all matrices and embeddings, by global name."""
    return not name.endswith("bias") and "norm" not in name.split(".")[-2]
