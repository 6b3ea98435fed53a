"""`fivefold check`: a layout against one process, and its messages and memory against the plan.

The numbers are compared in fp32, where rounding does not hide an error (see `parity`); the messages
of a bf16 run are those of a step in bf16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import groups
from fivefold.ledger import Ledger, Transfer
from fivefold.model.config import ModelConfig
from fivefold.parallel.cost import ledger as predicted_ledger
from fivefold.parallel.data.memory import StateBytes, after_step
from fivefold.parallel.workload import rank_work
from fivefold.train.launch import launch
from fivefold.train.prepare import Prepared, prepare_run
from fivefold.train.runfile import Run
from fivefold.train.torchrun import joined_by_torchrun
from fivefold.verify.parity import LIMITS, PARITY, Comparison, RankRecord, compare, record

MEMORY_LIMIT = 0.01
"""The largest difference of memory from its plan, as a part of the plan."""

SEEDS = 3
"""Seeds tried. Where two experts' probabilities are equal but for rounding, a token may choose
another one in the layout than in one process (about one choice in a million does). Both are right,
and differ by more than rounding: then the next seed is compared."""


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
    rows, differences = [], []
    for pp_rank, ranks in enumerate(groups(layout, "stage").tolist()):
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


def ledger_rows(predicted: Ledger, measured: Ledger) -> list[dict[str, Any]]:
    """The rows of two ledgers beside each other; a count is 0 where a ledger has no such row.

    `payload_bytes` is that of one call; the other bytes are those of all calls, `wire_bytes` what
    leaves the rank. A `routed` payload is a mean (see fivefold.ledger).
    """
    rows = []
    for plan, run in predicted.align(measured):
        transfer = plan or run
        assert transfer is not None  # `beside` has a row only where a ledger has one
        rows.append(
            {
                "split": transfer.split,
                "phase": transfer.phase,
                "op": transfer.op,
                "group_size": int(transfer.group_size),  # numpy's, where tp repeats kv heads
                "payload_bytes": transfer.payload_bytes,
                "routed": transfer.routed,
                **_side("predicted", plan),
                **_side("measured", run),
                "agrees": plan == run,
            }
        )
    return rows


def _side(name: str, transfer: Transfer | None) -> dict[str, float]:
    return {
        f"{name}_calls": transfer.calls if transfer else 0,
        f"{name}_bytes": transfer.total_bytes if transfer else 0,
        f"{name}_wire_bytes": transfer.wire_bytes if transfer else 0,
    }


def compare_memory(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    precision: str,
    measured: Sequence[StateBytes],
) -> list[dict[str, Any]]:
    """Hold what weights, gradients and optimizer state take on each rank after a step against
    the plan: the rank of each pipeline rank and kind that is furthest from it."""
    planned = [
        _planned_memory(config, layout, sequence_length, rank, precision)
        for rank in range(layout.world_size)
    ]
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


def _planned_memory(
    config: ModelConfig, layout: Layout, sequence_length: int, rank: int, precision: str
) -> StateBytes:
    works = rank_work(config, layout, sequence_length, rank, precision)
    return sum(map(after_step, works), StateBytes(0, 0, 0))


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
    from fivefold.train.trainer import make_trainer

    precision = prepared.run.precision
    ranks_record = record(make_trainer(prepared, PARITY, "fp32"), steps)
    if precision == "fp32":
        return ranks_record
    trainer = make_trainer(prepared, PARITY, precision)
    for step in range(2):  # the first has to get the weights ready for those that follow
        trainer.step(step, PARITY.lr)
    return replace(ranks_record, ledger=trainer.ledger, memory=measure(trainer))
