"""Pipeline parallelism: what it sends.

Each micro-batch's hidden states go to the next stage and their gradient comes back; with megatron
SP each tp rank has, and sends, a slice of the sequence only.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.ledger import Transfer
from fivefold.parallel.work import FP32, Work, embedding_weight


def transfers(work: Work) -> Iterator[Transfer]:
    """Messages of one chunk in one step. A send has two ranks: sender and receiver."""
    layout, m = work.layout, work.micro_batches
    payload = work.hidden_bytes // layout.tp if layout.sp else work.hidden_bytes
    pipelined = layout.pp > 1
    yield Transfer("pp", "forward", "send", 2, payload, m * (not work.last) * pipelined)
    yield Transfer("pp", "backward", "send", 2, payload, m * (not work.first) * pipelined)
    if work.holds_tied_copy:
        payload = embedding_weight(work.config).gradient_elements(work) * FP32
        yield Transfer("pp", "optimizer", "all_reduce", 2, payload, 1)
