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
        self._named: list[tuple[str, Tensor]] = [
            (name, local_tensor(p)) for stage in stages for name, p in stage.named_parameters()
        ]
        # Where a V of stages has both ends on one rank, that has a tied embedding twice.
        self._values = dict(self._named)
        decayed = [value for name, value in self._named if is_decayed(name)]
        others = [value for name, value in self._named if not is_decayed(name)]
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
        """Update all stages' parameters, in their order, with gradients times `grad_scale`."""
        gradients = [x.grad for x in parameters]
        torch._foreach_mul_(gradients, grad_scale)  # pyright: ignore[reportPrivateImportUsage]
        for x, (_, value) in zip(parameters, self._named, strict=True):
            value.grad = x.grad
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Moments and step count of one parameter (by global name); made if need be."""
        return self._state(self._values[name])

    def update_copies(self) -> None:
        """Make a second copy of a parameter what the one is that `state` is about."""
        for name, value in self._named:
            if value is not self._values[name]:
                value.copy_(self._values[name])
                for key, held in self._state(value).items():
                    held.copy_(self.state(name)[key])

    def _state(self, value: Tensor) -> dict[str, Tensor]:
        state = self.torch.state[value]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"] = torch.zeros_like(value)
            state["exp_avg_sq"] = torch.zeros_like(value)
        return state


def is_decayed(name: str) -> bool:
    """Is weight decay for this parameter? For all matrices and embeddings, by global name."""
    return not name.endswith("bias") and "norm" not in name.split(".")[-2]
