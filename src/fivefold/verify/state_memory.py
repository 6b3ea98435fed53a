"""What weights, gradients and optimizer state take in this process, by looking at the tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fivefold.model.parameters import local_tensor
from fivefold.parallel.data.memory import StateBytes
from fivefold.train.trainer import Trainer


def measure(trainer: Trainer) -> StateBytes:
    """Bytes of all storages that hold weights (FSDP2's gathered copies included), gradients
    (unsharded ones included) and optimizer moments at this moment. A storage counts once."""
    held = {kind: _bytes(tensors) for kind, tensors in holdings(trainer).items()}
    return StateBytes(**held)


def holdings(trainer: Trainer) -> dict[str, list[Tensor | None]]:
    """The tensors that hold them, by kind; None where there is none at this moment."""
    weights, gradients = [], []
    for stage in trainer.stages.values():
        for p in stage.parameters():
            weights += [_local(p), getattr(p, "compute_copy", None)]
            gradients += [getattr(p, "main_grad", None), _local(p.grad)]
        for p in _fsdp_parameters(stage):
            weights += [p._sharded_param_data, *p.all_gather_outputs]
            gradients += [_local(p.sharded_param.grad), _local(p.unsharded_accumulated_grad)]
            if hasattr(p, "_unsharded_param"):
                gradients.append(_local(p._unsharded_param.grad))
    moments = [
        moment
        for state in trainer.optimizer.torch.state.values()
        for moment in (state["exp_avg"], state["exp_avg_sq"])
    ]
    return {"weights": weights, "gradients": gradients, "optimizer": moments}


def _fsdp_parameters(stage: nn.Module) -> Iterator:
    """FSDP2's own records of its parameters (private in torch 2.13)."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def _local(x: Tensor | None) -> Tensor | None:
    return local_tensor(x) if isinstance(x, DTensor) else x


def _bytes(tensors: list[Tensor | None]) -> int:
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
