"""Processor time of a training step in each split, against one process, and that against PyTorch.

    python benchmarks/throughput.py [--steps N] [--rounds N] [--only NAME ...] [--json]

All layouts train the same model on the same samples. They take turns, round after round, so that
what else the machine does falls on all of them; the figures are medians over rounds of ratios
within a round, with the smallest and the largest. Processor time is that of all threads of all
ranks, user and system. On a machine with fewer cores than ranks tokens/s says little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the packages importable
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.plain import PlainLoop
from benchmarks.random_tokens import random_tokens
from fivefold.layout import legality
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.notation import parse, stated
from fivefold.malloc_env import reexec_with_malloc_settings
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.comm import Recorder
from fivefold.train.data.samples import Samples
from fivefold.train.data.tokens import TokenFile
from fivefold.train.launch import launch
from fivefold.train.runfile import Optimizer
from fivefold.train.trainer import Trainer

SEQUENCE_LENGTH, GLOBAL_BATCH, MICRO_BATCH = 256, 8, 2
DENSE = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
MIXTURE = DENSE | {  # a token meets as many weights as in the dense model
    "model_type": "mixtral",
    "intermediate_size": 352,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    model: dict
    layout: str | None  # None: the plain loop
    against: str | None = None  # the case that its time is divided by
    target: float | None = None  # that ratio should be at most this
    best_peer: str = ""  # the best ratio of another tool to its own one process


ONE, PLAIN, ONE_MOE, PLAIN_MOE = "one process", "plain PyTorch", "MoE one process", "MoE plain"
CASES = [
    Case(PLAIN, DENSE, None),
    Case(ONE, DENSE, "", PLAIN, 1.05),
    Case("dp2", DENSE, "dp2", ONE, 1.0, "0.95-1.04 DeepSpeed"),
    Case("zero3", DENSE, "dp2 zero3", ONE, 1.3, "1.38 torchtitan"),
    Case("tp2", DENSE, "tp2", ONE, 1.2, "1.28-1.39 Megatron Core"),
    Case("tp2 sp", DENSE, "tp2 sp", ONE, 1.3, "1.67 Megatron Core"),
    Case("pp2", DENSE, "pp2", ONE, 1.02, "1.01 DeepSpeed"),
    Case("ulysses2", DENSE, "ulysses2", ONE, 1.1),
    Case("ring2", DENSE, "ring2", ONE, 1.3, "1.79 picotron"),
    Case(PLAIN_MOE, MIXTURE, None),
    Case(ONE_MOE, MIXTURE, "", PLAIN_MOE),
    Case("ep2", MIXTURE, "dp2 ep2", ONE_MOE, 1.0, "1.00 Megatron Core"),
    Case("first run", MIXTURE, "dp2 tp2 sp pp2 ep2", ONE_MOE, 1.8),
]


@dataclass(frozen=True)
class Measurement:
    """One turn of one case."""

    cpu_s: float  # a step, summed over ranks
    wall_s: float  # a step
    system_s: float  # of cpu_s what the kernel took
    gloo_s: float  # of cpu_s what gloo's own threads took
    page_faults: float  # a step, summed over ranks


def measure(case: Case, tokens: TokenFile, warm_up: int, steps: int) -> Measurement:
    """Start the case's processes, let them take `warm_up` steps and measure `steps` more."""
    ranks = parse(case.layout).world_size if case.layout else 1
    results = launch(_work, ranks, case, tokens, warm_up, steps)
    cpu, wall, *others = (np.array(results) / steps).T
    return Measurement(cpu.sum(), wall.max(), *(each.sum() for each in others))


def _work(case: Case, tokens: TokenFile, warm_up: int, steps: int) -> list[float]:
    """What one rank uses, in the order of Measurement."""
    step = _make(case, tokens)
    for number in range(warm_up):
        step(number, 1e-3)
    dist.barrier()
    before = _usage()
    for number in range(warm_up, warm_up + steps):
        step(number, 1e-3)
    return [after - start for start, after in zip(before, _usage(), strict=True)]


def _usage() -> list[float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    other_threads = cpu - time.thread_time()
    return [cpu, time.perf_counter(), usage.ru_stime, other_threads, usage.ru_minflt]


def _make(case: Case, tokens: TokenFile) -> Callable[[int, float], object]:
    """What does a step of the case, given its number and learning rate."""
    config = load_config(case.model)
    samples = Samples(tokens, SEQUENCE_LENGTH, GLOBAL_BATCH, seed=0)
    if case.layout is None:
        return PlainLoop(config, samples, MICRO_BATCH).step
    text = f"{case.layout} mb{MICRO_BATCH}"
    layout = with_global_batch(parse(text), GLOBAL_BATCH, stated(text))
    legality.check(layout, config, SEQUENCE_LENGTH)
    trainer = Trainer(
        config,
        layout,
        samples,
        Optimizer(lr=1e-3),
        "fp32",
        seed=0,
        rank=dist.get_rank(),
        recorder=Recorder(),
        device=torch.device("cpu"),
    )
    return trainer.step


def start_up_s(tokens: TokenFile) -> float:
    """Seconds from the command to 8 workers that are ready to step, in a fresh interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as fresh:
        start = time.time()
        return fresh.submit(_ready_at, tokens).result() - start


def _ready_at(tokens: TokenFile) -> float:
    return max(launch(_make_and_tell, 8, CASES[-1], tokens))


def _make_and_tell(case: Case, tokens: TokenFile) -> float:
    _make(case, tokens)
    return time.time()


def run(cases: list[Case], rounds: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        count = 100 * GLOBAL_BATCH * SEQUENCE_LENGTH
        tokens = random_tokens(Path(folder), DENSE["vocab_size"], count)
        measured: dict[str, list[Measurement]] = {case.name: [] for case in cases}
        for number in range(rounds):
            for case in cases:
                print(f"round {number + 1} of {rounds}: {case.name}", file=sys.stderr)
                measured[case.name].append(measure(case, tokens, warm_up=2, steps=steps))
        start_up = start_up_s(tokens)
    rows = [summary(case, measured) for case in cases]
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "start_up_s": start_up,
        "rows": rows,
    }


def summary(case: Case, measured: dict[str, list[Measurement]]) -> dict:
    """A line of the table: medians over rounds, and the ratio to the case it is held against."""
    own = measured[case.name]
    row = {"name": case.name, "layout": case.layout}
    for field in asdict(own[0]):
        row[field] = statistics.median(getattr(m, field) for m in own)
    row["tokens_per_s"] = GLOBAL_BATCH * SEQUENCE_LENGTH / row["wall_s"]
    if case.against in measured:
        pairs = zip(own, measured[case.against], strict=True)
        ratios = sorted(mine.cpu_s / theirs.cpu_s for mine, theirs in pairs)
        row["ratio"], row["ratio_min"], row["ratio_max"] = (
            statistics.median(ratios),
            ratios[0],
            ratios[-1],
        )
        row |= {"against": case.against, "target": case.target, "best_peer": case.best_peer}
    return row


def as_markdown(result: dict) -> str:
    lines = [
        "| case | CPU s/step | of it kernel | of it gloo threads | page faults | tokens/s "
        "| ratio (min..max) | to | target | best peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        ratio = against = target = peer = "-"
        if "ratio" in row:
            ratio = f"{row['ratio']:.3f} ({row['ratio_min']:.3f}..{row['ratio_max']:.3f})"
            against, peer = row["against"], row["best_peer"] or "-"
            target = "-" if row["target"] is None else f"{row['target']:.2f}"
        lines.append(
            f"| {row['name']} | {row['cpu_s']:.3f} | {row['system_s']:.3f} "
            f"| {row['gloo_s']:.3f} | {row['page_faults']:,.0f} | {row['tokens_per_s']:,.0f} "
            f"| {ratio} | {against} | {target} | {peer} |"
        )
    lines.append("")
    lines.append(f"8 workers ready to step {result['start_up_s']:.1f} s after the command.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="timed steps a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases to run")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.only or c.name in arguments.only]
    result = run(cases, arguments.rounds, arguments.steps)
    print(json.dumps(result, indent=2) if arguments.json else as_markdown(result))


if __name__ == "__main__":
    reexec_with_malloc_settings()
    main()
