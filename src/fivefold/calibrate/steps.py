"""Whole training steps: what splits and steps take beside the layers, the messages and the
optimizer that were measured one by one, how much slower all goes among many processes, and what
memory a process takes beside its tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fivefold.calibrate.fit import least_relative_squares
from fivefold.calibrate.points import Point, rounded
from fivefold.cluster.cluster import Cluster
from fivefold.cluster.cpu import CallSeconds, Cause, Cpu, ProcessOverhead, Split
from fivefold.layout.notation import Layout, parse
from fivefold.model.huggingface.load import load_config
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.memory.states import KINDS, stage_memory
from fivefold.plan.time.shared_cores import kind_of
from fivefold.plan.time.stages import scalar, simulate

SEQUENCE_LENGTH, GLOBAL_BATCH, VOCABULARY = 256, 8, 1024
STEPS = {"dense": 10, "mixture": 10, "larger": 7}
"""How many are run: of the smaller models' the shortest counts, of the larger one's the median."""
WARM_UP = 2
ALONE = "mb2"
SPLITS: dict[Split, str] = {
    "zero": "dp2 zero3 mb2",
    "tp": "tp2 mb2",
    "ulysses": "ulysses2 mb2",
    "ring": "ring2 mb2",
    "ep": "dp2 ep2 mb2",
}
"""A layout with the messages of each kind (`sharing.kind_of`), beside which `UNSPLIT` has none."""
UNSPLIT = "dp2 mb2"
DENSE = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
MIXTURE = DENSE | {
    "model_type": "mixtral",
    "intermediate_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}
LARGER = DENSE | {
    "hidden_size": 320,
    "intermediate_size": 832,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
}
MODELS = {"dense": DENSE, "mixture": MIXTURE, "larger": LARGER}
AMONG_OTHERS = ("mb4", "dp2 mb4", "pp2 mb2", "dp4 mb2", "pp4 mb2", "dp8", "pp4 dp2 mb2")
"""Layouts of the larger model that show how a step goes among so many processes."""
MORE = (SPLITS["zero"], "dp2 zero2 mb4", "dp2 mb4 recompute=full", "pp2 mb2 recompute=full")
"""And those that show what more memory ZeRO and recomputation take."""


def cases(processes: int) -> list[tuple[str, str]]:
    """The (model, layout) that are measured with up to so many processes."""
    dense = [text for name, text in SPLITS.items() if name != "ep"]
    larger = (*AMONG_OTHERS, *MORE)
    all_cases = [
        *(("dense", text) for text in (ALONE, UNSPLIT, *dense)),
        *(("mixture", text) for text in (UNSPLIT, SPLITS["ep"])),
        *(("larger", text) for text in larger),
    ]
    return [case for case in all_cases if layout_of(case[1]).world_size <= processes]


def layout_of(text: str) -> Layout:
    """With the accumulation that makes up the batch."""
    layout = parse(text)
    return parse(f"{text} ga{GLOBAL_BATCH // layout.dp // layout.micro_batch}")


def measure_step(model: str, text: str) -> list[Point]:
    """A step, the part of it outside of the forward and backward passes, and with the step the
    bytes that the process has grown by. Run by each process of the layout, once the default process
    group exists."""
    import torch
    import torch.distributed as dist

    from fivefold.parallel.comm import Recorder
    from fivefold.train.data import Samples
    from fivefold.train.metrics import begin_peak_memory, peak_memory_bytes
    from fivefold.train.runfile import Optimizer
    from fivefold.train.trainer import Trainer

    layout, before_bytes = layout_of(text), begin_peak_memory()
    trainer = Trainer(
        load_config(MODELS[model]),
        layout,
        Samples(_Tokens(), SEQUENCE_LENGTH, GLOBAL_BATCH, seed=0),  # pyright: ignore
        Optimizer(lr=1e-4),
        "fp32",
        seed=0,
        rank=dist.get_rank(),
        recorder=Recorder(),
        device=torch.device("cpu"),
    )
    whole, passes = _Clocked(trainer.step), _Clocked(trainer.pipeline.run_step)
    trainer.pipeline.run_step = passes  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(STEPS[model]):
        whole(step, 1e-4)
    sizes: dict[str, int | str] = {"model": model, "layout": text}
    grown = {**sizes, "bytes": peak_memory_bytes() - before_bytes}
    outside = [
        [of_step - of_passes for of_step, of_passes in zip(*pair, strict=True)]
        for pair in ((whole.wall_s, passes.wall_s), (whole.cpu_s, passes.cpu_s))
    ]
    what, of = ("larger_step", statistics.median) if model == "larger" else ("step", min)
    return [
        Point(what, sizes, of(whole.wall_s[WARM_UP:]), of(whole.cpu_s[WARM_UP:])),
        Point("outside", sizes, _steady(outside[0]), _steady(outside[1])),
        Point("growth", grown, _steady(whole.wall_s), _steady(whole.cpu_s)),
    ]


class _Clocked:
    """A function that writes down the seconds of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def __call__(self, *args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = self.function(*args)
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)
        return result


def _steady(seconds: Sequence[float]) -> float:
    """The least of those after the warm-up: what else the machine does only adds to them."""
    return min(seconds[WARM_UP:])


@dataclass(frozen=True)
class _Tokens:
    """Random tokens that stand for a token file."""

    eos_id: int = 0
    vocab_size: int = VOCABULARY
    tokens: int = 100_000

    @property
    def ids(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab_size, self.tokens).astype(np.uint16)


# --- what they say -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A step as it is planned so far, on one rank."""

    busy_s: float
    wait_s: float
    optimizer_s: float
    calls: dict[str, float]  # messages by kind


def planned(cluster: Cluster, model: str, text: str) -> Planned:
    layout = layout_of(text)
    job = _job(cluster, model, layout)
    rank = simulate(job, [layout])[0].stages.time.ranks["first"]
    calls: dict[str, float] = {}
    for row in rank.rows:
        kind = kind_of(row.transfer)
        calls[kind] = calls.get(kind, 0.0) + scalar(row.transfer.calls)
    m, waits = scalar(rank.micro_batches), rank.waits
    return Planned(
        busy_s=m * scalar(rank.busy) + scalar(rank.once),
        wait_s=m * scalar(waits.forward + waits.backward) + scalar(waits.once),
        optimizer_s=scalar(rank.optimizer),
        calls=calls,
    )


def _job(cluster: Cluster, model: str, layout: Layout) -> Job:
    return Job(
        load_config(MODELS[model]),
        cluster.with_devices(layout.world_size),
        SEQUENCE_LENGTH,
        GLOBAL_BATCH,
        "fp32",
        ENGINES["fivefold"],
    )


def step_s(points: Sequence[Point], cluster: Cluster) -> float:
    """Processor seconds of a step outside of its passes and beside the optimizer's elements."""
    outside = _point(points, "outside", "dense", ALONE).cpu_s
    return max(0.0, outside - planned(cluster, "dense", ALONE).optimizer_s)


def cpu_of(cluster: Cluster) -> Cpu:
    """The CPU of a machine that has one."""
    assert cluster.cpu is not None
    return cluster.cpu


def with_cpu(cluster: Cluster, **changes: object) -> Cluster:
    """The machine with other numbers of its CPU."""
    return replace(cluster, cpu=cpu_of(cluster).model_copy(update=changes))


def call_seconds(points: Sequence[Point], cluster: Cluster) -> dict[Split, CallSeconds]:
    """What the program does around a message of each kind, besides the message: by how much more a
    step with such messages differs from one without than is planned so far."""
    found: dict[Split, CallSeconds] = {}
    for kind, text in SPLITS.items():
        model = "mixture" if kind == "ep" else "dense"
        split, plain = (_unplanned(points, cluster, model, each) for each in (text, UNSPLIT))
        calls = planned(cluster, model, text).calls[kind]
        busy_s, wait_s = (
            rounded(max(0.0, (a - b) / calls)) for a, b in zip(split, plain, strict=True)
        )
        found[kind] = CallSeconds(busy_s=busy_s, wait_s=wait_s)
    return found


CAUSES: dict[Cause, bool] = {"alone": True, "messages": True, "zero": False, "recompute": False}
"""The causes of memory besides tensors: whether it has bytes besides the share of something. One is
fitted with those before it known."""


def process_overhead(points: Sequence[Point], cluster: Cluster) -> dict[Cause, ProcessOverhead]:
    """What processes grew by, and no tensor is planned to take: with the least squares of errors
    relative to all that they grew by."""
    grown, found = _grown_bytes(points), dict[Cause, ProcessOverhead]()
    for cause, has_bytes in CAUSES.items():
        cases = [case for case in grown if _cause(case[1]) == cause]
        share_of_one = {**found, cause: ProcessOverhead(bytes=0.0, share=1.0)}
        known, unit = (with_cpu(cluster, overhead=each) for each in (found, share_of_one))
        planned = np.array([_planned_bytes(known, *case) for case in cases])
        more = np.array([_planned_bytes(unit, *case) for case in cases]) - planned
        measured = np.array([grown[case] for case in cases], dtype=float)
        work = np.stack([np.full(len(cases), float(has_bytes)), more], 1)
        size, share = least_relative_squares(work, measured - planned, measured).tolist()
        found[cause] = ProcessOverhead(bytes=round(size), share=rounded(share))
    return found


def _grown_bytes(points: Sequence[Point]) -> dict[tuple[str, str], int]:
    """By model and layout: of the process that grew most."""
    grown: dict[tuple[str, str], int] = {}
    for point in points:
        if point.what == "growth":
            case = str(point.sizes["model"]), str(point.sizes["layout"])
            grown[case] = max(grown.get(case, 0), int(point.sizes["bytes"]))
    return grown


def _cause(text: str) -> Cause:
    layout = layout_of(text)
    if layout.zero:
        return "zero"
    if layout.recompute == "full":
        return "recompute"
    return "alone" if layout.world_size == 1 else "messages"


def _planned_bytes(cluster: Cluster, model: str, text: str) -> float:
    """Of the rank with the most."""
    layout = layout_of(text)
    stages = stage_memory(_job(cluster, model, layout), layout)
    return max(sum(stage[kind] for kind in KINDS) for stage in stages)


def slowdowns(points: Sequence[Point], cluster: Cluster) -> dict[int, float]:
    """By what factor all that is busy takes longer among so many processes than is planned so far:
    with which steps are planned as long as they took; the mean of layouts."""
    factors: dict[int, list[float]] = {}
    for point in points:
        if point.what == "larger_step" and point.sizes["layout"] in AMONG_OTHERS:
            layout = layout_of(str(point.sizes["layout"]))
            once, twice = (_larger_step_s(cluster, layout, factor) for factor in (1.0, 2.0))
            factor = 1.0 + (point.wall_s - once) / (twice - once)
            factors.setdefault(layout.world_size, []).append(max(0.1, factor))
    return {count: rounded(statistics.fmean(each)) for count, each in sorted(factors.items())}


def _larger_step_s(cluster: Cluster, layout: Layout, factor: float) -> float:
    """A step of the larger model as it is planned with a slowdown."""
    slower = with_cpu(cluster, slowdown={layout.world_size: factor})
    return simulate(_job(slower, "larger", layout), [layout])[0].step_s


def _unplanned(
    points: Sequence[Point], cluster: Cluster, model: str, text: str
) -> tuple[float, float]:
    """Processor seconds and waiting that are measured and not planned."""
    point, plan = _point(points, "step", model, text), planned(cluster, model, text)
    waiting = max(0.0, point.wall_s - point.cpu_s)
    return point.cpu_s - plan.busy_s, waiting - plan.wait_s


def _point(points: Sequence[Point], what: str, model: str, text: str) -> Point:
    wanted = {"model": model, "layout": text}
    return next(point for point in points if point.what == what and point.sizes == wanted)
