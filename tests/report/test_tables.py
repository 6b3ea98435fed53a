from __future__ import annotations

import math
from typing import Any

import pytest

from fivefold.layout.notation import parse
from fivefold.ledger import Ledger, Transfer
from fivefold.report.tables import (
    check_report_notes,
    check_report_table,
    layout_table,
    ledger_table,
    ledger_tables,
)
from fivefold.report.text import format_bytes
from fivefold.verify.check import CheckReport
from fivefold.verify.ledgers import ledger_rows
from fivefold.verify.parity import Comparison
from tests.helpers import line_with, printed


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (1024, "1.02 KB"),
        (999_499, "999 KB"),
        (999_500, "1.00 MB"),
        (9_994_999, "9.99 MB"),
        (9_995_000, "10.0 MB"),
        (1_500_000_000, "1.50 GB"),
        (2**40, "1.10 TB"),
        (12.5, "12.5 B"),
        (5e18, "5,000 PB"),
    ],
)
def test_bytes_have_three_digits_and_powers_of_1000(count, text):
    assert format_bytes(count) == text


def gradients(calls: int, size: int = 4_000_000) -> Transfer:
    return Transfer("dp", "backward", "all_reduce", 2, size, calls)


SEND = Transfer("pp", "forward", "send", 2, 1000, 4)


def test_the_ledger_table_shows_predicted_and_measured_and_a_total_per_split():
    rows = ledger_rows(Ledger([gradients(3), SEND]), Ledger([gradients(2), SEND]))
    text = printed(ledger_table(rows, "Rank 7"))
    assert text.startswith("Messages of Rank 7 per step")
    different = "DP backward all-reduce 2 3 x 4,000,000 B 2 x 4,000,000 B 8.00 MB"
    assert " ".join(line_with(text, "all-reduce").split()) == different
    equal = "PP forward send 2 4 x 1.00 KB 4 x 1.00 KB 4.00 KB"
    assert " ".join(line_with(text, "send").split()) == equal
    assert line_with(text, "total", "DP").split()[2:] == ["12.0", "MB", "8.00", "MB", "8.00", "MB"]
    assert line_with(text, "total", "PP").split()[2:] == ["4.00", "KB", "4.00", "KB", "4.00", "KB"]
    assert text.splitlines()[-1].split()[1:] == ["12.0", "MB", "8.00", "MB", "8.00", "MB"]


def test_the_ledger_table_is_whole_at_80_columns():
    rows = ledger_rows(
        *[Ledger([Transfer("tp", "backward", "reduce_scatter", 16384, 134_217_728, 20)])] * 2
    )
    text = printed(ledger_table(rows, "one rank"), width=80)
    assert "TP backward reduce-scatter 16384 20 x 134 MB 20 x 134 MB 2.68 GB" in (
        " ".join(line.split()) for line in text.splitlines()
    )


def test_a_difference_of_one_byte_is_visible():
    rows = ledger_rows(Ledger([gradients(1)]), Ledger([gradients(1, size=4_000_001)]))
    text = printed(ledger_table(rows, "One rank"))
    assert "1 x 4,000,000 B - 0 B" in line_with(text, "4,000,000 B")
    assert "- 1 x 4,000,001 B" in line_with(text, "4,000,001 B")


def test_pipeline_ranks_that_send_the_same_share_a_table():
    rows = []
    for pp_rank, transfers in enumerate([[SEND], [SEND, gradients(1)], [SEND]]):
        ledger = Ledger(transfers)
        rows += [{"pp_rank": pp_rank, **row} for row in ledger_rows(ledger, ledger)]
    assert [table.title for table in ledger_tables(rows)] == [
        "Messages of a rank on pipeline rank 0, 2 per step",
        "Messages of a rank on pipeline rank 1 per step",
    ]
    (table,) = ledger_tables([row for row in rows if row["pp_rank"] == 0])
    assert table.title == "Messages of one rank per step"


def report(**changes) -> dict[str, Any]:
    """A report of fivefold.verify.check."""
    comparison = Comparison(
        loss_rel_diff=2e-7,
        balance_loss_rel_diff=0.0,
        grad_norm_rel_diff=3e-4,
        max_grad_abs_diff=4e-9,
        max_grad_rel_diff=1e-6,
        worst_gradient="lm_head.weight",
        max_weight_abs_diff=math.nan,
        worst_weight="model.norm.weight",
        differing_replicas=["model.norm.weight"],
        rerouted=[{"step": 2, "layer": 3, "tokens": 1, "of": 8192}],
    )
    row = ledger_rows(Ledger([SEND]), Ledger())[0]
    whole = CheckReport(
        layout=parse("tp2"),
        steps=5,
        precision="bf16",
        comparison=comparison,
        ledger=[],
        ledger_differences=[{"pp_rank": 1, "rank": 4, **row}],
        memory=[],
        seed=2,
        rerouted_seeds=[0, 1],
        one_process_s=1.5,
        layout_s=2.5,
    )
    return {**whole.as_dict(), **changes}


def test_the_check_table_holds_each_difference_against_its_limit():
    text = printed(check_report_table(report()))
    assert text.startswith("tp2 compared with one process, 5 steps")
    assert "2.0e-07    1e-05  yes" in text.splitlines()[3]
    assert line_with(text, "gradient norm").split()[-3:] == ["3.0e-04", "1e-05", "NO"]
    assert line_with(text, "any gradient", "relative").split()[-3:] == ["1.0e-06", "1e-05", "yes"]
    assert line_with(text, "any gradient, first step  ").split()[-1] == "4.0e-09"
    assert line_with(text, "any weight").split()[-4:] == ["not", "finite", "1e-05", "NO"]
    assert line_with(text, "copies").split()[-4:] == ["1", "differ", "0", "NO"]


def test_the_notes_of_a_check_say_how_it_was_made_and_what_differs():
    notes = check_report_notes(report())
    assert "AdamW: lr 0.001 (constant), eps 1e-06, clipping at 1." in notes[0]
    text = "\n".join(notes)
    assert "measured in bf16" in text and "With seed 0, 1, tokens chose another expert" in text
    assert "In step 2, layer 3, 1 of 8,192 choices of an expert differ" in text
    assert (
        "rank 4: PP forward send of 1,000 bytes over 2 ranks: 4 calls predicted, 0 measured" in text
    )
    assert "The layout differs from one process or from its plan." in notes[-1]
    assert check_report_notes(report(ok=True))[-1].startswith(
        "tp2 computes what one process computes"
    )


def test_the_layout_table_has_a_row_for_each_axis_with_its_groups_of_ranks():
    text = printed(layout_table(parse("tp2 pp2 dp2 ep2")))
    assert "0 1, 2 3, 4 5, 6 7" in line_with(text, "tp", " 2 ")
    assert "0 4, 1 5, 2 6, 3 7" in line_with(text, "pp", " 2 ")
    assert "0 2, 1 3, 4 6, 5 7" in line_with(text, "edp", " 2 ")
    assert "ring" not in text and "etp" not in text


def test_long_groups_are_cut_and_a_row_stays_a_line():
    text = printed(layout_table(parse("tp8 dp64")))
    assert "0 1 2 .. 7, 8 9 10 .. 15, .. 64 groups" in line_with(text, "tp")


def test_a_layout_too_large_to_list_its_ranks_is_shown_without_them():
    text = printed(layout_table(parse("tp1000 dp1000000")))
    assert "1000" in line_with(text, "tp") and "0 1" not in text
