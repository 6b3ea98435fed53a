"""Parity: two runs of the same steps, one of them in a single process, compared.

Both take the same samples from the same first weights. Compared are the loss and the gradient
norm of the first step, every gradient of the first step, every weight after the last step, and the
copies of a weight on different ranks.

The optimizer's settings are `PARITY`, whatever the run says: Adam divides by the size of the
gradient, so that with the usual eps of 1e-8 it turns the rounding of a gradient that is almost
zero into whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fivefold.ledger import Ledger
from fivefold.parallel.data.memory import StateBytes
from fivefold.train.failures import status
from fivefold.train.runfile import Optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fivefold.train.trainer import StepResult, Trainer

PARITY = Optimizer(lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, clip=1.0)
"""The optimizer of a check. Its learning rate is constant."""

LIMITS = {
    "loss_rel_diff": 1e-5,
    "balance_loss_rel_diff": 1e-5,
    "grad_norm_rel_diff": 1e-5,
    "max_grad_rel_diff": 1e-5,
    "max_weight_abs_diff": 1e-5,
}
"""The largest differences that count as rounding, by their key in a report."""

GRADIENT_FLOOR = 1e-4
"""A gradient's difference is relative to the parameter's own largest gradient, but to no less than
this part of the largest gradient of all: what cancels out to almost nothing keeps the rounding
error of what cancelled."""


# --- what one rank returns ------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One rank's part of a parameter or gradient: `values` begin at index `offset` of the whole."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole
    values: NDArray[np.float32]


@dataclass(frozen=True)
class RankRecord:
    """What one rank computed and sent. Gradients are means over the tokens of the first step,
    before clipping; weights are those after the last step."""

    results: list[StepResult]
    gradients: dict[str, Piece]
    weights: dict[str, Piece]
    ledger: Ledger  # of the last step
    memory: StateBytes  # after the last step
    expert_loads: list[dict[int, NDArray[np.int64]]]
    """For each step the tokens that this rank computed for each expert, by layer."""


def record(trainer: Trainer, steps: int) -> RankRecord:
    """Take `steps` steps and record everything. All ranks call this."""
    from fivefold.verify.state_memory import measure

    loads = _ExpertLoads(trainer)
    _, parameters = trainer.gradients(0)
    gradients = {x.name: _piece(x.parameter, x.grad) for x in parameters}
    results, expert_loads = [], []
    for step in range(steps):
        status.step = step + 1
        loads.reset()
        results.append(trainer.step(step, PARITY.lr))
        expert_loads.append(loads.by_layer)
    for piece in gradients.values():
        np.divide(piece.values, max(results[0].tokens, 1), out=piece.values)
    weights = weight_pieces(trainer)
    return RankRecord(results, gradients, weights, trainer.ledger, measure(trainer), expert_loads)


def weight_pieces(trainer: Trainer) -> dict[str, Piece]:
    """This rank's part of each weight that it holds, as it is now."""
    from fivefold.model.parameters import local_tensor

    return {
        name: _piece(p, local_tensor(p))
        for stage in trainer.stages.values()
        for name, p in stage.named_parameters()
    }


def _piece(parameter: Tensor, values: Tensor) -> Piece:
    from fivefold.train.checkpoint.pieces import offset_in_whole

    array = values.detach().cpu().numpy().copy()
    return Piece(offset_in_whole(parameter), tuple(parameter.shape), array)


class _ExpertLoads:
    """Counts the tokens that each expert computes on this rank in forward passes."""

    def __init__(self, trainer: Trainer) -> None:
        from fivefold.model.moe import MoE

        self.trainer = trainer
        self.by_layer: dict[int, NDArray[np.int64]] = {}
        for stage in trainer.stages.values():
            for index, layer in stage.layers.items():
                if isinstance(layer.mlp, MoE):
                    layer.mlp.experts.register_forward_pre_hook(self._counter(int(index)))

    def reset(self) -> None:
        self.by_layer = {}

    def _counter(self, layer: int) -> Callable[[nn.Module, tuple], None]:
        moe, axes = self.trainer.config.moe, self.trainer.axes
        assert moe is not None
        local = moe.num_experts // axes.ep.size
        first = local * axes.ep.index

        def count(module: nn.Module, inputs: tuple) -> None:
            _, counts = inputs
            # Ranks that share experts (etp) all see their tokens, and a recomputed pass sees them
            # again.
            if axes.etp.index == 0 and self.trainer.recorder.phase == "forward":
                loads = self.by_layer.setdefault(layer, np.zeros(moe.num_experts, np.int64))
                loads[first : first + local] += counts

        return count


# --- one process and the layout ------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """How far two runs are from each other; nan where a number is not finite or is missing."""

    loss_rel_diff: float
    balance_loss_rel_diff: float
    grad_norm_rel_diff: float
    max_grad_abs_diff: float
    max_grad_rel_diff: float
    worst_gradient: str  # the parameter with the largest relative difference
    max_weight_abs_diff: float
    worst_weight: str
    differing_replicas: list[str]  # parameters, or "step results", that ranks have differently
    rerouted: list[dict[str, int]]
    """Steps and layers in which tokens went to another expert: {step, layer, tokens, of}."""

    @property
    def ok(self) -> bool:
        """Are all differences within `LIMITS`, and all copies the same to the last bit?"""
        within = all(getattr(self, key) <= limit for key, limit in LIMITS.items())
        return within and not self.differing_replicas


def compare(one: Sequence[RankRecord], split: Sequence[RankRecord]) -> Comparison:
    """Compare the ranks of a layout (`split`) with one process (`one`, of one rank)."""
    (reference,) = one
    gradients, _ = assemble([rank.gradients for rank in one])
    weights, _ = assemble([rank.weights for rank in one])
    split_gradients, differing_gradients = assemble([rank.gradients for rank in split])
    split_weights, differing_weights = assemble([rank.weights for rank in split])
    differing = sorted(differing_gradients | differing_weights)
    if any(rank.results != split[0].results for rank in split):
        differing.append("step results")

    grad_diffs = _differences(gradients, split_gradients)
    largest = {name: np.abs(values).max() for name, values in gradients.items()}
    floor = GRADIENT_FLOOR * max(largest.values())
    relative = {name: diff / max(largest[name], floor) for name, diff in grad_diffs.items()}
    worst_gradient, max_grad_rel_diff = _largest(relative)
    worst_weight, max_weight_abs_diff = _largest(_differences(weights, split_weights))
    first, split_first = reference.results[0], split[0].results[0]
    return Comparison(
        loss_rel_diff=_relative(first.loss, split_first.loss),
        balance_loss_rel_diff=_relative(first.balance_loss, split_first.balance_loss),
        grad_norm_rel_diff=_relative(first.grad_norm, split_first.grad_norm),
        max_grad_abs_diff=_largest(grad_diffs)[1],
        max_grad_rel_diff=max_grad_rel_diff,
        worst_gradient=worst_gradient,
        max_weight_abs_diff=max_weight_abs_diff,
        worst_weight=worst_weight,
        differing_replicas=differing,
        rerouted=_rerouted(one, split),
    )


def assemble(
    ranks: Sequence[Mapping[str, Piece]],
) -> tuple[dict[str, NDArray[np.float32]], set[str]]:
    """Whole tensors out of all ranks' pieces, nan where no rank has a piece; and the names of
    those of which two ranks have the same part with different bits."""
    wholes: dict[str, NDArray[np.float32]] = {}
    filled: dict[str, NDArray[np.bool_]] = {}
    differing = set()
    for pieces in ranks:
        for name, piece in pieces.items():
            if name not in wholes:
                wholes[name] = np.full(piece.shape, np.nan, np.float32)
                filled[name] = np.zeros(piece.shape, bool)
            ends = np.add(piece.offset, piece.values.shape)
            place = tuple(slice(*ends) for ends in zip(piece.offset, ends, strict=True))
            seen = filled[name][place]
            earlier = wholes[name][place].view(np.int32)
            if (earlier != piece.values.view(np.int32))[seen].any():
                differing.add(name)
            wholes[name][place] = piece.values
            filled[name][place] = True
    return wholes, differing


def _differences(
    a: Mapping[str, NDArray[np.float32]], b: Mapping[str, NDArray[np.float32]]
) -> dict[str, float]:
    """Largest absolute difference of each tensor; nan for one that only one side has."""
    return {
        name: float(np.abs(a[name] - b[name]).max()) if name in a and name in b else math.nan
        for name in sorted({*a, *b})
    }


def _largest(values: Mapping[str, float]) -> tuple[str, float]:
    """The largest value and its name; nan counts as the largest."""
    name = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
    return name, float(values[name])


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _rerouted(one: Sequence[RankRecord], split: Sequence[RankRecord]) -> list[dict[str, int]]:
    found = []
    for step, (before, after) in enumerate(zip(_loads(one), _loads(split), strict=True)):
        for layer, loads in sorted(before.items()):
            moved = int(np.abs(after[layer] - loads).sum()) // 2
            if moved:
                of = int(loads.sum())
                found.append({"step": step + 1, "layer": layer, "tokens": moved, "of": of})
    return found


def _loads(ranks: Sequence[RankRecord]) -> list[dict[int, NDArray[np.int64]]]:
    """Each step's tokens per expert, by layer, summed over ranks."""
    steps = []
    for step_loads in zip(*(rank.expert_loads for rank in ranks), strict=True):
        layers = sorted({layer for loads in step_loads for layer in loads})
        steps.append({n: sum(loads[n] for loads in step_loads if n in loads) for n in layers})
    return steps
