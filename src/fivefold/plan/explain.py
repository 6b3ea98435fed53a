"""Why this layout: the rule behind each split with its number, and what its neighbours would cost.

Every number here is a difference that was computed: the layout again without one split, or with
one degree halved or doubled, on the same devices and with the same global batch. Nothing is said
that does not follow from such a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch, alike
from fivefold.layout.legality import violations
from fivefold.layout.notation import Layout, parse
from fivefold.plan.engines import Job
from fivefold.plan.estimate import Estimate
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.time.stages import simulate
from fivefold.text import product

USUAL_ORDER = ("tp", "cp", "ep", "pp", "dp")
"""Traffic a device, most to least, as practitioners quote it; the order from the inner tier out."""

WORTH_SAYING = 0.02
"""Step times closer than this are called the same."""
NAMED = 0.005
"""Shares of a step from which on a difference is named, and a faster network spoken of."""


@dataclass(frozen=True)
class Outcome:
    """One layout: its simulated step, as in an estimate, and the search's memory."""

    step_time_s: float
    peak_memory_bytes: float


def outcomes(job: Job, layouts: Sequence[Layout]) -> list[Outcome]:
    """Step time and memory of legal layouts, in their order."""
    peaks = np.zeros(len(layouts))
    for indices in alike(layouts):
        many = LayoutBatch.of([layouts[i] for i in indices])
        peaks[indices] = estimate_memory(job, many).peak_bytes
    steps = _step_times(job, layouts)
    return [Outcome(float(step), float(peak)) for step, peak in zip(steps, peaks, strict=True)]


def _step_times(job: Job, layouts: Sequence[Layout]) -> NDArray[np.float64]:
    """Seconds of legal layouts, in their order."""
    return np.array([each.step_s for each in simulate(job, list(layouts))])


# The layout with something changed


def refit(job: Job, layout: Layout, **changes: Any) -> Layout:
    """The layout with other degrees, dp taking up the devices and accumulation the batch.

    What the change leaves without a meaning is dropped: sp without tp, chunks without a
    pipeline, ZeRO with nothing to shard over, the layers listed for other stages. The result may
    still be illegal.
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
    if new.stages != layout.stages:
        new = replace(new, layers=None)
    return new


def _chunks_that_work(job: Job, layout: Layout) -> int:
    if layout.accumulation % layout.pp:
        return 1
    vpp = layout.vpp
    while vpp > 1 and layout.pp * vpp > job.config.num_layers:
        vpp //= 2
    return max(vpp, 1)


def obstacle(job: Job, layout: Layout) -> str | None:
    """The rule that the layout breaks for this job, None for a legal one."""
    return _broken_rule(job, layout) or _undivided_batch(job, layout)


def _broken_rule(job: Job, layout: Layout) -> str | None:
    devices = job.cluster.num_devices
    broken = violations(layout, job.config, job.sequence_length, devices, running=False)
    return broken[0] if broken else None


def _undivided_batch(job: Job, layout: Layout) -> str | None:
    if layout.global_batch == job.global_batch:
        return None
    share = product({"dp": layout.dp, "mb": layout.micro_batch})
    return f"{share} does not divide the global batch of {job.global_batch:,} sequences"


# Neighbours

Changes = dict[str, Any]


def _changes(job: Job, layout: Layout) -> Iterator[tuple[str, Changes]]:
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
            yield (
                ("etp1" if layout.etp > 1 else "etp=tp"),
                {"etp": 1 if layout.etp > 1 else layout.tp},
            )
    for zero in (layout.zero - 1, layout.zero + 1):
        if 0 <= zero <= 3:
            yield f"zero{zero}", {"zero": zero}
    for recompute in ("none", "selective", "full"):
        if (recompute, 0) != (layout.recompute, layout.recompute_layers):
            yield f"recompute={recompute}", {"recompute": recompute, "recompute_layers": 0}
    yield from _degree(layout, "mb", "micro_batch", one=False)
    if layout.pp > 1 and layout.schedule == "1f1b":
        yield from _degree(layout, "vpp", "vpp", one=False)
    if layout.pp > 1 and layout.dp > 1:
        order = tuple({"dp": "pp", "pp": "dp"}.get(axis, axis) for axis in layout.order)
        inner = "dp" if order.index("dp") < order.index("pp") else "pp"
        yield f"{inner} further in", {"order": order}


def _degree(
    layout: Layout, name: str, field: str, one: bool = True
) -> Iterator[tuple[str, Changes]]:
    """Halved, doubled, and (where `one`) not split at all."""
    degree = getattr(layout, field)
    if degree > 2 and one:
        yield f"no {name}", {field: 1}
    if degree > 1:
        yield (
            (f"no {name}" if degree == 2 and one else f"{name} / 2"),
            {field: degree // 2 if degree % 2 == 0 else 1},
        )
    yield f"{name} x 2", {field: degree * 2}


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs in one thing, beside the one that was chosen."""

    change: str
    layout: str
    verdict: str  # "fits", "no" (over memory) or "illegal"
    step_time_s: float | None  # simulated, as in an estimate; None for an illegal one
    step_time_ratio: float | None  # to the chosen one's
    peak_memory_bytes: float | None
    reason: str | None  # the rule that an illegal one breaks


def neighbours(job: Job, chosen: Layout, limit_bytes: float) -> list[Neighbour]:
    """What one change would cost, in the order of `_changes`; illegal ones come last."""
    tried = [(name, refit(job, chosen, **change)) for name, change in _changes(job, chosen)]
    devices = job.cluster.num_devices
    tried = [(name, x) for name, x in tried if x != chosen and x.world_size <= devices]
    reasons = [obstacle(job, layout) for _, layout in tried]
    legal = [layout for (_, layout), reason in zip(tried, reasons, strict=True) if reason is None]
    base, *others = outcomes(job, [chosen, *legal])
    found = dict(zip(legal, others, strict=True))
    result = [
        _neighbour(name, layout, reason, found.get(layout), base, limit_bytes)
        for (name, layout), reason in zip(tried, reasons, strict=True)
    ]
    return sorted(result, key=lambda each: each.verdict == "illegal")


def _neighbour(
    change: str,
    layout: Layout,
    reason: str | None,
    outcome: Outcome | None,
    base: Outcome,
    limit_bytes: float,
) -> Neighbour:
    if outcome is None:
        return Neighbour(change, str(layout), "illegal", None, None, None, reason)
    return Neighbour(
        change,
        str(layout),
        "fits" if outcome.peak_memory_bytes <= limit_bytes else "no",
        outcome.step_time_s,
        outcome.step_time_s / base.step_time_s,
        outcome.peak_memory_bytes,
        None,
    )


# Why each split is there


@dataclass(frozen=True)
class Justification:
    """One sentence, and its numbers where it has them."""

    split: str  # "model", or a split of the layout
    text: str
    peak_memory_bytes: float | None = None  # without the split
    step_time_ratio: float | None = None  # without the split, to the chosen layout's


SPLITS: dict[str, tuple[str, Callable[[Layout], bool], Changes]] = {
    "tp": ("TP {tp}", lambda x: x.tp > 1, {"tp": 1}),
    "pp": ("PP {pp}", lambda x: x.pp > 1, {"pp": 1}),
    "cp": ("CP", lambda x: x.cp > 1, {"ulysses": 1, "ring": 1}),
    "sp": ("TP (sp)", lambda x: x.sp, {"sp": False}),
    "ep": ("EP {ep}", lambda x: x.ep > 1, {"ep": 1}),
    "zero": ("ZeRO {zero}", lambda x: x.zero > 0, {"zero": 0, "dp_replicate": 1}),
    "recompute": (
        "recompute={recompute}",
        lambda x: x.recompute != "none",
        {"recompute": "none", "recompute_layers": 0},
    ),
    "schedule": (
        "vpp {vpp}",
        lambda x: x.vpp > 1 and x.schedule == "1f1b",
        {"vpp": 1},
    ),
    "layers": ("The list of layers a stage", lambda x: x.layers is not None, {"layers": None}),
}
"""What a layout may have: its name, whether it has it, and what takes it away."""


def reasons(job: Job, chosen: Layout, limit_bytes: float) -> list[Justification]:
    """First whether the model fits one device; then, for each split, the layout without it."""
    used = [
        (split, _named(split, name, chosen), refit(job, chosen, **change))
        for split, (name, has, change) in SPLITS.items()
        if has(chosen)
    ]
    layouts = [layout for _, _, layout in used]
    broken = [_broken_rule(job, layout) for layout in layouts]
    computed = [layout for layout, rule in zip(layouts, broken, strict=True) if rule is None]
    (one,) = outcomes(_on_one_device(job), [Layout()])
    base, *others = outcomes(job, [chosen, *computed])
    found = dict(zip(computed, others, strict=True))
    result = [_opening(job, chosen, one.peak_memory_bytes, limit_bytes)]
    for (split, name, layout), rule in zip(used, broken, strict=True):
        result.append(_reason(job, split, name, layout, rule, found.get(layout), base, limit_bytes))
    return result


def _named(split: str, name: str, layout: Layout) -> str:
    if split == "cp":
        return f"CP ({product({'ulysses': layout.ulysses, 'ring': layout.ring})})"
    return name.format(**asdict(layout))


def _on_one_device(job: Job) -> Job:
    return replace(job, cluster=job.cluster.with_devices(1), global_batch=1)


def _opening(job: Job, chosen: Layout, needs_bytes: float, limit_bytes: float) -> Justification:
    if needs_bytes > limit_bytes:
        text = (
            f"The model does not fit one device: it needs {gb(needs_bytes)} there, "
            f"{available_clause(limit_bytes)}."
        )
    elif chosen.world_size == chosen.dp:
        text = (
            f"The model fits one device ({gb(needs_bytes)}, {available_clause(limit_bytes)}), "
            "so that samples alone are split: every other split would cost speed."
        )
    else:
        text = f"The model fits one device ({gb(needs_bytes)}, {available_clause(limit_bytes)})."
    return Justification("model", text, needs_bytes)


def _reason(
    job: Job,
    split: str,
    name: str,
    without: Layout,
    rule: str | None,
    outcome: Outcome | None,
    base: Outcome,
    limit_bytes: float,
) -> Justification:
    if outcome is None:
        return Justification(split, f"{name}: without it {rule}.")
    peak, ratio = outcome.peak_memory_bytes, outcome.step_time_s / base.step_time_s
    if peak > limit_bytes:
        text = f"{name}: without it a device needs {gb(peak)}, {available_clause(limit_bytes)}."
        return Justification(split, text, peak, ratio)
    if undivided := _undivided_batch(job, without):
        return Justification(split, f"{name}: without it {undivided}.", peak)
    return Justification(split, f"{name}: without it {_pace(ratio)}.", peak, ratio)


def _pace(ratio: float) -> str:
    if abs(ratio - 1) < WORTH_SAYING:
        return f"a step takes the same ({ratio:.3f} x)"
    if ratio < 1:
        return f"a step would take {ratio:.2f} x as long"
    return f"a step takes {ratio:.2f} x as long"


# The order of the splits, from the inner tier out


@dataclass(frozen=True)
class Order:
    """Where the traffic of each split goes, and which split sends most."""

    splits: list[str]  # from the inner tier out, most traffic first within a tier
    tiers: dict[str, str]
    wire_bytes: dict[str, float]  # a device and step
    usual: bool
    text: str


def found_order(ledger: Iterable[Any], tier_names: Sequence[str]) -> Order:
    """From the rows of a ledger (with `split`, `tier`, `wire_bytes`); `tier_names` from inside out.

    Splits whose traffic crosses the same outermost tier are neighbours in space: the one that
    sends more comes first.
    """
    tiers: dict[str, str] = {}
    sent: dict[str, float] = {}
    for row in ledger:
        split = counts_as(row.split, row.op)
        if split not in USUAL_ORDER or not row.wire_bytes:
            continue
        sent[split] = sent.get(split, 0.0) + row.wire_bytes
        if split not in tiers or tier_names.index(row.tier) > tier_names.index(tiers[split]):
            tiers[split] = row.tier
    splits = sorted(sent, key=lambda split: (tier_names.index(tiers[split]), -sent[split]))
    usual = [split for split in USUAL_ORDER if split in sent]
    return Order(splits, tiers, sent, splits == usual, _order_text(splits, usual, tiers, sent))


def counts_as(split: str, op: str) -> str:
    """Whose traffic a row of the ledger is. Tokens of experts that are gathered and scattered
    inside a TP group count as TP."""
    in_tp_group = split == "ep" and op in ("all_gather", "reduce_scatter")
    return "tp" if in_tp_group else split


def _order_text(
    splits: list[str], usual: list[str], tiers: dict[str, str], sent: dict[str, float]
) -> str:
    if not splits:
        return "Nothing is sent."
    shown = " > ".join(splits).upper()
    if splits == usual:
        return f"From the inner tier out: {shown}, the usual order."
    inner, outer = next((a, b) for a, b in pairwise(splits) if usual.index(a) > usual.index(b))
    if tiers[inner] == tiers[outer]:
        where = f"both cross {tiers[inner]}"
    else:
        where = f"{inner.upper()} stays in {tiers[inner]}, {outer.upper()} crosses {tiers[outer]}"
    return (
        f"From the inner tier out: {shown}, not the usual {' > '.join(usual).upper()}: {where}, "
        f"and a step sends {gb(sent[inner])} for {inner.upper()}, {gb(sent[outer])} for "
        f"{outer.upper()}."
    )


# What would change the answer


@dataclass(frozen=True)
class Change:
    """Something that is not the layout's, changed."""

    change: str
    text: str
    step_time_ratio: float  # per token, to the chosen layout's today


def changes(
    job: Job, chosen: Layout, around: Sequence[Neighbour], limit_bytes: float
) -> list[Change]:
    """More memory, a faster network, a larger batch: what each would do to the time of a token.

    Of other layouts only the neighbours are looked at.
    """
    fitting = [chosen, *(parse(each.layout) for each in around if each.verdict == "fits")]
    (now_s,) = _step_times(job, [chosen])
    result = list(_more_memory(around, limit_bytes))
    for index in range(len(job.cluster.tiers)):
        result += _faster_tier(job, fitting, float(now_s), index)
    twice = replace(job, global_batch=2 * job.global_batch)
    (larger_s,) = _step_times(twice, [replace(chosen, accumulation=2 * chosen.accumulation)])
    ratio = float(larger_s / now_s) / 2
    text = f"With twice the global batch a token takes {ratio:.2f} x as long."
    return [*result, Change("global batch", text, ratio)]


def _more_memory(around: Sequence[Neighbour], limit_bytes: float) -> Iterator[Change]:
    """The neighbour that is faster, does not fit, and lacks least."""
    faster = [
        (each.peak_memory_bytes, each.step_time_ratio, each.change)
        for each in around
        if each.verdict == "no"
        and each.peak_memory_bytes
        and each.step_time_ratio
        and each.step_time_ratio < 1 - WORTH_SAYING
    ]
    if faster:
        peak, ratio, change = min(faster)
        yield Change(
            "memory",
            f"With {gb(peak - limit_bytes)} more memory a device {change} would fit, and a step "
            f"take {ratio:.2f} x as long.",
            ratio,
        )


def _faster_tier(job: Job, fitting: Sequence[Layout], now_s: float, index: int) -> Iterator[Change]:
    """One tier of the network with twice its bandwidth; nothing where that changes nothing."""
    system = list(job.cluster.system)
    tier = system[index]
    system[index] = replace(tier, bandwidth=2 * tier.bandwidth)
    then = _step_times(replace(job, cluster=replace(job.cluster, system=tuple(system))), fitting)
    best = int(then.argmin())
    ratio = float(then[best]) / now_s
    if abs(ratio - 1) < NAMED:
        return
    other = "" if best == 0 else f", with {fitting[best]}"
    text = f"With {tier.name} twice as fast a step takes {ratio:.2f} x as long{other}."
    yield Change(f"bandwidth of {tier.name}", text, ratio)


# Words


def largest_differences(first: Estimate, other: Estimate) -> list[str]:
    """What another layout's step spends more or less than the first's: three parts at most, the
    largest first."""
    parts = dict.fromkeys([*first.seconds, *other.seconds])
    more = {part: other.seconds.get(part, 0.0) - first.seconds.get(part, 0.0) for part in parts}
    named = [
        f"{part.replace('_', ' ')} {seconds:+.2f} s"
        for part, seconds in sorted(more.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) >= NAMED * first.step_time_s
    ]
    return named[:3]


def gb(count: float) -> str:
    """`1,204 GB` or `76.4 GB`, in units of 10^9 bytes."""
    value = count / 1e9
    if value >= 99.95:
        return f"{value:,.0f} GB"
    return f"{value:.1f} GB" if value >= 0.95 else f"{count / 1e6:,.1f} MB"


def available_clause(limit_bytes: float) -> str:
    """The words after what a device would need: what it has."""
    return f"and has {f'{limit_bytes / 1e9:,.1f}'.removesuffix('.0')} GB to use"
