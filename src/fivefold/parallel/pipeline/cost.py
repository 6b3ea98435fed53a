"""Pipeline parallelism: what it sends.

Each micro-batch's hidden states go to the next stage and their gradient comes back; with megatron
SP each tp rank has, and sends, a slice of the sequence only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.ledger import Transfer
from fivefold.model.weights import embedding_weight
from fivefold.parallel.workload import FP32, RankWorkload


def transfers(work: RankWorkload) -> Iterator[Transfer]:
    """Messages of one step. A send has two ranks: sender and receiver."""
    layout, m = work.layout, work.micro_batches
    payload = work.hidden_bytes // layout.sp_degree
    yield Transfer("pp", "forward", "send", 2, payload, m * work.sends_on, axis="pp")
    yield Transfer("pp", "backward", "send", 2, payload, m * work.sends_back, axis="pp")
    if np.any(work.reduces_tied_embedding):
        gradient = work.sizes(embedding_weight(work.config)).gradient * FP32
        calls = work.reduces_tied_embedding & (gradient > 0)  # an uneven split's last part is empty
        yield Transfer("pp", "optimizer", "all_reduce", 2, gradient, calls * 1, axis="pp")
