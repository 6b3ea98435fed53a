"""How fast the planner searches: layouts a second, seconds of a whole search, and memory.

    python -m benchmarks.search_speed [--rounds N] [--json] [--write]

Rates are per second of processor time of one core; the smallest of some rounds counts, for the
machine may do something else. Seconds "in all" are those of `fivefold plan` from the shell, start
of Python included, and memory is that of its process. A full estimate here is step time and memory
by arithmetic, for arrays of layouts; "simulated" ones run the pipeline's table and list the ledger.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from fivefold.cluster.load import load_cluster
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.legality import legal
from fivefold.model.huggingface.presets import load_model
from fivefold.plan.engines import Job
from fivefold.plan.estimate import estimate
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.search.candidates import every_layout
from fivefold.plan.search.constraints import Choices, Constraints
from fivefold.plan.search.search import count_fitting, search
from fivefold.plan.time.step import estimate_time

Row = dict[str, Any]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"

SEARCHES = [  # model, cluster, devices, sequence length, global batch
    ("llama-3.1-405b", "dgx-h100", 16384, 8192, 2048),
    ("deepseek-v3", "hgx-h800", 2048, 4096, 15360),
    ("llama-3.1-405b", "dgx-h100", 131072, 8192, 16384),
    ("mixtral-8x7b", "dgx-h100", 128, 4096, 1024),
]
SCALING = (1024, 4096, 16384, 65536, 131072)
"""Devices for Llama 3.1 405B, with a batch of one sequence for every 8 of them."""
AT_ONCE = 8192
POLL_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the planner searches.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write", action="store_true", help="write the tables of the page too")
    arguments = parser.parse_args()
    result = {
        "search-rates": [rates(*case, arguments.rounds) for case in SEARCHES[:2]],
        "searches": [whole_search(*case, arguments.rounds) for case in SEARCHES],
        "search-scaling": [scaling(devices, arguments.rounds) for devices in SCALING],
    }
    if arguments.write:
        pages.write(PAGE, {name: table(rows) for name, rows in result.items()})
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n\n".join(table(rows) for rows in result.values()))


def job_of(model: str, cluster: str, devices: int, sequence_length: int, global_batch: int) -> Job:
    return Job(load_model(model), load_cluster(cluster, devices), sequence_length, global_batch)


def fastest(rounds: int, do: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of processor time of the fastest of some rounds, and what it returned."""
    best, result = np.inf, None
    for _ in range(rounds):
        start = time.process_time()
        result = do()
        best = min(best, time.process_time() - start)
    return best, result


def rates(
    model: str, cluster: str, devices: int, sequence_length: int, batch: int, rounds: int
) -> Row:
    """Layouts a second through each step, on one core."""
    job = job_of(model, cluster, devices, sequence_length, batch)
    constants = job.cluster.device.constants
    (layouts, *_) = every_layout(job, Choices.read())
    chosen = np.random.default_rng(0).integers(0, len(layouts), AT_ONCE)
    some: LayoutBatch = layouts.take(np.sort(chosen))
    seconds = {
        "legality": lambda: legal(some, job.config, job.sequence_length, devices),
        "memory": lambda: estimate_memory(job, some).peak_bytes,
        "time": lambda: estimate_time(job, some, constants).step,
    }
    measured = {name: fastest(rounds, do)[0] for name, do in seconds.items()}
    filtered_s, (candidates, _) = fastest(1, lambda: count_fitting(job, Constraints()))
    layout = some[0]
    simulated_s, _ = fastest(rounds, lambda: estimate(job, layout))
    return {
        "model": model,
        "devices": devices,
        "legality_layouts_per_s": AT_ONCE / measured["legality"],
        "memory_layouts_per_s": AT_ONCE / measured["memory"],
        "filters_layouts_per_s": candidates / filtered_s,
        "full_estimates_per_s": AT_ONCE / (measured["memory"] + measured["time"]),
        "simulated_estimates_per_s": 1 / simulated_s,
    }


def whole_search(
    model: str, cluster: str, devices: int, sequence_length: int, batch: int, rounds: int
) -> Row:
    """One search, in this process and from the shell."""
    job = job_of(model, cluster, devices, sequence_length, batch)
    cpu_s, found = fastest(rounds, lambda: search(job))
    command = [sys.executable, "-m", "fivefold", "plan", model, "--cluster", cluster]
    command += ["--gpus", str(devices), "--seq", str(sequence_length)]
    command += ["--global-batch", str(batch), "--json"]
    shell = [shell_run(command) for _ in range(rounds)]
    return {
        "model": model,
        "cluster": cluster,
        "devices": devices,
        "layouts": found.counted,
        "fit": found.fit,
        "skipped": found.skipped,
        "search_s": cpu_s,
        "layouts_per_s": found.counted / cpu_s,
        "in_all_s": min(seconds for seconds, _ in shell),
        "memory_mb": max(peak for _, peak in shell) / 1e6,
        "best": str(found.best[0].layout) if found.best else "nothing fits",
    }


def shell_run(command: list[str]) -> tuple[float, int]:
    """Seconds and peak bytes of a command in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        time.sleep(POLL_S)
    return time.perf_counter() - start, peak


def peak_bytes(pid: int) -> int:
    """What a running process has had in memory at most. Not its resource usage, which starts with
    what this process had when it forked."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(kilobytes[0]) * 1024 if kilobytes else 0


def scaling(devices: int, rounds: int) -> Row:
    """The same model on more devices: what a layout costs stays the same."""
    job = job_of("llama-3.1-405b", "dgx-h100", devices, 8192, devices // 8)
    seconds, found = fastest(rounds, lambda: search(job))
    filters_s, _ = fastest(rounds, lambda: count_fitting(job, Constraints()))
    return {
        "model": "llama-3.1-405b",
        "devices": devices,
        "layouts": found.legal,
        "filters_us_per_layout": filters_s / found.legal * 1e6,
        "search_s": seconds,
    }


def table(rows: list[Row]) -> str:
    """Markdown."""
    names = list(rows[0])
    lines = [[name.replace("_", " ") for name in names], ["---"] * len(names)]
    lines += [[shown(row[name]) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
