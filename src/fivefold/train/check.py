"""`fivefold check`: the same steps in a layout and in one process, and everything compared.

Both take the same samples from the same first weights. Compared are the loss and the gradient
norm of the first step, every gradient of the first step, every weight after the last step, the
copies of a weight on different ranks, and what every rank sent with what arithmetic predicts.

The optimizer's settings are `PARITY`, whatever the run says: Adam divides by the size of the
gradient, so that with the usual eps of 1e-8 it turns the rounding of a gradient that is almost
zero into whole steps. The numbers are compared in fp32, where rounding does not hide an error;
the messages of a bf16 run are those of a step in bf16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import coordinates
from fivefold.ledger import Ledger
from fivefold.model.config import ModelConfig
from fivefold.parallel.cost import ledger as predicted_ledger
from fivefold.parallel.data.memory import StateBytes, after_step
from fivefold.parallel.work import rank_work
from fivefold.report.tables import ledger_rows
from fivefold.train.launch import joined_by_torchrun, launch, where
from fivefold.train.prepare import Prepared, prepare_run
from fivefold.train.runfile import Optimizer, Run

if TYPE_CHECKING:
    from torch import Tensor

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

MEMORY_LIMIT = 0.01
"""The largest difference of memory from its plan, as a part of the plan."""

SEEDS = 3
"""Seeds tried. Where two experts' probabilities are equal but for rounding, a token may choose
another one in the layout than in one process (about one choice in a million does). Both are right,
and differ by more than rounding: then the next seed is compared."""

GRADIENT_FLOOR = 1e-4
"""A gradient's difference is relative to the parameter's own largest gradient, but to no less than
this part of the largest gradient of all: what cancels out to almost nothing keeps the rounding
error of what cancelled."""


# --- what one rank hands back ------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One rank's part of a parameter or gradient: `values` begin at index `start` of the whole."""

    start: tuple[int, ...]
    whole_shape: tuple[int, ...]
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
    """Take `steps` steps and write everything down. Every rank of the world calls this."""
    from fivefold.train.memory import measure

    loads = _ExpertLoads(trainer)
    _, parameters = trainer.gradients(0)
    gradients = {x.name: _piece(x.parameter, x.grad) for x in parameters}
    results, expert_loads = [], []
    for step in range(steps):
        where.step = step + 1
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
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(parameter.shape)
    start = (0,) * len(shape)
    if isinstance(parameter, DTensor):
        placing = (parameter.device_mesh, parameter.placements)
        start = tuple(compute_local_shape_and_global_offset(shape, *placing)[1])
    return Piece(start, shape, values.detach().cpu().numpy().copy())


class _ExpertLoads:
    """Counts the tokens that each expert computes on this rank in forward passes."""

    def __init__(self, trainer: Trainer) -> None:
        from fivefold.model.moe import MoE

        self.trainer = trainer
        self.by_layer: dict[int, NDArray[np.int64]] = {}
        for stage in trainer.stages.values():
            for index, layer in stage.model.layers.items():
                if isinstance(layer.mlp, MoE):
                    layer.mlp.experts.register_forward_pre_hook(self._counter(int(index)))

    def reset(self) -> None:
        self.by_layer = {}

    def _counter(self, layer: int) -> Callable[[Any, tuple[Any, ...]], None]:
        moe, axes = self.trainer.config.moe, self.trainer.axes
        assert moe is not None
        local = moe.num_experts // axes.ep.size
        first = local * axes.ep.index

        def count(module: Any, inputs: tuple[Any, ...]) -> None:
            _, counts = inputs
            # Ranks that share experts (etp) all see their tokens, and a recomputed pass sees them
            # again.
            if axes.etp.index == 0 and self.trainer.recorder.phase == "forward":
                loads = self.by_layer.setdefault(layer, np.zeros(moe.num_experts, np.int64))
                loads[first : first + local] += counts

        return count


# --- one process against the layout ------------------------------------------------------------


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
    """Hold the ranks of a layout (`split`) against one process (`one`, of one rank)."""
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
                wholes[name] = np.full(piece.whole_shape, np.nan, np.float32)
                filled[name] = np.zeros(piece.whole_shape, bool)
            ends = np.add(piece.start, piece.values.shape)
            place = tuple(slice(*ends) for ends in zip(piece.start, ends, strict=True))
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
    """Each step's tokens an expert, by layer, summed over ranks."""
    steps = []
    for step_loads in zip(*(rank.expert_loads for rank in ranks), strict=True):
        layers = sorted({layer for loads in step_loads for layer in loads})
        steps.append({n: sum(loads[n] for loads in step_loads if n in loads) for n in layers})
    return steps


# --- what was sent against what was predicted ---------------------------------------------------


def compare_ledgers(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    precision: str,
    measured: Sequence[Ledger],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Hold what each rank sent against its plan, `measured` by rank.

    Returns the rows of an average rank of each pipeline rank, and those rows that differ: of
    single ranks, but for transfers whose size the router decides, which only have a mean.
    """
    predicted = [
        predicted_ledger(config, layout, sequence_length, rank, precision)
        for rank in range(layout.world_size)
    ]
    places = [coordinates(layout, rank)["pp"] for rank in range(layout.world_size)]
    rows, differences = [], []
    for pp_rank in range(layout.pp):
        ranks = [rank for rank, place in enumerate(places) if place == pp_rank]
        means = [Ledger.mean([ledgers[r] for r in ranks]) for ledgers in (predicted, measured)]
        stage_rows = [{"pp_rank": pp_rank, **row} for row in ledger_rows(*means)]
        rows += stage_rows
        for rank in ranks:
            own_rows = ledger_rows(_fixed(predicted[rank]), _fixed(measured[rank]))
            differences += [
                {"pp_rank": pp_rank, "rank": rank, **row} for row in own_rows if not row["agrees"]
            ]
        differences += [
            {"rank": None, **row} for row in stage_rows if row["routed"] and not row["agrees"]
        ]
    return rows, differences


def _fixed(ledger: Ledger) -> Ledger:
    """Without the transfers whose size the router decides."""
    return Ledger(transfer for transfer in ledger if not transfer.routed)


def compare_memory(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    precision: str,
    measured: Sequence[StateBytes],
) -> list[dict[str, Any]]:
    """Hold what weights, gradients and optimizer state take on each rank after a step against
    the plan: the rank of each pipeline rank and kind that is furthest from it."""
    rows = []
    for pp_rank in range(layout.pp):
        for kind in ("weights", "gradients", "optimizer"):
            pairs = [
                (_planned_memory(config, layout, sequence_length, rank, precision, kind), state)
                for rank, state in enumerate(getattr(state, kind) for state in measured)
                if coordinates(layout, rank)["pp"] == pp_rank
            ]
            predicted, found = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
            rows.append(
                {
                    "pp_rank": pp_rank,
                    "kind": kind,
                    "predicted_bytes": predicted,
                    "measured_bytes": found,
                    "agrees": abs(found - predicted) <= MEMORY_LIMIT * predicted,
                }
            )
    return rows


def _planned_memory(
    config: ModelConfig, layout: Layout, sequence_length: int, rank: int, precision: str, kind: str
) -> int:
    works = rank_work(config, layout, sequence_length, rank, precision)
    return sum(int(getattr(after_step(work), kind)) for work in works)


# --- the command -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckReport:
    """What `check` found."""

    layout: Layout
    steps: int
    precision: str
    comparison: Comparison
    ledger: list[dict[str, Any]]
    ledger_differences: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    seed: int
    rerouted_seeds: list[int]  # tried before, see `SEEDS`
    one_process_s: float  # wall seconds, start-up included
    layout_s: float

    @property
    def ok(self) -> bool:
        memory_agrees = all(row["agrees"] for row in self.memory)
        return self.comparison.ok and not self.ledger_differences and memory_agrees

    def as_dict(self) -> dict[str, Any]:
        """The report with stable keys; a difference that is no finite number is None."""
        comparison = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self.comparison).items()
        }
        return {
            "ok": self.ok,
            "layout": str(self.layout),
            "steps": self.steps,
            "precision": self.precision,
            "optimizer": {**PARITY.model_dump(), "lr_schedule": "constant"},
            **comparison,
            "replicas_identical": not self.comparison.differing_replicas,
            "limits": LIMITS,
            "ledger": self.ledger,
            "ledger_differences": self.ledger_differences,
            "memory": self.memory,
            "seed": self.seed,
            "rerouted_seeds": self.rerouted_seeds,
            "one_process_s": self.one_process_s,
            "layout_s": self.layout_s,
        }


def check(run: Run, steps: int) -> CheckReport:
    """Run `steps` steps in the run's layout and in one process, and compare.

    Raises UserError for what cannot be run, and WorkerFailure when a process fails.
    """
    if joined_by_torchrun():
        raise UserError(
            "check starts its own processes, one of them to compare with: run it without torchrun"
        )
    prepared = prepare_run(run)
    import fivefold.train.trainer  # noqa: F401  before the workers are forked, so that they have it

    report = _check_seed(prepared, steps, rerouted_seeds=[])
    while not report.comparison.ok and report.comparison.rerouted:
        rerouted_seeds = [*report.rerouted_seeds, report.seed]
        if len(rerouted_seeds) == SEEDS:
            break
        run = run.model_copy(update={"seed": report.seed + 1})
        report = _check_seed(replace(prepared, run=run), steps, rerouted_seeds)
    return report


def _check_seed(prepared: Prepared, steps: int, rerouted_seeds: list[int]) -> CheckReport:
    run, layout = prepared.run, prepared.layout
    accumulation = run.global_batch // layout.micro_batch
    alone = Layout(micro_batch=layout.micro_batch, accumulation=accumulation)
    one, one_process_s = _run(prepared, alone, steps)
    split, layout_s = _run(prepared, layout, steps)
    rows, differences = compare_ledgers(
        prepared.config,
        layout,
        run.data.sequence_length,
        run.precision,
        [rank.ledger for rank in split],
    )
    return CheckReport(
        layout=layout,
        steps=steps,
        precision=run.precision,
        comparison=compare(one, split),
        ledger=rows,
        ledger_differences=differences,
        memory=compare_memory(
            prepared.config,
            layout,
            run.data.sequence_length,
            run.precision,
            [rank.memory for rank in split],
        ),
        seed=run.seed,
        rerouted_seeds=rerouted_seeds,
        one_process_s=one_process_s,
        layout_s=layout_s,
    )


def _run(prepared: Prepared, layout: Layout, steps: int) -> tuple[list[RankRecord], float]:
    """What each rank of a layout hands back, and the seconds it took."""
    began = time.perf_counter()
    ranks = launch(
        run_rank,
        layout.world_size,
        replace(prepared, layout=layout),
        steps,
        device=prepared.device,
        timeout_s=prepared.run.timeout_s,
    )
    return ranks, time.perf_counter() - began


def run_rank(prepared: Prepared, steps: int) -> RankRecord:
    """What each process does."""
    from fivefold.train.memory import measure

    precision = prepared.run.precision
    ranks_record = record(_trainer(prepared, "fp32"), steps)
    if precision == "fp32":
        return ranks_record
    trainer = _trainer(prepared, precision)
    for step in range(2):  # the first has to get the weights ready for those that follow
        trainer.step(step, PARITY.lr)
    return replace(ranks_record, ledger=trainer.ledger, memory=measure(trainer))


def _trainer(prepared: Prepared, precision: str) -> Trainer:
    import torch
    import torch.distributed as dist

    from fivefold.parallel.comm import Recorder
    from fivefold.train.trainer import Trainer

    trainer = Trainer(
        prepared.config,
        prepared.layout,
        prepared.samples,
        PARITY,
        precision,
        prepared.run.seed,
        dist.get_rank(),
        Recorder(on_call=_now_in),
        torch.device(prepared.device),
        prepared.run.dropout,
    )
    where.coordinates = trainer.axes.describe()
    return trainer


def _now_in(call: str) -> None:
    where.doing = call
