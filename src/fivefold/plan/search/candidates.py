"""The candidate layouts of a search, as arrays, built up axis by axis.

    degrees             tp sp pp ulysses ring dp ep etp
    with_micro_batches  vpp, micro-batch, accumulation, schedule
    with_states         zero, dp_replicate
    recompute_modes     what is recomputed
    rank_orders         the order of the ranks, which all layouts of one `LayoutBatch` share

Each step repeats every layout for each value that is open to it, so that no loop runs over layouts.
An axis has the values that can matter; the constants below say where it ends. A value that the user
fixed is taken as it is. All that comes out is legal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.batch import SHARED, LayoutBatch
from fivefold.layout.legality import legal, violations
from fivefold.layout.model_rules import allowed_tp
from fivefold.layout.notation import ORDER, Layout
from fivefold.plan.engines import Job
from fivefold.plan.search.constraints import Choices
from fivefold.text import divisors

TP_DOMAINS = 2
"""tp spans at most so many scale-up domains."""
MIN_TOKENS = 1024
"""Tokens of a sequence on one context-parallel rank, at least, unless no layout is left."""
MAX_TOKENS = 65_536
"""Tokens of one micro-batch on one rank, at most; more do not make a product faster."""
MAX_ODD_MICRO_BATCH = 6
"""Micro-batches that are no power of two end here."""
MAX_VPP = 12
UNEVEN_LAYERS = 3
"""Layers by which the chunks of an interleaved pipeline may fall short of equal ones: as much as
the embedding, the head and a multi-token-prediction module weigh, about a layer each."""
SHARED_OUT = {"dp", "edp", "ulysses", "ring", "micro_batch"}
"""Fields by which a user says how sequences are shared out. Where none of them is fixed or
forbidden, n sequences over n context-parallel ranks are not tried: one sequence on each of n
data-parallel ranks is as much work, and less traffic."""
RECOMPUTED_SHARES = (0.25, 0.5, 0.75)
"""Of the layers of a virtual stage, those that recompute=full:N recomputes."""

ORDERS = (
    ORDER,
    ("tp", "cp", "ep", "pp", "dp"),
    ("tp", "cp", "dp", "ep", "pp"),
    ("tp", "ep", "dp", "cp", "pp"),
    ("tp", "pp", "cp", "ep", "dp"),
    ("cp", "tp", "ep", "dp", "pp"),
)
"""Rank orders that place some axis differently, the usual one first."""


# The axes


def degrees(job: Job, choices: Choices) -> tuple[LayoutBatch, int]:
    """Every way to share out the devices of the cluster (zero 0, micro-batch 1), and how many
    were tried.

    UserError, naming the rule, where what is fixed leaves none; else there may be none because
    the number of devices does not divide.
    """
    for min_tokens in (MIN_TOKENS, 1):
        layouts, tried = _degrees(job, choices, min_tokens)
        if len(layouts):
            return layouts, tried
    _refuse_fixed(job, choices)
    return layouts, tried


def _degrees(job: Job, choices: Choices, min_tokens: int) -> tuple[LayoutBatch, int]:
    config, world_size = job.config, job.cluster.num_devices
    sequence, moe = job.sequence_length, config.moe
    domain = job.cluster.tiers[0].size or 1
    tps = [tp for tp in allowed_tp(config) if tp <= TP_DOMAINS * domain]
    parts = [cp for cp in divisors(sequence) if cp == 1 or sequence // cp >= min_tokens]
    parts = [cp for cp in parts if world_size % cp == 0]
    pps = [pp for pp in divisors(world_size) if pp <= config.num_layers]
    grid = np.meshgrid(
        choices.of("tp", tps),
        choices.of("pp", pps),
        choices.of("ulysses", parts),
        choices.of("ring", parts),
        choices.of("ep", divisors(moe.num_experts) if moe else [1]),
        [False, True] if moe and ("etp" not in choices.fixed) else [False],
        indexing="ij",
    )
    tp, pp, ulysses, ring, ep, etp_is_tp = (axis.ravel() for axis in grid)
    cp = ulysses * ring
    dp = world_size // (tp * pp * cp)
    etp = np.where(etp_is_tp, tp, choices.value("etp", 1))
    works = (dp * tp * pp * cp == world_size) & (job.global_batch % np.maximum(dp, 1) == 0)
    works &= ~etp_is_tp | (tp > 1)
    works &= (cp == 1) | (cp <= sequence // min_tokens) | (min_tokens == 1)
    works &= choices.allow("dp", dp) & choices.allow("etp", etp)
    # Megatron SP is never slower than TP alone, and holds less.
    sp = (tp > 1) & (sequence % (cp * np.where(ring > 1, 2, 1) * tp) == 0)
    sp &= True not in choices.forbidden.get("sp", ())
    works &= choices.allow("sp", sp)
    columns = dict(tp=tp, pp=pp, ulysses=ulysses, ring=ring, dp=dp, ep=ep, etp=etp, sp=sp)
    layouts = _layouts({name: column[works] for name, column in columns.items()}, choices)
    layouts = layouts.take(choices.allow("edp", layouts.edp))
    # Any micro-batch that keeps the rule on MoE tokens is good enough here.
    enough = replace(layouts, micro_batch=layouts.tp)
    return layouts.take(_unlisted_legal(enough, job)), len(tp)


def _unlisted_legal(layouts: LayoutBatch, job: Job) -> NDArray[np.bool_]:
    """Which layouts are legal but for the list of layers, whose stages vpp has still to make."""
    unlisted = replace(layouts, layers=None)
    return legal(unlisted, job.config, job.sequence_length, job.cluster.num_devices)


TEXTS = {"recompute": "U9", "schedule": "U10"}
"""The width of the longest name that may stand in a column."""


def _layouts(columns: dict[str, NDArray[np.int64 | np.bool_]], choices: Choices) -> LayoutBatch:
    """Layouts with these columns; the others have their defaults."""
    size = len(columns["tp"])
    order = choices.value("order", ORDER)
    values = {
        each.name: np.full(size, each.default, TEXTS.get(each.name))
        for each in fields(Layout)
        if each.name not in SHARED
    }
    layers = choices.value("layers", cast("tuple[int, ...] | None", None))
    return LayoutBatch(**{**values, **columns}, order=order, layers=layers)


def with_micro_batches(
    job: Job, layouts: LayoutBatch, choices: Choices, planned_schedules: bool
) -> tuple[LayoutBatch, int]:
    """Every vpp, micro-batch and schedule, and how many were tried. Planned-only schedules are
    tried where asked for."""
    layouts = _with_schedule(layouts, choices, planned_schedules)
    layouts = _with_vpp(job, layouts, choices)
    share = job.global_batch // layouts.dp
    sizes = _micro_batch_sizes(int(share.max(initial=1)))
    if "accumulation" in choices.fixed:
        sizes = divisors(job.global_batch)
    sizes = np.array(choices.of("micro_batch", sizes), np.int64)[None, :]
    works = share[:, None] % sizes == 0
    works &= choices.allow("accumulation", share[:, None] // sizes)
    if "micro_batch" not in choices.fixed:
        tokens = sizes * (job.sequence_length // layouts.cp)[:, None]
        works &= (sizes == 1) | (tokens <= MAX_TOKENS)
    if not SHARED_OUT & (choices.fixed.keys() | choices.forbidden.keys()):
        works &= np.gcd(sizes, layouts.cp[:, None]) == 1
    layouts = _spread(layouts, works, micro_batch=sizes, accumulation=share[:, None] // sizes)
    return layouts.take(legal(layouts, job.config, job.sequence_length)), len(layouts)


def _micro_batch_sizes(share: int) -> list[int]:
    powers = {2**i for i in range(share.bit_length())}
    return sorted(powers | set(range(1, min(share, MAX_ODD_MICRO_BATCH) + 1)))


ZERO_BUBBLE = ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")
"""Schedules that a search looks at beside 1F1B where it is asked to; Megatron-LM has none."""


def _with_schedule(layouts: LayoutBatch, choices: Choices, planned: bool) -> LayoutBatch:
    # gpipe and bfs keep more than 1f1b and are never faster: they are for those who ask.
    names = choices.of("schedule", ["1f1b", *(ZERO_BUBBLE if planned else ())])
    schedules = np.array([names], layouts.schedule.dtype)
    runs = ~np.isin(schedules, ZERO_BUBBLE) | (layouts.pp[:, None] > 1)
    return _spread(layouts, runs, schedule=schedules)


def _with_vpp(job: Job, layouts: LayoutBatch, choices: Choices) -> LayoutBatch:
    pp, num_layers = layouts.pp[:, None], job.config.num_layers
    vpp = np.array(choices.of("vpp", list(range(1, MAX_VPP + 1))), np.int64)[None, :]
    stages = pp * vpp
    works = (vpp == 1) | (pp > 1) & (stages <= num_layers)
    if "vpp" not in choices.fixed:
        short = np.minimum(-num_layers % stages, -(num_layers + 2) % stages)
        works &= (vpp == 1) | (short <= UNEVEN_LAYERS)
    both = layouts.is_v_shaped[:, None]
    chunked = (layouts.schedule == "1f1b") | (layouts.schedule == "bfs")
    works &= np.where(both, vpp == 2, (vpp == 1) | chunked[:, None])
    if layouts.layers is not None:
        works &= stages == len(layouts.layers)
    return _spread(layouts, works, vpp=vpp)


def with_states(job: Job, layouts: LayoutBatch, choices: Choices) -> LayoutBatch:
    """Every ZeRO stage, sharded over all data-parallel ranks or inside the scale-up domain."""
    works, zero, replicate = state_options(job, layouts, choices)
    return _spread(layouts, works, zero=zero, dp_replicate=replicate)


def state_options(
    job: Job, layouts: LayoutBatch, choices: Choices
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Which options there are [n, options], and their zero and dp_replicate."""
    domain = job.cluster.tiers[0].size or 1
    dp, cp, tp = (column[:, None] for column in (layouts.dp, layouts.cp, layouts.tp))
    zero = np.array([[0, 1, 2, 3, 1, 2, 3]])
    near = np.maximum(1, domain // (tp * cp))  # data-parallel ranks in one scale-up domain
    replicate = np.where(np.arange(7) < 4, 1, np.where(dp % near == 0, dp // near, 1))
    works = (np.arange(7) < 4) | (replicate > 1)
    if "dp_replicate" in choices.fixed:
        replicate = np.where(zero == 0, 1, choices.value("dp_replicate", 1)) + 0 * dp
        works = (np.arange(7) < 4) & (dp % replicate == 0)
    dp_shard = dp // replicate
    works &= (zero == 0) | (dp_shard * cp > 1)
    works &= dp_shard * tp * cp % (layouts.etp * layouts.ep)[:, None] == 0
    works &= choices.allow("zero", zero) & choices.allow("dp_replicate", replicate)
    return works, zero, replicate


@dataclass(frozen=True)
class RecomputeMode:
    """What layouts recompute: one mode, its number of layers for each, and which can use it."""

    name: str
    layers: NDArray[np.int64]
    open: NDArray[np.bool_]

    def of(self, layouts: LayoutBatch, chosen: NDArray[np.bool_ | np.int64]) -> LayoutBatch:
        """The chosen layouts (a mask or indices), in this mode."""
        layouts = layouts.take(chosen)
        names = np.full(len(layouts), self.name, TEXTS["recompute"])
        return replace(layouts, recompute=names, recompute_layers=self.layers[chosen])


def recompute_modes(job: Job, layouts: LayoutBatch, choices: Choices) -> list[RecomputeMode]:
    """The modes that are left, in the order none, selective, full:N (ascending), full."""
    inner = -(-job.config.num_layers // layouts.stages)  # layers of the largest virtual stage
    none = np.zeros_like(inner)
    if "recompute" in choices.fixed:
        name, count = choices.value("recompute", ("none", 0))
        return [RecomputeMode(name, none + count, count <= inner)]
    parts = [np.rint(share * inner).astype(np.int64) for share in RECOMPUTED_SHARES]
    modes = [RecomputeMode("none", none, none == 0), RecomputeMode("selective", none, none == 0)]
    for before, part in zip([none, *parts], parts, strict=False):
        modes.append(RecomputeMode("full", part, (part > before) & (part < inner)))
    modes.append(RecomputeMode("full", none, none == 0))
    return [_without_forbidden(mode, choices) for mode in modes]


def _without_forbidden(mode: RecomputeMode, choices: Choices) -> RecomputeMode:
    forbidden = choices.forbidden.get("recompute", frozenset())
    if mode.name in forbidden:
        return replace(mode, open=np.zeros_like(mode.open))
    pairs = [each for each in forbidden if isinstance(each, tuple) and each[0] == mode.name]
    return replace(mode, open=mode.open & ~np.isin(mode.layers, [count for _, count in pairs]))


def rank_orders(
    layouts: LayoutBatch, choices: Choices
) -> Iterator[tuple[tuple[str, ...], NDArray[np.bool_]]]:
    """Rank orders, each with the layouts whose ranks it places otherwise than those before it."""
    if "order" in choices.fixed:
        yield choices.value("order", ORDER), np.ones(len(layouts), bool)
        return
    pp, cp, dp = layouts.pp > 1, layouts.cp > 1, layouts.dp > 1
    changes = (
        np.ones(len(layouts), bool),
        pp & dp,
        (layouts.ep > 1) & (layouts.edp > 1),
        cp & dp,
        pp & cp,
        cp & (layouts.tp > 1),
    )
    for order, changed in zip(ORDERS, changes, strict=True):
        if order in choices.of("order", list(ORDERS)):
            yield order, changed


def every_layout(job: Job, choices: Choices, planned_schedules: bool = False) -> list[LayoutBatch]:
    """All candidates, one `LayoutBatch` for each rank order."""
    layouts, _ = degrees(job, choices)
    layouts, _ = with_micro_batches(job, layouts, choices, planned_schedules)
    layouts = with_states(job, layouts, choices)
    modes = recompute_modes(job, layouts, choices)
    layouts = LayoutBatch.concatenate([mode.of(layouts, mode.open) for mode in modes])
    return [
        replace(layouts.take(changed), order=order)
        for order, changed in rank_orders(layouts, choices)
    ]


def _spread(
    layouts: LayoutBatch, works: NDArray[np.bool_], **columns: NDArray[np.generic]
) -> LayoutBatch:
    """Each layout once for each option that works [n, options], with the option's values
    ([n, options] or [1, options]) in the columns named."""
    row, option = np.nonzero(works)
    values = {
        name: np.broadcast_to(column, works.shape)[row, option] for name, column in columns.items()
    }
    return replace(layouts.take(row), **values)


def _refuse_fixed(job: Job, choices: Choices) -> None:
    """UserError for the rule that what is fixed breaks, if it breaks one by itself."""
    fixed = {name: value for name, value in choices.fixed.items() if name != "edp"}
    if "recompute" in fixed:
        fixed["recompute"], fixed["recompute_layers"] = choices.value("recompute", ("none", 0))
    layout = replace(Layout(), **fixed)
    world_size = job.cluster.num_devices
    ranks = layout.tp * layout.pp * layout.cp
    if "dp" not in fixed and world_size % ranks == 0:
        layout = replace(layout, dp=world_size // ranks)
    sentences = violations(layout, job.config, job.sequence_length, running=False)
    if "dp" in fixed or world_size % ranks:
        sentences += violations(layout, world_size=world_size, running=False)
    if sentences:
        raise UserError(sentences[0])
