"""`fivefold train`: from a run file to the last step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from fivefold.errors import UserError
from fivefold.files import atomic_write
from fivefold.model.counts import flops_per_token
from fivefold.train.data import Samples, data_hash
from fivefold.train.failures import status
from fivefold.train.launch import launch
from fivefold.train.learning_rate import learning_rate
from fivefold.train.metrics import (
    Reporter,
    StepMetrics,
    begin_peak_memory,
    check_tensorboard,
    peak_flops_per_s,
    peak_memory_bytes,
)
from fivefold.train.outcome import RankOutcome, RunOutcome, StepAverages
from fivefold.train.prepare import Prepared, plan_run, prepare_run, prepare_samples
from fivefold.train.runfile import Run
from fivefold.train.torchrun import describe_here, join, joined_by_torchrun

if TYPE_CHECKING:
    from fivefold.train.checkpoint import Saved
    from fivefold.train.timeline import WriteTimeline
    from fivefold.train.trainer import StepResult, Trainer

MAX_SKIPS = 10
"""Consecutive steps without a finite gradient after which a run stops: it will not recover."""


def train(run: Run, write_timeline: WriteTimeline | None = None) -> RunOutcome | None:
    """Train as a run file says, in local processes, or as one of those that torchrun started.

    `write_timeline` writes the file that `run.timeline` names; without it none is written. Returns
    what all ranks measured; None if no step was left to do, and under torchrun on ranks other than
    0. Raises UserError for a run that cannot start (before a process has started and anything has
    been written), WorkerFailure when one of its processes fails.
    """
    check_tensorboard(run)
    if joined_by_torchrun():
        return _train_joined(run, write_timeline)
    from fivefold.train.start import choose_start

    prepared = prepare_run(run)
    start = choose_start(prepared)
    if start is not None and start.step >= run.steps:
        return None
    with _cursor_restored():
        outcomes = launch(
            train_rank,
            prepared.layout.world_size,
            prepared,
            start,
            write_timeline,
            device=prepared.device,
            timeout_s=run.timeout_s,
        )
    return outcomes[0]


@contextmanager
def _cursor_restored() -> Iterator[None]:
    """A bar hides the cursor of the terminal; a worker that is killed cannot bring it back."""
    try:
        yield
    finally:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)


# --- under torchrun ----------------------------------------------------------------------------


def _train_joined(run: Run, write_timeline: WriteTimeline | None) -> RunOutcome | None:
    import torch.distributed as dist

    from fivefold.train.start import agree_on_start

    plan = plan_run(run)
    join(plan.device, run.timeout_s)
    rank, outcome = dist.get_rank(), None
    try:
        prepared = Prepared(**vars(plan), samples=_prepare_once_per_node(run))
        start = agree_on_start(prepared)
        if start is None or start.step < run.steps:
            outcome = train_rank(prepared, start, write_timeline)
        dist.destroy_process_group()
    except UserError:
        raise
    except Exception as error:
        raise describe_here(rank, error) from error
    return outcome


def _prepare_once_per_node(run: Run) -> Samples:
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


# --- one rank ----------------------------------------------------------------------------------


def train_rank(
    prepared: Prepared, start: Saved | None, write_timeline: WriteTimeline | None = None
) -> RunOutcome | None:
    """What each process does once the default process group exists; rank 0 has the outcome."""
    import torch.distributed as dist

    from fivefold.train import checkpoint
    from fivefold.train.header import header
    from fivefold.train.timeline import TimelineRecorder
    from fivefold.train.trainer import make_trainer

    run, finished = prepared.run, start.step if start else 0
    memory_before = begin_peak_memory()
    status.doing = "building the model"
    trainer = make_trainer(prepared, run.optimizer, run.precision)
    if start is not None:
        status.doing = f"loading {start.folder.name}"
        checkpoint.load(trainer, start)
    first_lines = header(prepared, trainer)
    reporter = _reporter(prepared, finished, first_lines) if dist.get_rank() == 0 else None
    status.doing = ""
    averages = StepAverages()
    recorder = TimelineRecorder(run, trainer.axes, finished, write_timeline)
    try:
        for metrics in _steps(trainer, run, start):
            averages.add(trainer.step_trace)
            recorder.step(metrics.step, trainer.step_trace)
            if reporter is not None:
                reporter.step(metrics)
        peak = peak_memory_bytes()
        ranks = _gather(
            RankOutcome(
                averages.mean(), trainer.ledger, peak - memory_before, peak, _expert_rows(trainer)
            )
        )
        if reporter is None or ranks is None:
            return None
        reporter.finish(max(each.peak_bytes for each in ranks))
        return RunOutcome(prepared, ranks, max(1, averages.steps))
    finally:
        if reporter is not None:
            reporter.close()


def _gather(outcome: RankOutcome) -> list[RankOutcome] | None:
    """The outcomes of all ranks, on rank 0. All ranks call this."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(outcome, everyone)
    return cast("list[RankOutcome] | None", everyone)


def _expert_rows(trainer: Trainer) -> list[int]:
    """By MoE layer: the rows that this rank's experts computed in the last micro-batch."""
    from fivefold.model.moe import MoE

    modules = (m for stage in trainer.stages.values() for m in stage.modules())
    return [int(module.rows) for module in modules if isinstance(module, MoE)]


def _reporter(prepared: Prepared, finished_steps: int, header: str) -> Reporter:
    run, layout, length = prepared.run, prepared.layout, prepared.run.data.sequence_length
    peak = None
    if prepared.device == "cuda":
        import torch

        peak = peak_flops_per_s(torch.cuda.get_device_name(), run.precision)
    if run.out is not None:
        text = yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False)
        Path(run.out).mkdir(parents=True, exist_ok=True)
        atomic_write(Path(run.out, "run.yaml"), text)
    print(header, flush=True)
    flops = flops_per_token(prepared.config, length, causal=True)
    return Reporter(
        run,
        finished_steps,
        flops_per_step=run.global_batch * length * flops,
        peak_flops_per_s=None if peak is None else peak * layout.world_size,
    )


def _steps(trainer: Trainer, run: Run, start: Saved | None) -> Iterator[StepMetrics]:
    """Train to the end of the run. A checkpoint is saved once its step has been reported."""
    from fivefold.train import checkpoint
    from fivefold.train.start import checkpoints

    finished, tokens = (start.step, start.tokens) if start else (0, 0)
    skips = 0
    while finished < run.steps:
        status.step = finished + 1
        began = time.perf_counter()
        rate = learning_rate(finished, run)
        result = trainer.step(finished, rate)
        finished += 1
        tokens += result.tokens
        seconds = time.perf_counter() - began
        status.doing = ""
        yield StepMetrics(finished, rate, seconds, result.tokens / seconds, **asdict(result))
        skips = skips + 1 if result.skipped else 0
        if skips == MAX_SKIPS:
            raise UserError(_diverged(finished, result, run))
        every = run.checkpoint.every
        if every is not None and (finished % every == 0 or finished == run.steps):
            status.doing = "saving a checkpoint"
            folder = checkpoints(run)
            checkpoint.save(trainer, finished, tokens, learning_rate(finished, run), folder)
            if trainer.axes.rank == 0:
                checkpoint.prune(folder, run.checkpoint.keep)
            status.doing = ""


def _diverged(finished: int, result: StepResult, run: Run) -> str:
    first = finished - MAX_SKIPS + 1
    if result.tokens == 0:
        return f"steps {first} to {finished} had no token to predict: check the data"
    return (
        f"the gradient was not finite in steps {first} to {finished}, which changed nothing: "
        f"try a smaller optimizer.lr (it is {run.optimizer.lr:g}) or more warm-up "
        f"(lr_schedule.warmup_steps is {run.lr_schedule.warmup_steps})"
    )
