"""Layouts that were published for large runs, and what the search chooses for the same job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.model.counts import flops_per_token
from fivefold.model.huggingface.presets import load_preset
from fivefold.plan.engines import ENGINES, Engine, Job
from fivefold.plan.estimate import Estimate
from fivefold.plan.explain import NAMED, largest_differences
from fivefold.plan.search.constraints import Constraints
from fivefold.plan.search.search import search


@dataclass(frozen=True)
class Published:
    """A run, with what its authors say of its layout; the search fills in what they do not."""

    name: str
    model: str
    cluster: str
    gpus: int
    sequence_length: int
    global_batch: int
    layout: str  # what is published of it
    origin: str
    measured_s: float | None = None
    measured_flops: float | None = None  # where only FLOP/s of a device are printed
    causal: bool = True  # whether these count half of attention
    precision: str = "bf16"
    engine: Engine = field(default_factory=lambda: ENGINES["megatron"])
    mtp: bool = False

    @property
    def job(self) -> Job:
        return Job(
            config=load_preset(self.model),
            cluster=load_cluster(self.cluster, self.gpus),
            sequence_length=self.sequence_length,
            global_batch=self.global_batch,
            precision=self.precision,
            engine=self.engine,
            mtp=self.mtp,
        )

    @property
    def step_s(self) -> float | None:
        """Measured."""
        if self.measured_flops is None:
            return self.measured_s
        job = self.job
        flops = flops_per_token(job.config, job.sequence_length, self.causal)
        return flops * job.global_batch * job.sequence_length / (self.measured_flops * self.gpus)


MEGATRON = ENGINES["megatron"]
EAGER = replace(MEGATRON, flash_attention=False)
ONCE_A_NODE = replace(MEGATRON, once_a_node=True)
DUALPIPE = replace(
    ONCE_A_NODE, overlapped_experts=True, dispatched_bytes=1, selective="elementwise"
)

LLAMA, KORTHIKANTI = "arXiv:2407.21783 table 4", "arXiv:2205.05198 table 5"

RUNS = [
    Published("Llama-3 405B", "llama-3.1-405b", "dgx-h100", 8192, 8192, 2048,
              "tp8 pp16 dp64 ulysses1 ring1 schedule=1f1b", LLAMA, measured_flops=430e12),
    Published("Llama-3 405B", "llama-3.1-405b", "dgx-h100", 16384, 8192, 2048,
              "tp8 pp16 dp128 ulysses1 ring1 schedule=1f1b", LLAMA, measured_flops=400e12),
    Published("Llama-3 405B", "llama-3.1-405b", "dgx-h100", 16384, 131072, 128,
              "tp8 pp16 dp8 ulysses1 ring16 schedule=1f1b", LLAMA, measured_flops=380e12),
    Published("DeepSeek-V3", "deepseek-v3", "hgx-h800", 2048, 4096, 15360,
              "tp1 pp16 dp128 ep64 zero1 mb1 recompute=selective schedule=dualpipe",
              "arXiv:2505.09343 table 4", 19.926, precision="fp8", engine=DUALPIPE, mtp=True),
    Published("Megatron 175B", "megatron-175b", "dgx-a100", 64, 2048, 64,
              "tp8 sp pp8 vpp3 mb1 recompute=selective", KORTHIKANTI, 13.75, engine=EAGER),
    Published("Megatron 530B", "megatron-530b", "dgx-a100", 280, 2048, 280,
              "tp8 sp pp35 vpp3 mb1 recompute=selective", KORTHIKANTI, 37.83, engine=EAGER),
    Published("Megatron 1T", "megatron-1t", "dgx-a100", 512, 2048, 512,
              "tp8 sp pp64 vpp1 mb1 recompute=selective schedule=1f1b", KORTHIKANTI, 71.49,
              engine=EAGER),
    Published("Mixtral 8x22B", "mixtral-8x22b", "dgx-h100", 128, 4096, 256,
              "tp2 pp8 dp8 ep8 etp1 zero1 schedule=1f1b", "arXiv:2504.14960 table 3",
              measured_flops=0.493 * 989.5e12, causal=False),
    Published("Qwen3 235B-A22B", "qwen3-235b-a22b", "dgx-h100", 256, 4096, 2048,
              "tp2 pp8 vpp4 dp16 ep32 etp1 zero1 mb1", "arXiv:2603.07685 table 9", 15.37,
              engine=ONCE_A_NODE),
]  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A run, its layout completed, and the choice of the search. None: no legal layout is so."""

    run: Published
    published: Estimate | None
    ours: Estimate | None

    @property
    def verdict(self) -> str:
        """In predicted time."""
        if self.ours is None or self.published is None:
            return "not legal here"
        if self.published.verdict == "no":
            return f"needs {self.published.peak_memory_bytes / 1e9:.0f} GB by our estimate"
        if _degrees(self.published) == _degrees(self.ours):
            return "found"
        ratio = self.published.step_time_s / self.ours.step_time_s
        if abs(ratio - 1) < NAMED:
            return "equal"
        return f"beaten, {ratio:.2f} x" if ratio > 1 else f"missed, {ratio:.2f} x"

    @property
    def why(self) -> str:
        """What the other layout saves or costs, the largest parts first."""
        if self.ours is None or self.published is None:
            return ""
        return ", ".join(largest_differences(self.published, self.ours))


def _degrees(estimate: Estimate) -> tuple[int, ...]:
    layout = estimate.layout
    return (
        layout.tp, layout.pp, layout.dp, layout.ulysses, layout.ring, layout.ep, layout.etp
    )  # fmt: skip


def compared() -> Iterator[Compared]:
    """All runs."""
    for run in RUNS:
        planned = "dualpipe" in run.layout
        fixed = Constraints(fix=run.layout, top=1, planned_schedules=planned)
        yield Compared(run, _best(run.job, fixed), _best(run.job, Constraints(top=1)))


def _best(job: Job, wishes: Constraints) -> Estimate | None:
    """The best that fits, or else the one that comes closest."""
    try:
        found = search(job, wishes)
    except UserError:
        return None
    return next(iter([*found.best, *found.closest]), None)


def table() -> str:
    """Markdown: a line a run."""
    lines = [
        "| run | GPUs | sequence | published layout, completed | predicted | measured | our choice "
        "| predicted | verdict | difference of ours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in compared():
        run = each.run
        lines.append(
            f"| {run.name} ({run.origin}) | {run.gpus:,} | {run.sequence_length:,} "
            f"| {_layout(each.published)} | {_seconds(each.published)} "
            f"| {'' if run.step_s is None else f'{run.step_s:.2f} s'} "
            f"| {_layout(each.ours)} | {_seconds(each.ours)} | {each.verdict} | {each.why} |"
        )
    return "\n".join(lines)


def _layout(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"`{estimate.layout}`"


def _seconds(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.step_time_s:.2f} s"
