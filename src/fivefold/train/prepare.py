"""From a run file to all that a training process needs. A run is rejected here, before a process
has started and before anything but the cache of tokens has been written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from fivefold.errors import UserError
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.legality import check
from fivefold.layout.notation import Layout, parse, stated
from fivefold.model.config import ModelConfig, require_trainable
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.pipeline import schedules
from fivefold.parallel.pipeline.table_file import with_table
from fivefold.train.data import Samples, open_tokenizer
from fivefold.train.data import prepare as prepare_tokens
from fivefold.train.data.tokenizer import bpe_vocab_size
from fivefold.train.data.tokens import Progress
from fivefold.train.launch import check_machine
from fivefold.train.runfile import Data, Run
from fivefold.train.torchrun import (
    check_world_size,
    joined_by_torchrun,
    processes_of_torchrun,
)

PATIENCE_S = 1.0
"""Seconds of tokenizing before a progress bar is shown."""


@dataclass(frozen=True)
class Plan:
    """What is trained, how it is split and on what device: a run checked with its model and this
    machine."""

    run: Run
    config: ModelConfig
    layout: Layout  # with the accumulation that the global batch asks for
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True)
class Prepared(Plan):
    """A plan and its data. Picklable: a worker maps the token file itself."""

    samples: Samples


def prepare_run(run: Run) -> Prepared:
    """Check a run and make its data ready, tokenizing them if that has not been done before.

    Shows a progress bar on stderr while text is tokenized. Raises UserError for whatever cannot be
    run.
    """
    return Prepared(**vars(plan_run(run)), samples=prepare_samples(run))


def plan_run(run: Run) -> Plan:
    """`prepare_run` without the data: quick, and writes nothing. Under torchrun the layout may
    omit dp, which follows from the number of processes."""
    world_size = processes_of_torchrun() if joined_by_torchrun() else None
    if world_size is not None and {"dp", "edp"} & stated(run.layout):
        check_world_size(parse(run.layout).world_size)
    config = load_config(run.model)
    require_trainable(config)
    stated_layout = with_table(parse(run.layout, world_size))
    layout = with_global_batch(stated_layout, run.global_batch, stated(run.layout))
    check(layout, config, run.data.sequence_length, world_size)
    schedules.build(layout.schedule, layout.pp, layout.vpp, layout.accumulation)
    device = _choose_device(run.device)
    if world_size is None:
        check_machine(layout.world_size, device)
    _check_vocabulary(run.data, config)
    return Plan(run, config, layout, device)


def prepare_samples(run: Run) -> Samples:
    """The samples of a run; raises UserError for missing files and too little text."""
    data = run.data
    with _progress_bar() as progress:
        token_file = prepare_tokens(
            data.files, data.text_field, data.tokenizer, data.eos_token, data.cache, progress
        )
    return Samples(
        token_file, data.sequence_length, run.global_batch, run.seed, data.isolate_documents
    )


def _choose_device(wanted: str) -> str:
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UserError("device is cuda and no CUDA device is visible: use device cpu or auto")
    return "cpu"


def _check_vocabulary(data: Data, config: ModelConfig) -> None:
    """Every token must have a row in the embedding; rows without a token are allowed."""
    size = bpe_vocab_size(data.tokenizer)
    if size is None:
        size = open_tokenizer(data.tokenizer, data.eos_token).vocab_size
    if size > config.vocab_size:
        raise UserError(
            f"tokenizer {data.tokenizer!r} has {size:,} tokens and the model's vocab_size is "
            f"{config.vocab_size:,}: set vocab_size to {size} or more, or use a smaller tokenizer"
        )


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Shows on stderr how much text has been tokenized: a bar, or one line if stderr is not a
    terminal. Nothing is shown if it takes less than `PATIENCE_S`."""
    console = Console(stderr=True)
    bar = rich.progress.Progress(
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("tokenizing")
    started = time.monotonic()
    shown = False

    def progress(done: int, total: int) -> None:
        nonlocal shown
        bar.update(task, completed=done, total=total)
        if shown or time.monotonic() - started < PATIENCE_S:
            return
        shown = True
        if console.is_terminal:
            bar.start()
        else:
            print(f"tokenizing {total / 1e6:,.1f} MB of text", file=sys.stderr)

    try:
        yield progress
    finally:
        if bar.live.is_started:  # else it would print an empty line
            bar.stop()
