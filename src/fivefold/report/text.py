"""Numbers, names and tables as the terminal shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

Row = Mapping[str, Any]
"""A part of what `--json` prints. Its keys are those of the program's JSON."""

SPLIT_NAMES = {"dp": "DP", "pp": "PP", "tp": "TP", "cp": "CP", "ep": "EP", "world": "world"}

PART_NAMES = {
    "slowed": "compute slowed by messages",
    "data": "reading data",
    "world": "waiting for the last rank",
    "bubble": "bubble (waiting for a stage)",
}
"""Parts of a step's seconds that their key does not explain."""


def make_table(*columns: str, title: str | None = None) -> Table:
    """A table that is narrow enough for 80 columns.

    A column whose name begins with `>` holds numbers: aligned to the right, never wrapped.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in columns:
        numbers = name.startswith(">")
        table.add_column(
            name.removeprefix(">"),
            justify="right" if numbers else "left",
            no_wrap=numbers,
            overflow="fold",
        )
    return table


def verdict(agrees: bool) -> str:
    return "yes" if agrees else "[bold red]NO[/]"


# --- numbers -----------------------------------------------------------------------------------


def three_digits(value: float) -> str:
    """`7.92`, `21.6` or `1,094`."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def format_bytes(count: float) -> str:
    """`1.50 MB`: three digits, and units that are powers of 1000. Whole bytes have no fraction."""
    if abs(count) < 999.5 and count == int(count):
        return f"{int(count)} B"
    return _scaled(count, ("B", "KB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """`406 B`: thousands, millions, billions (B), trillions (T) of something."""
    if abs(count) < 1e6:
        return f"{count:,.0f}"
    return _scaled(count, ("", "K", "M", "B", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """`value` in the first unit that leaves less than 1000."""
    power = 0
    # 999.5 would be printed as 1000, which is 1.00 of the next unit.
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{three_digits(value)} {units[power]}"


def format_seconds(value: float) -> str:
    """`7.92 s`, `312 ms` or `45.0 us`: three digits."""
    if value == 0:
        return "0"
    size, unit = time_unit(value)
    return f"{three_digits(value / size)} {unit}"


def time_unit(value: float) -> tuple[float, str]:
    """Seconds of the unit in which a duration is shown, and its name."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:
            return size, unit
    return 1e-6, "us"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def percent(ratio: float) -> str:
    """`+22.8%`: how much more than 1 a ratio is."""
    return f"{ratio - 1:+.1%}"


# --- names -------------------------------------------------------------------------------------


def split_name(split: str) -> str:
    return SPLIT_NAMES.get(split, split)


def op_name(op: str) -> str:
    """`reduce-scatter`"""
    return op.replace("_", "-")


def traffic_name(split: str, rows: Iterable[Row]) -> str:
    """A split as the rows of a ledger show it: `TP (sp)` where the messages of tensor parallelism
    are those of Megatron's sequence parallelism."""
    gathers = (row for row in rows if row["split"] == split == "tp" and row["op"] == "all_gather")
    return f"{split_name(split)} (sp)" if any(gathers) else split_name(split)


def part_name(part: str) -> str:
    """A part of a step's seconds: `exposed_tp` or `tp` is `TP, exposed`."""
    split = part.removeprefix("exposed_")
    if part not in PART_NAMES and split in SPLIT_NAMES:
        return f"{SPLIT_NAMES[split]}, exposed"
    return PART_NAMES.get(part, part)


def span(numbers: Sequence[int]) -> str:
    """`1-14`, or `1, 3-5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
