"""Plans against runs on this very machine: is the plan right about the clock?

    python benchmarks/closed_loop.py                       measures the machine, then draws and runs
    python benchmarks/closed_loop.py --cluster FILE.yaml   of `fivefold calibrate`: measures nothing
    python benchmarks/closed_loop.py --json
    python benchmarks/closed_loop.py --write               docs/accuracy.md and its plot

Layouts of 1 to 8 processes are drawn from all that are legal, so that every split has its share,
with those that the planner likes best for 2, 4 and 8 processes. `fivefold train` runs each for
a few steps; what it writes into its report is compared. All processes share the cores, and whatever
else runs on the machine is in the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the packages importable
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

import numpy as np

from benchmarks import pages
from benchmarks.plots import predicted_beside_measured
from benchmarks.throughput import DENSE, MIXTURE
from fivefold.calibrate.run import calibrate
from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.files import atomic_write
from fivefold.layout.legality import violations
from fivefold.layout.notation import Layout, parse
from fivefold.malloc_env import reexec_with_malloc_settings
from fivefold.model.huggingface.load import load_config
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.search.candidates import every_layout
from fivefold.plan.search.constraints import Choices, Constraints
from fivefold.plan.search.search import search
from fivefold.train.runfile import Data, Optimizer, Run
from fivefold.verify.plan_vs_run import train_and_compare

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURE = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "figures" / "closed-loop.svg"

SEQUENCE_LENGTH, GLOBAL_BATCH = 256, 8
MODELS = {"dense": DENSE, "MoE": MIXTURE}
PROCESSES = (1, 2, 2, 3, 4, 4, 6, 8, 8)
"""Numbers of processes, as often as they are drawn."""
FAVOURED = (2, 4, 8)
"""Numbers of processes of which the planner's favourites are run as well."""
LIKED = 3
"""So many of the planner's best, for so many processes."""
FIXES = (
    *("", "tp2", "tp2 sp", "tp4", "pp2", "pp3", "pp4", "zero1", "zero2", "zero3", "ulysses2"),
    *("ulysses4", "ring2", "ring4", "ulysses2 ring2", "ep2", "ep4", "recompute=full", "vpp2"),
    *("schedule=gpipe", "schedule=zb-h1", "schedule=zb-v", "schedule=dualpipe-v"),
)
"""What a layout is drawn to have, so that no split is rare."""
SPREAD = ("MoE", "dp2 ep2 mb4")
"""What is run first, so that the planner can be told how uneven the experts' tokens are."""
WARM_UP = 2
"""Steps at the start of a run that do not count."""


@dataclass(frozen=True)
class Result:
    """One layout, planned and run."""

    model: str
    layout: str
    favourite: bool  # the planner's first choice for so many processes
    predicted_s: float  # a step
    measured_s: float
    predicted_bytes: float  # the largest rank's growth
    measured_bytes: float
    ledger_differences: int
    seconds: list[dict[str, Any]]  # where the step went, predicted and measured
    imbalance: float | None  # tokens of the busiest expert rank over the mean

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def processes(self) -> int:
        return parse(self.layout).world_size


# --- what is run -------------------------------------------------------------------------------


def job_of(model: str, cluster: str, processes: int, imbalance: float = 1.0) -> Job:
    return Job(
        load_config(MODELS[model]),
        load_cluster(cluster, processes),
        SEQUENCE_LENGTH,
        GLOBAL_BATCH,
        "fp32",
        ENGINES["fivefold"],
        imbalance=imbalance,
    )


def drawn(cluster: str, count: int, seed: int) -> Iterator[tuple[str, Layout]]:
    """`count` different layouts that can be run, each of a model."""
    draw = random.Random(seed)
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        model, processes = draw.choice(sorted(MODELS)), draw.choice(PROCESSES)
        layouts = _with(job_of(model, cluster, processes), draw.choice(FIXES))
        if not layouts:
            continue
        layout = draw.choice(layouts)
        if (model, str(layout)) not in seen:
            seen.add((model, str(layout)))
            yield model, layout


def _with(job: Job, fix: str) -> list[Layout]:
    """All layouts of a job that have what is fixed and can be run, in the default rank order."""
    try:
        layouts = every_layout(job, Choices.read(fix, ""))
    except UserError:  # not with so many processes
        return []
    legal = (layouts[0][i] for i in range(len(layouts[0]))) if layouts else ()
    return [each for each in legal if not violations(each, job.config, job.sequence_length)]


def best_planned(cluster: str, imbalance: float) -> Iterator[tuple[str, Layout, bool]]:
    """What the planner would have one take, and what it likes next best: a model, a layout, and
    whether it is the favourite. `imbalance`: of the model with experts."""
    for model in MODELS:
        for processes in FAVOURED:
            uneven = imbalance if model == SPREAD[0] else 1.0
            job = job_of(model, cluster, processes, uneven)
            best = search(job, Constraints(top=LIKED)).best
            for place, each in enumerate(best):
                yield model, each.layout, place == 0


def run(model: str, layout: Layout, favourite: bool, cluster: str, steps: int) -> Result:
    """Train a few steps, and read the report."""
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as out:
        asked = Run(
            model=MODELS[model],
            data=Data(tokenizer="bytes", sequence_length=SEQUENCE_LENGTH),
            layout=str(layout),
            global_batch=GLOBAL_BATCH,
            steps=WARM_UP + steps,
            optimizer=Optimizer(lr=1e-4),
            cluster=cluster,
            out=out,
            folder=Path(out),
            device="cpu",
        )
        with contextlib.redirect_stdout(io.StringIO()):
            report = train_and_compare(asked)
        assert report is not None
        lines = Path(out, "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines][WARM_UP:]
    return Result(
        model=model,
        layout=str(layout),
        favourite=favourite,
        predicted_s=report["step_s"]["predicted"],
        measured_s=statistics.median(seconds),
        predicted_bytes=report["memory"]["predicted_bytes"],
        measured_bytes=report["memory"]["measured_bytes"],
        ledger_differences=len(report["ledger_differences"]),
        seconds=report["seconds"],
        imbalance=report["imbalance"],
    )


# --- what is said of it ------------------------------------------------------------------------


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def regrets(results: Iterable[Result]) -> dict[str, float]:
    """By model and number of processes: how much slower the favourite is than the measured best."""
    alike: dict[str, list[Result]] = {}
    for each in results:
        alike.setdefault(f"{each.model}, {each.processes} processes", []).append(each)
    found = {}
    for name, members in alike.items():
        best = min(each.measured_s for each in members)
        for each in members:
            if each.favourite:
                found[name] = each.measured_s / best - 1
    return found


def summary(results: Sequence[Result]) -> dict[str, Any]:
    errors = [abs(each.error) for each in results]
    memory = [abs(each.memory_error) for each in results]
    followed = regrets(results)
    return {
        "layouts": len(results),
        "median_abs_error": statistics.median(errors),
        "p90_abs_error": float(np.quantile(errors, 0.9)),
        "bias": statistics.median(each.error for each in results),
        "rank_correlation": rank_correlation(
            [each.predicted_s for each in results], [each.measured_s for each in results]
        ),
        "memory_median_abs_error": statistics.median(memory),
        "memory_p90_abs_error": float(np.quantile(memory, 0.9)),
        "ledger_differences": sum(each.ledger_differences for each in results),
        "regret": followed,
        "imbalance": _imbalances(results),
        "mean_regret": statistics.fmean(followed.values()) if followed else math.nan,
    }


def _imbalances(results: Iterable[Result]) -> dict[str, float]:
    """The mean by numbers of expert ranks."""
    by_ep: dict[int, list[float]] = {}
    for each in results:
        if each.imbalance is not None:
            by_ep.setdefault(parse(each.layout).ep, []).append(each.imbalance)
    return {f"ep{ep}": statistics.fmean(found) for ep, found in sorted(by_ep.items())}


def lines(results: Sequence[Result]) -> Iterator[str]:
    """A table in Markdown, which reads well on a terminal too."""
    yield "| model | layout | step, ms: planned | run | error | memory, MB: planned | run | error |"
    yield "| --- | --- | --: | --: | --: | --: | --: | --: |"
    for each in sorted(results, key=lambda r: (r.model, r.processes, r.measured_s)):
        star = " *" if each.favourite else ""
        yield (
            f"| {each.model} | `{each.layout}`{star} | {1e3 * each.predicted_s:,.0f} "
            f"| {1e3 * each.measured_s:,.0f} | {each.error:+.0%} "
            f"| {each.predicted_bytes / 1e6:,.0f} | {each.measured_bytes / 1e6:,.0f} "
            f"| {each.memory_error:+.0%} |"
        )


def sentences(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['layouts']} layouts. Step time: median error {found['median_abs_error']:.1%}, "
        f"90th percentile {found['p90_abs_error']:.1%}, bias {found['bias']:+.1%}, rank "
        f"correlation {found['rank_correlation']:.3f}."
    )
    yield (
        f"Memory: median error {found['memory_median_abs_error']:.1%}, 90th percentile "
        f"{found['memory_p90_abs_error']:.1%}. Ledgers: {found['ledger_differences']} differences."
    )
    uneven = ", ".join(f"{name} {value:.2f}" for name, value in found["imbalance"].items())
    if uneven:
        yield f"Tokens of the busiest expert rank over the mean: {uneven}."
    followed = ", ".join(f"{name}: {value:.1%}" for name, value in found["regret"].items())
    yield (
        f"The planner's favourite (*) against the measured best: {found['mean_regret']:.1%} slower "
        f"on average ({followed})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cluster", metavar="FILE.yaml")
    parser.add_argument("--layouts", type=int, default=36, metavar="N")
    parser.add_argument("--steps", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cluster = options.cluster or _calibrated()
    spread = run(SPREAD[0], parse(SPREAD[1]), False, cluster, options.steps)
    assert spread.imbalance is not None
    wanted = list(best_planned(cluster, spread.imbalance))
    known = {(model, str(layout)) for model, layout, _ in wanted}
    for model, layout in drawn(cluster, options.layouts, options.seed):
        if (model, str(layout)) not in known:
            wanted.append((model, layout, False))
    results = []
    for model, layout, favourite in wanted:
        results.append(run(model, layout, favourite, cluster, options.steps))
        if not options.json:
            last = results[-1]
            print(
                f"{last.model:6}{last.layout:44} {1e3 * last.predicted_s:7.0f} ms planned, "
                f"{1e3 * last.measured_s:7.0f} measured, {last.error:+5.0%}",
                flush=True,
            )
    found = summary(results)
    if options.json:
        rows = [{**asdict(each), "error": each.error} for each in results]
        print(json.dumps({**found, "rows": rows}, indent=2))
    else:
        print("", *lines(results), "", *sentences(found), sep="\n")
    if options.write:
        table = "\n".join(
            [*sentences(found), "", "![](figures/closed-loop.svg)", "", *lines(results)]
        )
        pages.write(PAGE, {"closed loop": table})
        points = [(r.measured_s, r.predicted_s, r.model) for r in results]
        atomic_write(FIGURE, predicted_beside_measured(points, "s").svg())


def _calibrated() -> str:
    """The cluster file of this machine, measured now."""
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as folder:
        measured = calibrate(str(Path(folder, "here.yaml")), None, quick=False)
        assert measured is not None
        kept = Path(tempfile.gettempdir(), "fivefold-closed-loop.yaml")
        atomic_write(kept, measured.path.read_text())
    return str(kept)


if __name__ == "__main__":
    reexec_with_malloc_settings()
    main()
