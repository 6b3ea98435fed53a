"""The Python API: what the commands do, as functions.

    from fivefold import api

    plan = api.plan("llama-3.1-8b", "dgx-h100", gpus=64, sequence_length=8192)
    print(plan["layouts"][0]["layout"])

Each function returns the plain data that the command prints with `--json`, as typed dictionaries
(`fivefold.results`). `UserError` means bad input; its text is one sentence. `WorkerFailure` means
that a training process failed. All other modules are private and may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fivefold.errors import UserError
from fivefold.results import CheckResult, LayoutResult, PlanResult, TraceResult, TrainResult
from fivefold.train.failures import WorkerFailure

__all__ = [
    "CheckResult",
    "LayoutResult",
    "PlanResult",
    "TraceResult",
    "TrainResult",
    "UserError",
    "WorkerFailure",
    "check",
    "layout",
    "plan",
    "trace",
    "train",
]


def plan(
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    global_batch_tokens: str | None = None,
    precision: str | None = None,
    engine: str | None = None,
    layout: str | None = None,
    fix: str | None = None,
    forbid: str | None = None,
    objective: str = "time",
    top: int = 5,
    tokens: str | None = None,
    max_memory: str | None = None,
    headroom: str | None = None,
    measured: Sequence[str] = (),
    imbalance: float = 1.0,
    mtp: bool = False,
    offload: bool = False,
    dims: str | None = None,
    from_megatron: str | None = None,
) -> PlanResult:
    """Search all layouts of a job and explain the best.

    Args:
        model: preset, path of a config.json, or its folder. `dims` or `from_megatron` replace it.
        cluster: name, path of a cluster file, or a line of numbers.
        gpus: number of devices.
        sequence_length: tokens. Default: 4096, or the model's maximum if that is smaller.
        global_batch: sequences per step. `global_batch_tokens` ("16M") replaces it.
        layout: evaluate this layout, and compare it with the best one.
        fix, forbid: settings that layouts must have ("tp8 zero1"), or must not have ("pp zero3").
        objective: "time", "memory" or "cost" (with `tokens`, e.g. "15T").
        measured: measured steps, e.g. ["tp8 pp4=9.31s"], that calibrate the predictions.

    The other arguments are options of `fivefold plan`. Raises UserError.
    """
    given = dict(locals())
    from fivefold.interop.megatron_plan import read_request
    from fivefold.plan.request import Options
    from fivefold.plan.result import make_plan
    from fivefold.plan.result_json import to_json

    given["measured"] = tuple(measured)
    megatron = given.pop("from_megatron")
    return cast(PlanResult, to_json(make_plan(read_request(Options(**given), megatron))))


def layout(text: str, gpus: int | None = None) -> LayoutResult:
    """What a layout line means. With `gpus`, `dp` may be left out. Raises UserError."""
    from fivefold.layout.legality import violations
    from fivefold.layout.notation import parse
    from fivefold.parallel.pipeline.table_file import with_table
    from fivefold.report.tables import layout_report

    parsed = with_table(parse(text, gpus))
    for broken in violations(parsed, world_size=gpus, running=False):
        raise UserError(broken)
    return layout_report(parsed)


def trace(
    model: str,
    layout: str | None = None,
    *,
    sequence_length: int | None = None,
    precision: str | None = None,
    rank: int | None = None,
) -> TraceResult:
    """Run one rank of any world with shapes alone, and compare it with the plan.

    Args:
        model: preset, path of a config.json, its folder, or a plan file.
        layout: layout line. A plan file has its own.
        sequence_length: tokens. Default: 4096, or the plan's.
        precision: "bf16" or "fp32". Default: "bf16", or the plan's.
        rank: global rank. Default: one rank of each different stage.

    Raises UserError.
    """
    from fivefold.verify.trace import trace_report
    from fivefold.verify.traceable import read

    length = None if sequence_length is None else str(sequence_length)
    what = read(model, layout, length, precision)
    report = trace_report(what.config, what.layout, what.sequence_length, what.precision, rank)
    return cast(TraceResult, report)


def check(
    run_file: str, layout: str | None = None, *, overrides: Sequence[str] = (), steps: int = 5
) -> CheckResult:
    """Compare a layout with one process and with its plan, on local processes.

    Args:
        run_file: path of a run file.
        layout: layout line or plan file. Default: the run file's layout.
        overrides: values of the run file, e.g. ["optimizer.lr=1e-3"].
        steps: optimizer steps.

    Raises UserError, and WorkerFailure if a process fails.
    """
    from fivefold.verify.check import check as check_run
    from fivefold.verify.planned_run import load_planned_run

    run = load_planned_run(run_file, layout, list(overrides))
    return cast(CheckResult, check_run(run, steps).as_dict())


def train(
    run_file: str,
    layout: str | None = None,
    *,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    out: str | None = None,
) -> TrainResult | None:
    """Train on local processes, or as one of the processes that torchrun started.

    Arguments are those of `check`; `steps` and `out` (the output folder) replace the run file's.
    Progress is printed. Returns None if no step was left to do, and on ranks other than 0 under
    torchrun. Raises UserError, and WorkerFailure if a process fails.
    """
    from fivefold.report.timeline import check_writer, save_run
    from fivefold.verify.plan_vs_run import train_and_compare
    from fivefold.verify.planned_run import load_planned_run

    run = load_planned_run(run_file, layout, list(overrides), steps, out)
    if run.timeline is not None:
        check_writer(run.timeline)
    return cast("TrainResult | None", train_and_compare(run, save_run))
