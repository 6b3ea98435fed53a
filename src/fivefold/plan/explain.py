"""Why this layout: the reason for each split with its number, and what would change the answer.

Every number here is a difference that was computed: the layout again without one split, or on
another machine, on the same devices and with the same global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from fivefold.layout.notation import Layout
from fivefold.plan.engines import Job
from fivefold.plan.estimate import Estimate, LedgerRow
from fivefold.plan.neighbours import (
    Fields,
    Neighbour,
    Outcome,
    broken_rule,
    outcomes,
    refit,
    step_times,
)
from fivefold.plan.search.ranking import TIE_TOLERANCE
from fivefold.plan.wording import available, device_noun, gb, longer
from fivefold.text import product

USUAL_ORDER = ("tp", "cp", "ep", "pp", "dp")
"""Splits by traffic per device, most to least, as practitioners quote it: from the inner tier
out."""
MEMORY_SAVED = 0.01
"""Share of the peak that a split must save to be there for memory alone."""
NAMED = 0.005
"""Shares of a step from which on a difference is named, and a faster network mentioned."""
WORTH_MORE_MEMORY = 0.02
"""Share of a step that a neighbour must save for more memory to be mentioned."""


@dataclass(frozen=True)
class Justification:
    """One sentence, and its numbers where it has them."""

    split: str  # "model", or a split of the layout
    text: str
    peak_memory_bytes: float | None = None  # without the split
    step_time_ratio: float | None = None  # without the split, to the chosen layout's


SPLITS: dict[str, tuple[str, Callable[[Layout], bool], Fields]] = {
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
    "schedule": ("vpp {vpp}", lambda x: x.vpp > 1 and x.schedule == "1f1b", {"vpp": 1}),
    "layers": ("The list of layers per stage", lambda x: x.layers is not None, {"layers": None}),
}
"""What a layout may have: its name, whether it has it, and what takes it away."""


def justify_splits(job: Job, chosen: Layout, limit_bytes: float) -> list[Justification]:
    """First whether the model fits on one device; then, for each split, what the layout without it
    would cost. A split that saves neither time nor memory has no entry."""
    used = [
        (split, _named(split, name, chosen), refit(job, chosen, **change))
        for split, (name, has, change) in SPLITS.items()
        if has(chosen)
    ]
    broken = [broken_rule(job, layout) for _, _, layout in used]
    legal = [each[2] for each, rule in zip(used, broken, strict=True) if rule is None]
    base, *others = outcomes(job, [chosen, *legal])
    found = dict(zip(legal, others, strict=True))
    result = [_whether_one_is_enough(job, chosen, limit_bytes)]
    for (split, name, layout), rule in zip(used, broken, strict=True):
        if rule is not None:
            rule = rule.partition(":")[0]  # what would be legal instead is left out
            text = f"{name}: the layout without it is not legal: {rule}."
            result.append(Justification(split, text))
        elif (without := _without(job, found[layout], base, limit_bytes)) is not None:
            peak, ratio = found[layout].peak_memory_bytes, _ratio(found[layout], base)
            result.append(Justification(split, f"{name}: without it {without}.", peak, ratio))
    return result


def _named(split: str, name: str, layout: Layout) -> str:
    if split == "cp":
        return f"CP ({product({'ulysses': layout.ulysses, 'ring': layout.ring})})"
    return name.format(**asdict(layout))


def _ratio(other: Outcome, base: Outcome) -> float:
    return other.step_time_s / base.step_time_s


def _whether_one_is_enough(job: Job, chosen: Layout, limit_bytes: float) -> Justification:
    alone = replace(job, cluster=job.cluster.with_devices(1), global_batch=1)
    needs = outcomes(alone, [Layout()])[0].peak_memory_bytes
    one, sizes = f"one {device_noun(job)}", f"{gb(needs)}; {available(limit_bytes)}"
    if needs > limit_bytes:
        text = f"The model does not fit on {one}: it would need {sizes}."
    elif chosen.world_size == chosen.dp:
        text = f"The model fits on {one} ({sizes}), so data parallelism alone is enough."
    else:
        text = f"The model fits on {one} ({sizes})."
    return Justification("model", text, needs)


def _without(job: Job, other: Outcome, base: Outcome, limit_bytes: float) -> str | None:
    """What would be worse (or better) without a split; None where nothing would."""
    peak, ratio = other.peak_memory_bytes, _ratio(other, base)
    each = f"each {device_noun(job)} would need"
    if peak > limit_bytes:
        return f"{each} {gb(peak)}; {available(limit_bytes)}"
    if abs(ratio - 1) >= TIE_TOLERANCE:
        return f"a step would take {longer(ratio)}"
    more = peak - base.peak_memory_bytes
    return f"{each} {gb(more)} more" if more >= MEMORY_SAVED * base.peak_memory_bytes else None


# The order of the splits, from the inner tier out


@dataclass(frozen=True)
class Order:
    """Where the traffic of each split goes, and which split sends most."""

    splits: list[str]  # from the inner tier out, most traffic first within a tier
    tiers: dict[str, str]
    wire_bytes: dict[str, float]  # per device and step
    usual: bool
    text: str


def found_order(ledger: Iterable[LedgerRow], tier_names: Sequence[str]) -> Order:
    """From the rows of a ledger; `tier_names` from the inside out.

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
        return "No messages are sent."
    shown = f"Splits by network tier, innermost first: {', '.join(splits).upper()}"
    if splits == usual:
        return f"{shown} (the usual order)."
    inner, outer = next((a, b) for a, b in pairwise(splits) if usual.index(a) > usual.index(b))
    one, other = inner.upper(), outer.upper()
    if tiers[inner] == tiers[outer]:
        where = f"{one} and {other} both cross {tiers[inner]}"
    else:
        where = f"{one} stays in {tiers[inner]} and {other} crosses {tiers[outer]}"
    return (
        f"{shown}. The usual order is {', '.join(usual).upper()}. Here {where}, and a step sends "
        f"{gb(sent[inner])} for {one} and {gb(sent[outer])} for {other}."
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
    """More memory, a faster network, a larger batch: what each would do to the time per token.

    Of other layouts only the neighbours are looked at.
    """
    fitting = [chosen, *(each.layout for each in around if each.verdict == "fits")]
    (now_s,) = step_times(job, [chosen])
    result = list(_more_memory(job, around, limit_bytes))
    for index in range(len(job.cluster.tiers)):
        result += _faster_tier(job, fitting, now_s, index)
    twice = replace(job, global_batch=2 * job.global_batch)
    (larger_s,) = step_times(twice, [replace(chosen, accumulation=2 * chosen.accumulation)])
    ratio = larger_s / now_s / 2
    text = f"With twice the global batch, each token would take {longer(ratio)}."
    return [*result, Change("global batch", text, ratio)]


def _more_memory(job: Job, around: Sequence[Neighbour], limit_bytes: float) -> Iterator[Change]:
    """The neighbour that is faster, does not fit, and lacks least."""
    faster = [
        (each.peak_memory_bytes, each.step_time_ratio, each.change)
        for each in around
        if each.verdict == "no"
        and each.peak_memory_bytes
        and each.step_time_ratio
        and each.step_time_ratio < 1 - WORTH_MORE_MEMORY
    ]
    if faster:
        peak, ratio, change = min(faster)
        text = (
            f"With {gb(peak - limit_bytes)} more memory per {device_noun(job)}, {change} would fit "
            f"and a step would take {longer(ratio)}."
        )
        yield Change("memory", text, ratio)


def _faster_tier(job: Job, fitting: Sequence[Layout], now_s: float, index: int) -> Iterator[Change]:
    """One tier of the network with twice its bandwidth; nothing where that changes nothing."""
    system = list(job.cluster.system)
    tier = system[index]
    system[index] = replace(tier, bandwidth=2 * tier.bandwidth)
    faster = replace(job, cluster=replace(job.cluster, system=tuple(system)))
    best_s, best = min(zip(step_times(faster, fitting), range(len(fitting)), strict=True))
    ratio = best_s / now_s
    if abs(ratio - 1) < NAMED:
        return
    other = "" if best == 0 else f" with {fitting[best]}"
    text = f"With {tier.name} twice as fast, a step would take {longer(ratio)}{other}."
    yield Change(f"bandwidth of {tier.name}", text, ratio)


# Two layouts compared


def difference(name: str, first: Estimate, other: Estimate) -> Justification:
    """What another layout costs compared with the first, which the sentence calls `name`."""
    ratio = other.step_time_s / first.step_time_s
    than = "as" if ratio >= 2 else "than"
    text = f"A step takes {longer(ratio)} {than} with {name}"
    if abs(ratio - 1) < 5e-4:
        text = f"A step takes as long as with {name}"
    if named := largest_differences(first, other):
        text += f": {', '.join(named)}"
    memory = other.peak_memory_bytes - first.peak_memory_bytes
    if abs(memory) >= 1e9:
        text += f". It needs {gb(abs(memory))} {'more' if memory > 0 else 'less'} memory"
    return Justification("layout", f"{text}.", other.peak_memory_bytes, ratio)


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
