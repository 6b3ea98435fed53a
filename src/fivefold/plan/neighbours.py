"""What one change to a layout would cost: the layouts around it, computed in full.

Each has one degree halved, doubled or dropped, or one setting changed, on the same devices and with
the same global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fivefold.layout.batch import LayoutBatch, alike
from fivefold.layout.legality import violations
from fivefold.layout.notation import Layout
from fivefold.plan.engines import Job
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.time.stages import simulate
from fivefold.text import product

Fields = dict[str, object]
"""Fields of a layout, with new values."""


@dataclass(frozen=True)
class Outcome:
    """One layout: its simulated step, as in an estimate, and the search's memory."""

    step_time_s: float
    peak_memory_bytes: float


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs in one thing from the one that was chosen."""

    change: str
    layout: Layout
    verdict: str  # "fits", "tight", "no" (over memory) or "illegal"
    step_time_s: float | None  # simulated, as in an estimate; None for an illegal one
    step_time_ratio: float | None  # to the chosen one's
    peak_memory_bytes: float | None
    reason: str | None  # the rule that an illegal one breaks


def neighbours(job: Job, chosen: Layout, limit_bytes: float) -> list[Neighbour]:
    """What one change would cost, in the order of `_changes`; illegal ones come last. The verdict
    is "fits" up to the limit, else "no"."""
    tried = [(name, refit(job, chosen, **change)) for name, change in _changes(job, chosen)]
    devices = job.cluster.num_devices
    tried = [(name, x) for name, x in tried if x != chosen and x.world_size <= devices]
    reasons = [broken_rule(job, layout) for _, layout in tried]
    legal = [layout for (_, layout), reason in zip(tried, reasons, strict=True) if reason is None]
    base, *others = outcomes(job, [chosen, *legal])
    found = dict(zip(legal, others, strict=True))
    result, illegal = [], []
    for (name, layout), reason in zip(tried, reasons, strict=True):
        if reason is not None:
            illegal.append(Neighbour(name, layout, "illegal", None, None, None, reason))
            continue
        step_s, peak = found[layout].step_time_s, found[layout].peak_memory_bytes
        verdict = "fits" if peak <= limit_bytes else "no"
        ratio = step_s / base.step_time_s
        result.append(Neighbour(name, layout, verdict, step_s, ratio, peak, None))
    return result + illegal


def outcomes(job: Job, layouts: Sequence[Layout]) -> list[Outcome]:
    """Step time and memory of legal layouts, in their order."""
    peaks = np.zeros(len(layouts))
    for indices in alike(layouts):
        batch = LayoutBatch.of([layouts[i] for i in indices])
        peaks[indices] = estimate_memory(job, batch).peak_bytes
    steps_s = step_times(job, layouts)
    return [Outcome(step_s, float(peak)) for step_s, peak in zip(steps_s, peaks, strict=True)]


def step_times(job: Job, layouts: Sequence[Layout]) -> list[float]:
    """Simulated seconds of legal layouts, in their order."""
    return [each.step_s for each in simulate(job, list(layouts))]


def broken_rule(job: Job, layout: Layout) -> str | None:
    """The first rule that the layout breaks for this job; None for a legal one."""
    devices = job.cluster.num_devices
    broken = violations(layout, job.config, job.sequence_length, devices, running=False)
    if broken or layout.global_batch == job.global_batch:
        return broken[0] if broken else None
    share = product({"dp": layout.dp, "mb": layout.micro_batch})
    return f"{share} does not divide the global batch of {job.global_batch:,} sequences"


def refit(job: Job, layout: Layout, **changes: object) -> Layout:
    """The layout with other degrees; dp takes up the devices and accumulation the batch.

    What has no meaning after the change is dropped: sp without tp, chunks without a pipeline, ZeRO
    with nothing to shard over, the layers listed for other stages. The result may be illegal.
    """
    new = replace(layout, **changes)
    if new.tp == 1:
        new = replace(new, sp=False)
    if layout.etp > 1:
        new = replace(new, etp=new.tp)
    if new.pp == 1:
        new = replace(new, vpp=1, schedule="1f1b")
    new = replace(new, dp=max(1, job.cluster.num_devices // (new.tp * new.pp * new.cp)))
    if new.dp % new.dp_replicate:
        new = replace(new, dp_replicate=1)
    if new.dp_shard * new.cp == 1:
        new = replace(new, zero=0, dp_replicate=1)
    if job.global_batch % (new.dp * new.micro_batch) and "micro_batch" not in changes:
        new = replace(new, micro_batch=1)
    new = replace(new, accumulation=max(1, job.global_batch // (new.dp * new.micro_batch)))
    if new.schedule == "1f1b" and "vpp" not in changes:
        new = replace(new, vpp=_chunks_that_work(job, new))
    return new if new.stages == layout.stages else replace(new, layers=None)


def _chunks_that_work(job: Job, layout: Layout) -> int:
    if layout.accumulation % layout.pp:
        return 1
    vpp = layout.vpp
    while vpp > 1 and layout.pp * vpp > job.config.num_layers:
        vpp //= 2
    return max(vpp, 1)


def _changes(job: Job, layout: Layout) -> Iterator[tuple[str, Fields]]:
    """What is tried around a layout: a name, and the fields that change."""
    yield from _degree(layout, "tp", "tp")
    yield from _degree(layout, "pp", "pp")
    if layout.pp % 2 == 0:
        yield "tp x 2, pp / 2", {"tp": layout.tp * 2, "pp": layout.pp // 2}
    if layout.tp % 2 == 0:
        yield "tp / 2, pp x 2", {"tp": layout.tp // 2, "pp": layout.pp * 2}
    if layout.tp > 1:
        yield ("no sp" if layout.sp else "sp"), {"sp": not layout.sp}
    yield from _degree(layout, "ulysses", "ulysses")
    yield from _degree(layout, "ring", "ring")
    if job.config.moe is not None:
        yield from _degree(layout, "ep", "ep")
        if layout.tp > 1:
            name, etp = ("etp1", 1) if layout.etp > 1 else ("etp=tp", layout.tp)
            yield name, {"etp": etp}
    for zero in (layout.zero - 1, layout.zero + 1):
        if 0 <= zero <= 3:
            yield f"zero{zero}", {"zero": zero}
    for recompute in ("none", "selective", "full"):
        if (recompute, 0) != (layout.recompute, layout.recompute_layers):
            yield f"recompute={recompute}", {"recompute": recompute, "recompute_layers": 0}
    yield from _degree(layout, "mb", "micro_batch", drop=False)
    if layout.pp > 1 and layout.schedule == "1f1b":
        yield from _degree(layout, "vpp", "vpp", drop=False)
    if layout.pp > 1 and layout.dp > 1:
        order = tuple({"dp": "pp", "pp": "dp"}.get(axis, axis) for axis in layout.order)
        inner = "dp" if order.index("dp") < order.index("pp") else "pp"
        yield f"{inner} further in", {"order": order}


def _degree(
    layout: Layout, name: str, field: str, drop: bool = True
) -> Iterator[tuple[str, Fields]]:
    """Halved, doubled, and (where `drop`) not split at all."""
    degree = getattr(layout, field)
    if degree > 2 and drop:
        yield f"no {name}", {field: 1}
    if degree > 1:
        halved = f"no {name}" if degree == 2 and drop else f"{name} / 2"
        yield halved, {field: degree // 2 if degree % 2 == 0 else 1}
    yield f"{name} x 2", {field: degree * 2}
