"""Predicted against published peak memory: `python -m benchmarks.memory_rows [--rows]`.

A source prints one of three figures, by the rule in PRINTED. A cluster (rows of one model on one
GPU) is counted once, by the median of its rows' absolute errors.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measurements import MEASUREMENTS, Case, read
from fivefold.layout.many import Layouts
from fivefold.layout.notation import Layout
from fivefold.plan.job import ENGINES
from fivefold.plan.memory import FITS, Memory, estimate_memory

ALLOCATED: Callable[[Memory], np.ndarray] = lambda memory: memory.allocated_bytes  # noqa: E731
RESERVED: Callable[[Memory], np.ndarray] = lambda memory: memory.reserved_bytes  # noqa: E731
DEVICE: Callable[[Memory], np.ndarray] = lambda memory: memory.peak_bytes  # noqa: E731

PRINTED = {
    "SIMUMAX": ALLOCATED,  # "max_allocated over ranks"
    "ZB": ALLOCATED,  # torch's counter, in GiB
    "DGXC": ALLOCATED,  # NeMo's peak_memory_usage: max_memory_allocated, in bytes
    "NANO": RESERVED,  # not stated; chosen by fit, see HABITS
    "TITAN": RESERVED,  # torchtitan logs max_reserved
    "BLOOM": DEVICE,  # nvidia-smi
    "INTERN": DEVICE,  # not stated; whole GB
}
"""What a source prints; others are taken to print what nvidia-smi shows."""


FSDP = ENGINES["fsdp"]
HABITS = {
    "TITAN": FSDP,
    "BLOOM": replace(ENGINES["deepspeed"], flash_attention=False),
    # Before fused losses and Transformer Engine.
    "ZB": replace(ENGINES["megatron"], flash_attention=False, loss_bytes=6),
    # Fitted, the best of 120 combinations of these habits and of the printed figure on the rows of
    # this source; its code has 10 bytes a logit alive for a moment. So its errors are in-sample.
    # Gradients in 16 bits, in DDP's buckets, and accumulated in fp32; eager activation functions.
    "NANO": replace(
        ENGINES["megatron"],
        fused_kernels=False,
        gradient_bytes=2 + 2 + 4,
        loss_bytes=6,
        placeholder_gradients=False,
        keeps_stage_outputs=True,
    ),
    # Fitted to the slope over GPUs of this source's rows, 26 bytes a parameter, which would be that
    # the optimizer step copies gradients flat in 16 bits and in fp32, and runs for-each AdamW.
    "INTERN": replace(ENGINES["fsdp"], gradient_bytes=2, step_bytes=12, keeps_gathered=False),
}
"""Memory habits of the programs of sources, where they are not those of `Case.job.engine`."""


def with_habits(case: Case) -> Case:
    """The case as its source's program would hold it in memory."""
    job, choices, measured = case.job, case.choices, case.memory_bytes
    engine = HABITS.get(case.source, job.engine)
    if case.source == "BLOOM" and case.notes.find("BF16 optimizer") >= 0:
        engine = replace(engine, gradient_bytes=2 + 4)  # accumulates in fp32
    if case.source == "ZB":  # GiB and dropout are not stated: inferred from the four figures
        job = replace(job, config=replace(job.config, dropout=True))
        measured = None if measured is None else measured / 1e9 * 2**30
    if case.source == "TITAN":  # as many micro-batches as pipeline ranks, its default
        choices = tuple(_by_rank(layout, job.global_batch) for layout in choices)
    return replace(case, job=replace(job, engine=engine), choices=choices, memory_bytes=measured)


def _by_rank(layout: Layout, global_batch: int) -> Layout:
    if layout.pp == 1:
        return layout
    local = global_batch // layout.dp
    return replace(layout, micro_batch=local // layout.pp, accumulation=layout.pp)


def predict(case: Case) -> tuple[Layout, float]:
    """The layout that is meant, and the figure its source would print, in bytes.

    Of the layouts that a row leaves open, it is the first, which recomputes least, that fits.
    """
    memory = estimate_memory(case.job, Layouts.of(case.choices))
    fits = memory.peak_bytes <= FITS * case.job.cluster.device.memory_bytes
    index = int(np.argmax(fits)) if np.any(fits) else len(fits) - 1
    return case.choices[index], float(PRINTED.get(case.source, DEVICE)(memory)[index])


def table(name: str, errors: Sequence[tuple[str, float]]) -> str:
    """One line: rows, clusters, median and 90th percentile of |error|, and bias, in percent."""
    clusters = defaultdict(list)
    for cluster, error in errors:
        clusters[cluster].append(error)
    once = [float(np.median(np.abs(each))) for each in clusters.values()]
    bias = float(np.median([np.median(each) for each in clusters.values()]))
    numbers = (np.median(once), np.percentile(once, 90), bias)
    figures = " ".join(f"{100 * number:7.1f}" for number in numbers)
    return f"{name:10} {len(errors):5} {len(once):9} {figures}"


def main(arguments: list[str]) -> None:
    paths = [Path(each) for each in arguments if not each.startswith("-")]
    cases, _ = read(paths[0] if paths else MEASUREMENTS)
    by_source = defaultdict(list)
    for case in map(with_habits, cases):
        if case.memory_bytes is None:
            continue
        layout, predicted = predict(case)
        error = predicted / case.memory_bytes - 1
        by_source[case.source].append((case.cluster, error))
        if "--rows" in arguments:
            gb = f"{case.memory_bytes / 1e9:6.1f} {predicted / 1e9:6.1f} {100 * error:6.1f} %"
            print(f"{case.id:12} {gb}  {layout}  [{case.cluster}]")
    print(f"{'source':10} {'rows':>5} {'clusters':>9} {'median':>7} {'p90':>7} {'bias':>7}")
    for source, errors in by_source.items():
        print(table(source, errors))
    print(table("all", [error for errors in by_source.values() for error in errors]))


if __name__ == "__main__":
    main(sys.argv[1:])
