"""Which layers live on which pipeline stage, and which stages on which pipeline rank.

`stages` counts virtual stages (pp * vpp); a split is one layer count a stage, in model order.
"""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.errors import UserError
from fivefold.layout.notation import Degrees, Layout


def split_layers(
    num_layers: int, stages: int, embedding_cost: float = 1.0, head_cost: float = 1.0
) -> tuple[int, ...]:
    """Layers on each virtual stage, chosen automatically.

    The even split comes first: sizes differ by at most one and the larger stages come first
    (30 on 4: 8, 8, 7, 7). A pipeline is as fast as its slowest stage, and the first stage also
    looks up the embedding while the last also computes the head and the loss. So the even split
    gives way to a weighted one, but only where that makes the slowest stage strictly cheaper
    (126 on 16: 7, 14 times 8, 7: a layer less on the first and the last stage, as published for
    Llama 3 405B, arXiv:2407.21783, section 3.3.2).

    Costs are in layers: an embedding of cost 1.0 weighs as much as one layer. The defaults are
    the usual rule of thumb; with them sizes still differ by at most one and no stage gets more
    layers than the largest of the even split. For a large vocabulary on a small model pass
    `head_cost = vocab_size * hidden_size / matrix parameters of a layer`; costs of 0.0 give the
    even split. All layers count the same. Raises UserError when a stage would be empty.
    """
    _refuse_empty_stages(num_layers, stages)
    even = _even_split(num_layers, stages)
    if stages == 1:
        return even
    weighted = _weighted_split(num_layers, stages, embedding_cost, head_cost)
    slowest_even = max(_stage_costs(even, embedding_cost, head_cost))
    slowest_weighted = max(_stage_costs(weighted, embedding_cost, head_cost))
    return weighted if slowest_weighted < slowest_even else even


def stage_ranges(layers: tuple[int, ...]) -> list[range]:
    """The layers (0-based, in model order) of each virtual stage."""
    return [range(first, end) for first, end in pairwise(accumulate(layers, initial=0))]


def split_layers_many(
    num_layers: int, stages: Elementwise, stage: Elementwise
) -> tuple[Elementwise, Elementwise]:
    """The layers first to end - 1 of virtual stage `stage`, elementwise over both arrays.

    The same layers as in `stage_ranges(split_layers(num_layers, stages))[stage]`: there the first
    and the last stage can differ from those between, of which some, the earlier ones, have a layer
    more. So three numbers say where each stage begins: what the first stage has, what those
    between have at least, and how many have one more.
    """
    size, larger = num_layers // stages, num_layers % stages
    first_of_even = size + (larger > 0)
    longer_of_even = np.maximum(0, larger - 1)
    # Weighted: one layer each; then, cheapest first, a second one for those between; then rounds
    # over all stages, in the order first, last, those between.
    rest = num_layers - stages
    rounds, left = np.divmod(rest - (stages - 2), np.maximum(1, stages))
    filled = rest >= stages - 2
    first_of_weighted = np.where(filled, 1 + rounds + (left >= 1), 1)
    size_of_weighted = np.where(filled, 2 + rounds, 1)
    longer_of_weighted = np.where(filled, np.maximum(0, left - 2), rest)
    # Embedding and head weigh a layer each, so the slowest stages are these:
    slowest_even = first_of_even + 1
    slowest_weighted = np.maximum(2, -(-(num_layers + 2) // stages))
    weighted = (stages > 1) & (slowest_weighted < slowest_even)

    first = np.where(weighted, first_of_weighted, first_of_even)
    between = np.where(weighted, size_of_weighted, size)
    longer = np.where(weighted, longer_of_weighted, longer_of_even)

    def begin(stage: Elementwise) -> Elementwise:
        inner = first + (stage - 1) * between + np.minimum(stage - 1, longer)
        return np.where(stage <= 0, 0, np.where(stage >= stages, num_layers, inner))

    return begin(stage), begin(stage + 1)


def chunks_a_rank(layout: Degrees) -> Elementwise:
    """Virtual stages that one pipeline rank holds, elementwise."""
    return layout.vpp * (1 + layout.is_bidirectional)


def chunk_stage(layout: Degrees, rank: Elementwise, chunk: Elementwise) -> Elementwise:
    """The virtual stage that pipeline rank `rank` holds as its chunk number `chunk`, elementwise.

    Chunks go down the ranks again and again (stage s on rank s % pp); with a V every second one
    goes up. DualPipe's second chunk is the stage of the rank opposite.
    """
    down = chunk * layout.pp + rank
    up = (chunk + 1) * layout.pp - 1 - rank
    goes_up = (chunk % 2 == 1) & (layout.is_v_shaped | layout.is_bidirectional)
    return np.where(goes_up, up - layout.pp * layout.is_bidirectional, down)


def rank_stages(layout: Layout, rank: int) -> list[int]:
    """The virtual stages that one pipeline rank holds, by chunk."""
    return [int(chunk_stage(layout, rank, chunk)) for chunk in range(chunks_a_rank(layout))]


def stage_ranks(layout: Layout) -> list[int]:
    """The pipeline rank of each virtual stage (with two copies of the stages, of the first)."""
    ranks = {
        stage: rank
        for rank in range(layout.pp)
        for stage in rank_stages(layout, rank)[: layout.vpp]
    }
    return [ranks[stage] for stage in range(layout.stages)]


def _even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    size, larger = divmod(num_layers, stages)
    return (size + 1,) * larger + (size,) * (stages - larger)


def _weighted_split(
    num_layers: int, stages: int, embedding_cost: float, head_cost: float
) -> tuple[int, ...]:
    """Gives every stage one layer, then each further layer to the stage that is cheapest so far.

    Stage costs grow by one a layer, so this greedy choice has the smallest possible maximum and
    variance. Among equally cheap stages the one with fewer layers comes first, then the earlier.
    """
    start_costs = _stage_costs((1,) * stages, embedding_cost, head_cost)
    queue = [(cost, 1, stage) for stage, cost in enumerate(start_costs)]
    heapq.heapify(queue)
    for _ in range(num_layers - stages):
        cost, layers, stage = queue[0]
        heapq.heapreplace(queue, (cost + 1, layers + 1, stage))
    return tuple(layers for _, layers, _ in sorted(queue, key=lambda entry: entry[2]))


def _stage_costs(layers: tuple[int, ...], embedding_cost: float, head_cost: float) -> list[float]:
    costs = [float(count) for count in layers]
    costs[0] += embedding_cost
    costs[-1] += head_cost
    return costs


def _refuse_empty_stages(num_layers: int, stages: int) -> None:
    if not 1 <= stages <= num_layers:
        raise UserError(
            f"{num_layers} layers cannot fill {stages} pipeline stages (pp * vpp) with at least "
            f"one layer each: the largest pp * vpp that works is {num_layers}"
        )
