"""Step time and memory of the runtime on one GPU, beside what the planner says of that GPU.

    python benchmarks/gpu.py                    calibrates the GPU, trains, prints a table
    python benchmarks/gpu.py --cluster X.yaml   with the file of an earlier calibration
    python benchmarks/gpu.py --json             the same, machine-readable
    python benchmarks/gpu.py --write            puts the table into docs/accuracy.md

Each case trains a few steps of a published model in bf16 with the real trainer in one process, on
random tokens, with as many of its layers as the planner says fit into the GPU. The step is the
median of those after the warm-up; the memory is the peak of PyTorch's allocator
(torch.cuda.max_memory_allocated). The plan is that of one layout with the engine "fivefold" and
the calibrated cluster; nothing of it is fitted to these steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the packages importable
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

from benchmarks import pages
from fivefold.cluster.cluster import Cluster
from fivefold.cluster.load import load_cluster
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import PUBLISHED
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import Estimate, estimate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
ROOM = 0.85
"""Share of the GPU's memory that a case may take by the plan, since the plan is what is tested."""
FEWEST_LAYERS = 2
WARM_UP, STEPS = 3, 8
OUTSIDE = ("overhead", "reserve")
"""Kinds of memory that the allocator's peak does not count."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str  # of the published ones
    sequence_length: int
    layout: str  # of one process

    @property
    def micro_batches(self) -> Layout:
        return parse(self.layout, 1)


CASES = [
    Case(model, 4096, f"mb{micro_batch} ga4{recompute}")
    for model, micro_batch in (("llama-3.2-1b", 2), ("llama-3.1-8b", 1), ("qwen3-30b-a3b", 1))
    for recompute in ("", " recompute=full")
]


@dataclass(frozen=True)
class Row:
    """What was measured of a case, and what was planned."""

    model: str
    layers: int
    layout: str
    sequence_length: int
    measured_s: float
    planned_s: float
    measured_bytes: float
    planned_bytes: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative, of the time and of the memory."""
        return (
            self.planned_s / self.measured_s - 1,
            self.planned_bytes / self.measured_bytes - 1,
        )


def with_layers(model: str, layers: int) -> ModelConfig:
    """A published model with fewer layers."""
    data = json.loads((PUBLISHED / f"{model}.json").read_text(encoding="utf-8"))
    return load_config(data | {"num_hidden_layers": layers})


def published_layers(model: str) -> int:
    return load_config(PUBLISHED / f"{model}.json").num_layers


def plan(case: Case, layers: int, cluster: Cluster) -> Estimate:
    """What the planner says of a case with so many layers."""
    layout = case.micro_batches
    job = Job(
        with_layers(case.model, layers),
        cluster,
        case.sequence_length,
        layout.global_batch,
        engine=ENGINES["fivefold"],
    )
    return estimate(job, layout)


def most_layers(case: Case, cluster: Cluster) -> int | None:
    """The most layers with which a case fits into `ROOM`; None if the fewest do not."""
    room = ROOM * cluster.device.memory_bytes
    for layers in range(published_layers(case.model), FEWEST_LAYERS - 1, -1):
        if plan(case, layers, cluster).peak_memory_bytes <= room:
            return layers
    return None


def allocated_bytes(planned: Estimate) -> float:
    """The allocator's peak, by the plan."""
    return sum(size for kind, size in planned.memory_bytes.items() if kind not in OUTSIDE)


def train(case: Case, layers: int, folder: str, device: str) -> tuple[list[float], float]:
    """Seconds of each step after the warm-up, and the allocator's peak in bytes (0 on a CPU).
    Runs in a worker of `launch`."""
    import torch

    from benchmarks.random_tokens import random_tokens
    from fivefold.parallel.comm import Recorder
    from fivefold.train.data.samples import Samples
    from fivefold.train.runfile import Optimizer
    from fivefold.train.trainer import Trainer

    config, layout = with_layers(case.model, layers), case.micro_batches
    length, steps = case.sequence_length, WARM_UP + STEPS
    count = steps * layout.global_batch * length + 1
    samples = Samples(
        random_tokens(Path(folder), config.vocab_size, count), length, layout.global_batch, seed=0
    )
    here = torch.device(device, 0) if device == "cuda" else torch.device(device)
    trainer = Trainer(
        config,
        layout,
        samples,
        Optimizer(lr=1e-4),
        "bf16",
        seed=0,
        rank=0,
        recorder=Recorder(),
        device=here,
    )
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        trainer.step(step, 1e-4)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return seconds[WARM_UP:], float(peak)


def measure(cases: Sequence[Case], cluster: Cluster) -> list[Row]:
    """The cases one after the other, each in a process of its own."""
    from fivefold.train.launch import launch

    rows = []
    for case in cases:
        layers = most_layers(case, cluster)
        if layers is None:
            print(f"{case.model} {case.layout}: does not fit", file=sys.stderr)
            continue
        print(f"{case.model} with {layers} layers, {case.layout}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            [(seconds, peak)] = launch(train, 1, case, layers, folder, "cuda", device="cuda")
        planned = plan(case, layers, cluster)
        rows.append(
            Row(
                case.model,
                layers,
                case.layout,
                case.sequence_length,
                statistics.median(seconds),
                planned.step_time_s,
                peak,
                allocated_bytes(planned),
            )
        )
    return rows


def as_markdown(rows: Sequence[Row], cluster: Cluster) -> str:
    """The table, with the medians of the errors below it."""
    lines = [
        "| model | layers | layout | sequence | step, measured | planned | error "
        "| allocated, measured | planned | error |",
        "| --- " * 10 + "|",
    ]
    for row in rows:
        time_error, memory_error = row.errors
        cells = [row.model, str(row.layers), f"`{row.layout}`", f"{row.sequence_length:,}"]
        cells += [f"{row.measured_s:.3f} s", f"{row.planned_s:.3f} s", f"{time_error:+.1%}"]
        cells += [f"{row.measured_bytes / 1e9:.1f} GB", f"{row.planned_bytes / 1e9:.1f} GB"]
        lines.append("| " + " | ".join([*cells, f"{memory_error:+.1%}"]) + " |")
    of_time, of_memory = (statistics.median(abs(row.errors[i]) for row in rows) for i in (0, 1))
    lines += [
        "",
        f"On one {cluster.device.name}, calibrated. The median error is {of_time:.1%} of the "
        f"step time and {of_memory:.1%} of the allocated memory.",
    ]
    return "\n".join(lines)


def gpu_cluster(path: str | None) -> Cluster:
    """The cluster of a file, or of this GPU, which is calibrated for it."""
    if path is not None:
        return load_cluster(path, 1)
    from fivefold.calibrate.run import calibrate

    with tempfile.TemporaryDirectory() as folder:
        done = calibrate(str(Path(folder, "gpu.yaml")), 1, quick=False)
        assert done is not None
        return load_cluster(str(done.path), 1)


def as_json(rows: Sequence[Row], cluster: Cluster) -> dict[str, Any]:
    return {"device": cluster.device.name, "rows": [asdict(row) for row in rows]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cluster", metavar="X.yaml", help="the file of an earlier calibration")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/accuracy.md")
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("error: this benchmark trains on a CUDA GPU, and none is visible", file=sys.stderr)
        return 2
    cluster = gpu_cluster(arguments.cluster)
    rows = measure(CASES, cluster)
    if not rows:
        print("error: no case fits into the memory of this GPU", file=sys.stderr)
        return 2
    table = as_markdown(rows, cluster)
    print(json.dumps(as_json(rows, cluster), indent=2) if arguments.json else table)
    if arguments.write:
        pages.write(PAGE, {"gpu": table})
    return 0


if __name__ == "__main__":
    sys.exit(main())
