from __future__ import annotations

import json

from fivefold.layout.notation import parse
from fivefold.ledger import Ledger, Transfer
from fivefold.parallel.cost import ledger
from fivefold.verify.ledgers import ledger_rows
from tests.parallel.dry import tiny_mixture


def gradients(calls: int, size: int = 4_000_000) -> Transfer:
    return Transfer("dp", "backward", "all_reduce", 2, size, calls)


def test_equal_ledgers_agree_in_every_row():
    rows = ledger_rows(Ledger([gradients(3)]), Ledger([gradients(3)]))
    assert rows == [
        {
            "split": "dp",
            "phase": "backward",
            "op": "all_reduce",
            "group_size": 2,
            "payload_bytes": 4_000_000,
            "routed": False,
            "predicted_calls": 3,
            "predicted_bytes": 12_000_000,
            "predicted_wire_bytes": 12_000_000,
            "measured_calls": 3,
            "measured_bytes": 12_000_000,
            "measured_wire_bytes": 12_000_000,
            "agrees": True,
        }
    ]


def test_a_row_that_only_one_ledger_has_stands_with_zero_and_does_not_agree():
    rows = ledger_rows(Ledger([gradients(1)]), Ledger([gradients(1, size=8)]))
    assert [(r["payload_bytes"], r["predicted_calls"], r["measured_calls"]) for r in rows] == [
        (4_000_000, 1, 0),
        (8, 0, 1),
    ]
    assert not any(row["agrees"] for row in rows)


def test_a_routed_row_with_the_same_calls_and_other_bytes_does_not_agree():
    plan = Transfer("ep", "forward", "all_to_all", 4, 100.0, 2, routed=True)
    run = Transfer("ep", "forward", "all_to_all", 4, 101.5, 2, routed=True)
    (row,) = ledger_rows(Ledger([plan]), Ledger([run]))
    assert (row["predicted_bytes"], row["measured_bytes"], row["agrees"]) == (200, 203, False)


def test_the_mean_of_ledgers_is_exact_for_any_number_of_ranks() -> None:
    def routed(size: float) -> Ledger:
        return Ledger([Transfer("ep", "forward", "all_gather", 2, size, 3, routed=True)])

    assert Ledger.mean([routed(100), routed(101), routed(99)]) == routed(100)


def test_rows_are_json_where_tp_is_above_the_kv_heads() -> None:
    sent = ledger(tiny_mixture(), parse("tp8 dp2"), 48, 0, "bf16")
    rows = ledger_rows(sent, sent)
    assert any(row["group_size"] == 2 for row in rows)
    assert json.loads(json.dumps(rows)) == rows
