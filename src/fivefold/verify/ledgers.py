"""What was sent, compared with what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.layout.notation import Layout
from fivefold.layout.ranks import groups
from fivefold.ledger import Ledger, Transfer
from fivefold.model.config import ModelConfig
from fivefold.parallel.cost import ledger as predicted_ledger

Row = dict[str, Any]
"""A row of a report: plain data with stable keys."""


def compare_ledgers(
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    precision: str,
    measured: Sequence[Ledger],
) -> tuple[list[Row], list[Row]]:
    """Compare what each rank sent with its plan, `measured` by rank.

    Returns the rows of an average rank of each pipeline rank, and the rows that differ: those of
    single ranks, except for transfers whose size the router decides, which are predicted as a mean.
    """
    predicted = [
        predicted_ledger(config, layout, sequence_length, rank, precision)
        for rank in range(layout.world_size)
    ]
    rows, differences = [], []
    for pp_rank, ranks in enumerate(groups(layout, "stage").tolist()):
        means = [Ledger.mean([ledgers[r] for r in ranks]) for ledgers in (predicted, measured)]
        stage_rows = [{"pp_rank": pp_rank, **row} for row in ledger_rows(*means)]
        rows += stage_rows
        for rank in ranks:
            own_rows = ledger_rows(_fixed(predicted[rank]), _fixed(measured[rank]))
            differences += [
                {"pp_rank": pp_rank, "rank": rank, **row} for row in own_rows if not row["agrees"]
            ]
        differences += [
            {"rank": None, **row} for row in stage_rows if row["routed"] and not row["agrees"]
        ]
    return rows, differences


def _fixed(ledger: Ledger) -> Ledger:
    """Without the transfers whose size the router decides."""
    return Ledger(transfer for transfer in ledger if not transfer.routed)


def ledger_rows(predicted: Ledger, measured: Ledger) -> list[Row]:
    """The rows of two ledgers, paired; a count is 0 where a ledger has no such row.

    `payload_bytes` is that of one call; the other bytes are those of all calls, `wire_bytes` what
    leaves the rank. A `routed` payload is a mean (see fivefold.ledger).
    """
    rows = []
    for plan, run in predicted.align(measured):
        transfer = plan or run
        assert transfer is not None  # there is a row only where a ledger has one
        rows.append(
            {
                "split": transfer.split,
                "phase": transfer.phase,
                "op": transfer.op,
                "group_size": int(transfer.group_size),  # numpy's, where tp repeats kv heads
                "payload_bytes": transfer.payload_bytes,
                "routed": transfer.routed,
                **_side("predicted", plan),
                **_side("measured", run),
                "agrees": plan == run,
            }
        )
    return rows


def _side(name: str, transfer: Transfer | None) -> dict[str, float]:
    return {
        f"{name}_calls": transfer.calls if transfer else 0,
        f"{name}_bytes": transfer.total_bytes if transfer else 0,
        f"{name}_wire_bytes": transfer.wire_bytes if transfer else 0,
    }
