"""`fivefold check`: a layout compared with one process, its messages and memory with the plan.

The numbers are compared in fp32, where rounding does not hide an error (see `parity`); the messages
of a bf16 run are those of a step in bf16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import groups
from fivefold.parallel.data.memory import StateBytes, after_step
from fivefold.parallel.workload import rank_work
from fivefold.train.launch import launch
from fivefold.train.prepare import Prepared, prepare_run
from fivefold.train.runfile import Run
from fivefold.train.torchrun import joined_by_torchrun
from fivefold.verify.ledgers import Row, compare_ledgers
from fivefold.verify.parity import LIMITS, PARITY, Comparison, RankRecord, compare, record

VERSION = 1
"""Of the report's keys."""

MEMORY_LIMIT = 0.01
"""The largest difference of memory from its plan, as a fraction of the plan."""

SEEDS = 3
"""Seeds tried. Where two experts' probabilities are equal but for rounding, a token may choose
another one in the layout than in one process (about one choice in a million does). Both are right,
and differ by more than rounding: then the next seed is compared."""


@dataclass(frozen=True)
class CheckReport:
    """What `check` found."""

    layout: Layout
    steps: int
    precision: str
    comparison: Comparison
    ledger: list[Row]
    ledger_differences: list[Row]
    memory: list[Row]
    seed: int
    rerouted_seeds: list[int]  # tried before, see `SEEDS`
    one_process_s: float  # wall seconds, start-up included
    layout_s: float

    @property
    def ok(self) -> bool:
        memory_agrees = all(row["agrees"] for row in self.memory)
        return self.comparison.ok and not self.ledger_differences and memory_agrees

    def as_dict(self) -> Row:
        """The report with stable keys; a difference that is no finite number is None."""
        fields = dict(vars(self))
        comparison = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(fields.pop("comparison")).items()
        }
        return {
            "version": VERSION,
            "ok": self.ok,
            **fields,
            "layout": str(self.layout),
            "optimizer": {**PARITY.model_dump(), "lr_schedule": "constant"},
            **comparison,
            "replicas_identical": not self.comparison.differing_replicas,
            "limits": LIMITS,
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
        memory=_compare_memory(prepared, [rank.memory for rank in split]),
        seed=run.seed,
        rerouted_seeds=rerouted_seeds,
        one_process_s=one_process_s,
        layout_s=layout_s,
    )


def _compare_memory(prepared: Prepared, measured: Sequence[StateBytes]) -> list[Row]:
    """Compare what weights, gradients and optimizer state take on each rank after a step with the
    plan: of each pipeline rank and kind the rank with the largest difference."""
    run, layout = prepared.run, prepared.layout
    planned = []
    for rank in range(layout.world_size):
        works = rank_work(prepared.config, layout, run.data.sequence_length, rank, run.precision)
        planned.append(sum(map(after_step, works), StateBytes(0, 0, 0)))
    rows = []
    for pp_rank, ranks in enumerate(groups(layout, "stage").tolist()):
        for kind in ("weights", "gradients", "optimizer"):
            pairs = [
                (int(getattr(planned[rank], kind)), getattr(measured[rank], kind)) for rank in ranks
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


def _run(prepared: Prepared, layout: Layout, steps: int) -> tuple[list[RankRecord], float]:
    """What each rank of a layout returns, and the seconds it took."""
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
    from fivefold.train.trainer import make_trainer
    from fivefold.verify.state_memory import measure

    precision = prepared.run.precision
    ranks_record = record(make_trainer(prepared, PARITY, "fp32"), steps)
    if precision == "fp32":
        return ranks_record
    trainer = make_trainer(prepared, PARITY, precision)
    for step in range(2):  # the first prepares the weights for those that follow
        trainer.step(step, PARITY.lr)
    return replace(ranks_record, ledger=trainer.ledger, memory=measure(trainer))
