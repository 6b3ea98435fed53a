"""`fivefold train`: from a run file to the last step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from fivefold.errors import UserError
from fivefold.files import atomic_write
from fivefold.layout.notation import parse, stated
from fivefold.model.counts import count_parameters, flops_per_token
from fivefold.report.timeline import check_writer
from fivefold.train.data import Samples, data_hash
from fivefold.train.failures import where
from fivefold.train.launch import BACKENDS, launch
from fivefold.train.learning_rate import learning_rate
from fivefold.train.metrics import (
    Reporter,
    StepMetrics,
    begin_peak_memory,
    check_tensorboard,
    peak_flops_per_s,
    peak_memory_bytes,
)
from fivefold.train.prepare import Prepared, plan_run, prepare_run, prepare_samples
from fivefold.train.runfile import Run
from fivefold.train.torchrun import (
    check_world_size,
    describe_here,
    join,
    joined_by_torchrun,
    processes_of_torchrun,
)
from fivefold.verify.plan_vs_run import RankOutcome, Report, StepAverages, beside, gather, job_of

if TYPE_CHECKING:
    from fivefold.plan.engines import Job
    from fivefold.train.checkpoint.checkpoint import Saved
    from fivefold.train.trainer import StepResult, Trainer

SKIPS_IN_A_ROW = 10
"""Steps without a finite gradient after which a run stops: it will not recover by itself."""


def train(run: Run) -> None:
    """Train as a run file says, in local processes, or as one of those that torchrun started.

    Raises UserError for a run that cannot be (before a process has started and anything has
    been written), WorkerFailure when one of its processes fails.
    """
    check_tensorboard(run)
    if run.timeline is not None:
        check_writer(run.timeline)
    if joined_by_torchrun():
        _train_joined(run)
        return
    prepared = prepare_run(run)
    job = job_of(prepared)
    start = choose_start(prepared)
    if start is not None and start.step >= run.steps:
        return
    with _cursor_restored():
        launch(
            train_rank,
            prepared.layout.world_size,
            prepared,
            start,
            job,
            device=prepared.device,
            timeout_s=run.timeout_s,
        )


@contextmanager
def _cursor_restored() -> Iterator[None]:
    """A bar hides the cursor of the terminal; a worker that is killed cannot bring it back."""
    try:
        yield
    finally:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)


# --- where a run starts ------------------------------------------------------------------------


def choose_start(prepared: Prepared) -> Saved | None:
    """The checkpoint that the run goes on from, maybe that of its last step; None if it starts
    with the first one. Looks, too, whether `out` can be written and has room. Raises UserError if
    the run cannot start."""
    from fivefold.train.checkpoint import checkpoint

    run = prepared.run
    if run.out is None:
        return None
    _check_writable(Path(run.out))
    folder = _checkpoints(run)
    complete, partial = checkpoint.find(folder)
    for path in partial:
        print(f"ignored {path}: a save that was cut off has left it")
    newest = complete[-1] if complete else None
    if newest is not None and not run.checkpoint.resume:
        raise UserError(
            f"{run.out} holds the checkpoints of an earlier run, up to step {newest.step}: add "
            "--resume to go on from there, or choose another out"
        )
    if newest is not None:
        checkpoint.check_resumable(newest, prepared.config, prepared.samples)
        _say_what_goes_on(newest, run)
    elif run.checkpoint.resume:
        print(f"there is no checkpoint in {folder}: starting with the first step")
    if run.checkpoint.every is not None:
        steps = run.steps - (newest.step if newest else 0)
        saves = -(-steps // run.checkpoint.every)
        checkpoint.check_room(folder, prepared.config, run.checkpoint.keep, saves)
    _make_folder(Path(run.out))
    return newest


def _checkpoints(run: Run) -> Path:
    return Path(str(run.out), "checkpoints")


def _check_writable(out: Path) -> None:
    exists = next(path for path in (out, *out.parents) if path.exists())
    if not exists.is_dir():
        raise UserError(f"out {out} cannot be made, for {exists} is a file: choose another out")
    if not os.access(exists, os.W_OK | os.X_OK):
        raise UserError(f"out {out} cannot be written: {exists} does not allow it")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out {out} cannot be made: {error.strerror}; choose another out"
        ) from error


def _say_what_goes_on(newest: Saved, run: Run) -> None:
    if newest.step >= run.steps:
        print(f"{newest.folder} is after step {newest.step} and the run has {run.steps}: all done")
        return
    print(
        f"resuming after step {newest.step} ({newest.tokens:,} tokens), which was trained as "
        f"{newest.layout}"
    )
    rate = learning_rate(newest.step, run)
    if abs(rate - newest.learning_rate) > 1e-9 * abs(rate):
        print(
            f"note: the learning rate goes on with {rate:.5g}, where the checkpoint's run would "
            f"have taken {newest.learning_rate:.5g}: lr, lr_schedule or steps have been changed"
        )


# --- under torchrun ----------------------------------------------------------------------------


def _train_joined(run: Run) -> None:
    import torch.distributed as dist

    if {"dp", "edp"} & stated(run.layout):
        check_world_size(parse(run.layout).world_size)
    plan = plan_run(run, processes_of_torchrun())
    job = job_of(plan)
    join(plan.device, run.timeout_s)
    rank = dist.get_rank()
    try:
        samples = _prepare_once_a_node(run)
        prepared = Prepared(run, plan.config, plan.layout, plan.device, samples)
        start = _agree_on_start(prepared)
        if start is None or start.step < run.steps:
            train_rank(prepared, start, job)
        dist.destroy_process_group()
    except UserError:
        raise
    except Exception as error:
        raise describe_here(rank, error) from error


def _prepare_once_a_node(run: Run) -> Samples:
    """One process of each node tokenizes; the others wait for its files, however long it takes."""
    import torch.distributed as dist

    # A new_group of all ranks, so each is a member.
    waiting = cast(dist.ProcessGroup, dist.new_group(timeout=timedelta(days=1), backend="gloo"))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        samples = prepare_samples(run)
        dist.barrier(group=waiting)
    else:
        dist.barrier(group=waiting)
        samples = prepare_samples(run)

    hashes = [""] * dist.get_world_size()
    own = data_hash(samples.read(samples.ids(0)))
    dist.all_gather_object(hashes, own, group=waiting)
    for rank, other in enumerate(hashes):
        if other != hashes[0]:
            raise UserError(
                f"ranks 0 and {rank} read different data: give every node the same files"
            )
    return samples


def _agree_on_start(prepared: Prepared) -> Saved | None:
    """What rank 0 finds in `out` holds for all."""
    import torch.distributed as dist

    outcome: list[tuple[Saved | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(choose_start(prepared), None)]
        except UserError as error:
            outcome = [(None, str(error))]
    dist.broadcast_object_list(outcome, src=0)
    [(start, refusal)] = outcome
    if refusal is not None:
        raise UserError(refusal)
    return start


# --- one rank ----------------------------------------------------------------------------------


def train_rank(prepared: Prepared, start: Saved | None, job: Job | None) -> None:
    """What each process does, once the default process group exists. `job`: what is planned beside
    the run."""
    import torch.distributed as dist

    from fivefold.train.checkpoint import checkpoint
    from fivefold.train.trainer import make_trainer

    run = prepared.run
    memory_before = begin_peak_memory()
    where.doing = "building the model"
    trainer = make_trainer(prepared, run.optimizer, run.precision)
    if start is not None:
        where.doing = f"loading {start.folder.name}"
        checkpoint.load(trainer, start)
    header = _header(prepared, trainer)
    reporter = None
    if dist.get_rank() == 0:
        reporter = _reporter(prepared, start.step if start else 0, header)
    where.doing = ""
    tally = StepAverages()
    try:
        last = _steps(trainer, run, start, reporter, tally)
        peak = peak_memory_bytes()
        outcome = RankOutcome(
            tally.mean(), trainer.ledger, peak - memory_before, peak, _expert_rows(trainer)
        )
        outcomes = gather(outcome)
        if reporter is not None and outcomes is not None:
            reporter.finish(last, max(each.peak_bytes for each in outcomes))
            _show_beside(run, beside(prepared, job, outcomes, max(1, tally.steps)))
    finally:
        if reporter is not None:
            reporter.close()


def _expert_rows(trainer: Trainer) -> list[int]:
    """By MoE layer: the rows that this rank's experts worked on in the last micro-batch."""
    from fivefold.model.moe import MoE

    modules = (m for stage in trainer.stages.values() for m in stage.modules())
    return [module.rows for module in modules if isinstance(module, MoE)]


def _reporter(prepared: Prepared, finished_steps: int, header: str) -> Reporter:
    run, layout = prepared.run, prepared.layout
    peak = None
    if prepared.device == "cuda":
        import torch

        peak = peak_flops_per_s(torch.cuda.get_device_name(), run.precision)
    if run.out is not None:
        text = yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False)
        Path(run.out).mkdir(parents=True, exist_ok=True)
        atomic_write(Path(run.out, "run.yaml"), text)
    print(header, flush=True)
    length = run.data.sequence_length
    return Reporter(
        run,
        finished_steps,
        flops_per_step=run.global_batch
        * length
        * flops_per_token(prepared.config, length, causal=True),
        peak_flops_per_s=None if peak is None else peak * layout.world_size,
    )


def _show_beside(run: Run, report: Report) -> None:
    """Prints the plan beside the run, and writes it where there is a folder."""
    from rich.console import Console

    from fivefold.report.plan_tables import WIDTH
    from fivefold.report.plan_vs_run_tables import beside_report

    # A pipe has no width of its own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print("", *beside_report(report), sep="\n")
    if run.out is not None:
        atomic_write(Path(run.out, "report.json"), json.dumps(report, indent=2) + "\n")


def _steps(
    trainer: Trainer, run: Run, start: Saved | None, reporter: Reporter | None, tally: StepAverages
) -> StepMetrics:
    """Train to the end of the run; returns what the last step did."""
    from fivefold.train.checkpoint import checkpoint
    from fivefold.train.timeline import TimelineRecorder

    watch = TimelineRecorder(run, trainer.axes, finished_steps=start.step if start else 0)

    finished, tokens = (start.step, start.tokens) if start else (0, 0)
    skips = 0
    while True:
        where.step = finished + 1
        began = time.perf_counter()
        rate = learning_rate(finished, run)
        result = trainer.step(finished, rate)
        finished += 1
        tokens += result.tokens
        metrics = _metrics(finished, rate, result, time.perf_counter() - began)
        where.doing = ""
        tally.add(trainer.spans)
        watch.step(finished, trainer.spans)
        if reporter is not None:
            reporter.step(metrics)
        skips = skips + 1 if result.skipped else 0
        if skips == SKIPS_IN_A_ROW:
            raise UserError(_diverged(finished, result, run))
        every = run.checkpoint.every
        if every is not None and (finished % every == 0 or finished == run.steps):
            where.doing = "saving a checkpoint"
            folder = _checkpoints(run)
            checkpoint.save(trainer, finished, tokens, learning_rate(finished, run), folder)
            if reporter is not None:
                checkpoint.prune(folder, run.checkpoint.keep)
            where.doing = ""
        if finished == run.steps:
            return metrics


def _metrics(finished: int, rate: float, result: StepResult, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=finished,
        loss=result.loss,
        balance_loss=result.balance_loss,
        grad_norm=result.grad_norm,
        lr=rate,
        tokens=result.tokens,
        seconds=seconds,
        tokens_per_s=result.tokens / seconds,
        skipped=result.skipped,
    )


def _diverged(finished: int, result: StepResult, run: Run) -> str:
    first = finished - SKIPS_IN_A_ROW + 1
    if result.tokens == 0:
        return f"steps {first} to {finished} had no token to predict: look at the data"
    return (
        f"the gradient was not finite in steps {first} to {finished}, which changed nothing: "
        f"try a smaller optimizer.lr (it is {run.optimizer.lr:g}) or more warm-up "
        f"(lr_schedule.warmup_steps is {run.lr_schedule.warmup_steps})"
    )


# --- what is printed first ---------------------------------------------------------------------


def _header(prepared: Prepared, trainer: Trainer) -> str:
    """What is trained, on what and how. All ranks call this."""
    from fivefold.model.parameters import local_tensor

    run, layout, samples = prepared.run, prepared.layout, prepared.samples
    parameters = [p for stage in trainer.stages.values() for p in stage.parameters()]
    own = sum(local_tensor(p).numel() for p in parameters)
    most, least = _largest(trainer, own), -_largest(trainer, -own)
    counts = count_parameters(prepared.config)
    active = f", {counts.active:,} of them for a token" if counts.active < counts.total else ""
    data, sequence_length = samples.token_file, run.data.sequence_length
    lines = {
        "model": f"{prepared.config.family}, {counts.total:,} parameters{active}",
        "layout": f"{layout}: {layout.describe()}",
        "a rank": f"{most:,} parameters" if most == least else f"{least:,} to {most:,} parameters",
        "device": f"{_device(prepared)}, {BACKENDS[prepared.device]}, {run.precision}",
        "a step": f"{run.global_batch * sequence_length:,} tokens: "
        f"{run.global_batch:,} sequences of {sequence_length:,}",
        "data": f"{data.tokens:,} tokens of {data.documents:,} documents, "
        f"tokenizer {data.tokenizer_spec}",
    }
    return "\n".join(f"{name:8}{text}" for name, text in lines.items())


def _device(prepared: Prepared) -> str:
    if prepared.device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return "cpu" + (" (no CUDA device is visible)" if prepared.run.device == "auto" else "")


def _largest(trainer: Trainer, value: int) -> int:
    """The largest of the ranks' values."""
    import torch

    from fivefold.parallel import comm

    values = torch.tensor(value, device=trainer.device)
    return int(comm.start_all_reduce(values, trainer.axes.world, op="max").wait())
