"""Layers a stage, by what embedding, head, loss and multi-token prediction really take.

The automatic split (`layout.stages.split_layers`) takes the embedding and the head for a layer
each. A large vocabulary on a small model, or a multi-token-prediction module, weighs more, and on
a large model both weigh less.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.stages import split_layers
from fivefold.plan.engines import Job
from fivefold.plan.memory.states import KINDS, stage_memory
from fivefold.plan.search.ranking import TIE_TOLERANCE
from fivefold.plan.time.stages import Simulated, simulate


def balanced(
    job: Job, timed: list[tuple[Layout, Simulated]], limit_bytes: float, top: int
) -> list[tuple[Layout, Simulated]]:
    """Layouts with their times, each with balanced layers where the simulated step is shorter by
    more than `TIE_TOLERANCE` and every stage takes at most `limit_bytes`. Those that would not be
    among the `top` fastest even so stay as they are."""
    result = list(timed)
    slowest_s = sorted(time.step_s for _, time in timed)[:top][-1] if timed else 0.0
    tried: dict[int, Layout] = {}
    for i, (_, time) in enumerate(timed):
        layout, saved_s = _with_list(job, time)
        if layout is not None and time.step_s - saved_s <= slowest_s:
            tried[i] = layout
    for (i, layout), time in zip(tried.items(), simulate(job, list(tried.values())), strict=True):
        shorter = time.step_s < result[i][1].step_s * (1 - TIE_TOLERANCE)
        if shorter and _every_stage_fits(job, layout, limit_bytes):
            result[i] = layout, time
    return result


def _every_stage_fits(job: Job, layout: Layout, limit_bytes: float) -> bool:
    return all(
        sum(stage[kind] for kind in KINDS) <= limit_bytes for stage in stage_memory(job, layout)
    )


def _with_list(job: Job, simulated: Simulated) -> tuple[Layout | None, float]:
    """The layout with balanced layers, and the seconds that this saves by the work of its ranks;
    no layout where these are too few.

    Chunks of a single layer leave nothing to balance, so fewer chunks are tried too.
    """
    layout = simulated.stages.layout
    if layout.first_and_last_share_rank:  # one stage, or the slowest rank is not that of one end
        return None, 0.0
    first, last, layer_s = ends_in_layers(simulated)

    def pipeline_s(vpp: int, layers: tuple[int, ...]) -> float:
        """The slowest rank's work, and filling and emptying the pipeline."""
        loads = _rank_loads(layers, layout.pp, first, last)
        filling = (layout.pp - 1) / vpp * sum(loads) / layout.pp
        return (layout.accumulation * max(loads) + filling) * layer_s

    now_s = pipeline_s(layout.vpp, simulated.stages.counts)
    best, best_s = None, now_s - TIE_TOLERANCE * simulated.step_s
    fewest = layout.vpp if layout.recompute_layers else 1  # which are counted in each chunk
    for vpp in range(layout.vpp, fewest - 1, -1):
        layers = balanced_layers(job.config.num_layers, layout.pp, vpp, first, last)
        if layers is None or layers == split_layers(job.config.num_layers, len(layers)):
            continue  # the search has seen the automatic split
        if pipeline_s(vpp, layers) < best_s:
            best, best_s = replace(layout, vpp=vpp, layers=layers), pipeline_s(vpp, layers)
    return best, now_s - best_s


def ends_in_layers(simulated: Simulated) -> tuple[float, float, float]:
    """What the first and the last pipeline rank do beside as many ordinary layers as they have, in
    layers; and the seconds of such a layer, with its messages.

    On the first that is the embedding, and less where the model begins with cheaper layers; on the
    last the head, the loss and the modules of multi-token prediction.
    """
    stages = simulated.stages
    pp = stages.layout.pp
    inner = stages.rank_of("middle") if pp > 2 else 0
    inner_s = float(stages.passes_s(inner).sum() - stages.outside_s(inner).sum())
    layer_s = inner_s / sum(stages.layers_of(inner))
    first, last = (
        float(stages.passes_s(rank).sum()) / layer_s - sum(stages.layers_of(rank))
        for rank in (0, pp - 1)
    )
    return first, last, layer_s


def balanced_layers(
    num_layers: int, pp: int, vpp: int, first: float, last: float
) -> tuple[int, ...] | None:
    """Layers of each virtual stage, so that the slowest pipeline rank is as fast as can be, and of
    each rank the slowest chunk. `first` and `last`: what the ends do beside layers, in layers.
    None where a rank would have a chunk without layers."""
    chunks = []
    try:
        for rank, layers in enumerate(split_layers(num_layers, pp, first, last)):
            at_ends = first * (rank == 0), last * (rank == pp - 1)
            chunks.append(split_layers(layers, vpp, *at_ends))
    except UserError:
        return None
    return tuple(chain.from_iterable(zip(*chunks, strict=True)))


def _rank_loads(layers: tuple[int, ...], pp: int, first: float, last: float) -> list[float]:
    loads = [float(sum(layers[rank::pp])) for rank in range(pp)]
    loads[0] += first
    loads[-1] += last
    return loads
