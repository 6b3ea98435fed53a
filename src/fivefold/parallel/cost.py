"""What a layout sends by arithmetic: the sum of what the five splits send. No torch."""

from __future__ import annotations

from fivefold.layout.notation import Layout
from fivefold.ledger import Ledger, Transfer
from fivefold.model.config import ModelConfig
from fivefold.parallel.context import cost as context
from fivefold.parallel.data import cost as data
from fivefold.parallel.expert import cost as expert
from fivefold.parallel.pipeline import cost as pipeline
from fivefold.parallel.tensor import cost as tensor
from fivefold.parallel.workload import rank_work

SPLIT_COSTS = (data, pipeline, tensor, context, expert)
"""Each has `transfers(work)`."""
TOTALS_BYTES = 4 * 8
"""Loss, tokens, balance loss and squared gradient norm: four fp64 numbers summed over the world."""


def ledger(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    rank: int,
    precision: str,
    mtp: bool = False,
) -> Ledger:
    """What `rank` sends in one optimizer step. `sequence_length` in tokens; `precision` of
    activations and gathered weights, "fp32" or "bf16". The layout must be legal."""
    result = Ledger()
    for work in rank_work(config, layout, sequence_length, rank, precision, mtp):
        for split in SPLIT_COSTS:
            for transfer in split.transfers(work):
                result.add(transfer)
    world_size = layout.world_size
    result.add(Transfer("world", "optimizer", "all_reduce", world_size, TOTALS_BYTES, 1))
    return result
