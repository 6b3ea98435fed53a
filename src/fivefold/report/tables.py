"""Tables for the terminal, made of plain data: the same rows that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fivefold.layout import ranks
from fivefold.layout.notation import Layout
from fivefold.ledger import Ledger, Transfer

PARITY = {
    "loss_rel_diff": "loss of the first step, relative",
    "grad_norm_rel_diff": "gradient norm of the first step, relative",
    "max_grad_abs_diff": "any gradient of the first step",
    "max_weight_abs_diff": "any weight after the last step",
}
"""The differences between a layout and one process that `check` reports, by their key."""

AXES = {
    "tp": "weight matrices",
    "ulysses": "sequence, then heads",
    "ring": "sequence",
    "ep": "experts",
    "etp": "each expert's matrices",
    "edp": "samples, for experts",
    "dp": "samples",
    "pp": "layers",
}
"""What each axis of a layout splits."""

LARGEST_LISTED = 100_000
"""Ranks of a layout whose groups are still listed; the list of a larger one would take minutes."""


def format_bytes(count: float) -> str:
    """`1.50 MB`: three digits, and units that are powers of 1000."""
    return _scaled(count, ("B", "KB", "MB", "GB", "TB", "PB"), " ")


def format_count(count: float) -> str:
    """`6.74B` parameters, `15.4K` tokens: three digits and K, M, B (1e9) or T (1e12)."""
    return _scaled(count, ("", "K", "M", "B", "T"), "")


def _scaled(value: float, units: Sequence[str], space: str) -> str:
    """`value` below 1000 of the first unit it fits, with three digits; a whole one unscaled."""
    scaled, power = float(value), 0
    # 999.5 would be printed as 1000, which is 1.00 of the next unit.
    while abs(scaled) >= 999.5 and power < len(units) - 1:
        scaled, power = scaled / 1000, power + 1
    if power == 0 and scaled == int(scaled):
        text = str(int(scaled))
    elif abs(scaled) >= 99.95:
        text = f"{scaled:.0f}"
    else:
        text = f"{scaled:.2f}" if abs(scaled) < 9.995 else f"{scaled:.1f}"
    return f"{text}{space}{units[power]}".rstrip()


def ledger_rows(predicted: Ledger, measured: Ledger) -> list[dict[str, Any]]:
    """The rows of two ledgers beside each other; a count is 0 where a ledger has no such row."""
    rows = []
    for plan, run in predicted.beside(measured):
        transfer = plan or run
        assert transfer is not None  # `beside` has a row only where a ledger has one
        rows.append(
            {
                "split": transfer.split,
                "phase": transfer.phase,
                "op": transfer.op,
                "group_size": transfer.group_size,
                "payload_bytes": transfer.payload_bytes,
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
    }


def ledger_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What one rank sends in one step, `predicted = measured`; `rows` as of `ledger_rows`."""
    predicted = sum(row["predicted_bytes"] for row in rows)
    measured = sum(row["measured_bytes"] for row in rows)
    table = _table("One rank's messages in one optimizer step: predicted = measured")
    table.show_footer = True
    table.add_column("split", "total")
    table.add_column("phase")
    table.add_column("operation")
    table.add_column("group", justify="right")
    table.add_column("bytes a call", justify="right")
    table.add_column("calls", justify="right")
    table.add_column("bytes", _beside(predicted, measured, format_bytes), justify="right")
    for above, row in zip([None, *rows], rows, strict=False):
        table.add_row(
            "" if above and above["split"] == row["split"] else row["split"],
            row["phase"],
            row["op"],
            str(row["group_size"]),
            format_bytes(row["payload_bytes"]),
            _beside(row["predicted_calls"], row["measured_calls"], "{:g}".format),
            _beside(row["predicted_bytes"], row["measured_bytes"], format_bytes),
            style="" if row["agrees"] else "bold red",
        )
    return table


def _beside(predicted: float, measured: float, form: Callable[[float], str]) -> str:
    """Both numbers and whether they are equal; where they are not, to the last digit."""
    if predicted == measured:
        return f"{form(predicted)} = {form(measured)}"
    return f"{predicted:,.12g} != {measured:,.12g}"


def check_report_table(report: Mapping[str, Any]) -> Table:
    """How far the layout is from one process: the keys of `PARITY` in `report`, in words.

    `report["limits"]` may give, by the same keys, the largest difference that counts as equal.
    """
    limits = report.get("limits", {})
    table = _table(f"{report['layout']} against one process")
    table.add_column("largest difference in")
    for column in ("found", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("same")
    for key, words in PARITY.items():
        limit = limits.get(key)
        table.add_row(
            words,
            f"{report[key]:.1e}",
            "" if limit is None else f"{limit:.0e}",
            "" if limit is None else _verdict(report[key] <= limit),
        )
    return table


def layout_table(layout: Layout) -> Table:
    """The axes of a layout that have more than one rank, and the groups of ranks along each."""
    table = _table(None)
    table.add_column("axis")
    table.add_column("degree", justify="right")
    table.add_column("splits")
    table.add_column("ranks of a group", no_wrap=True)
    has_experts = layout.ep > 1 or layout.etp > 1
    for axis, splits in AXES.items():
        degree = getattr(layout, axis)
        if degree == 1 or (axis == "edp" and not has_experts):
            continue
        if axis == "tp" and layout.sp:
            splits += ", sequence (sp)"
        groups = _first_groups(layout, axis) if layout.world_size <= LARGEST_LISTED else ""
        table.add_row(axis, str(degree), splits, groups)
    return table


def degrees(layout: Layout) -> dict[str, int]:
    """Every degree of a layout, by the name of its axis."""
    return {axis: getattr(layout, axis) for axis in (*AXES, "dp_replicate", "dp_shard", "cp")}


def _first_groups(layout: Layout, axis: str) -> str:
    """`0 1 2 .. 7, 8 9 10 .. 15, .. 64 groups`"""
    rows = ranks.groups(layout, axis).tolist()
    shown = [
        " ".join(map(str, row if len(row) <= 4 else [*row[:3], "..", row[-1]])) for row in rows[:4]
    ]
    if len(rows) <= 4:
        return ", ".join(shown)
    return f"{', '.join(shown[:2])}, .. {len(rows)} groups"


def _table(title: str | None) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _verdict(agrees: bool) -> str:
    return "yes" if agrees else "[bold red]NO[/]"
