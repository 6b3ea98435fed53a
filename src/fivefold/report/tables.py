"""Tables for the terminal, made of plain data: the same rows that `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fivefold.layout import ranks
from fivefold.layout.notation import Layout

DIFFERENCES = {
    "loss_rel_diff": "loss of the first step, relative",
    "balance_loss_rel_diff": "balance loss of the first step, relative",
    "grad_norm_rel_diff": "gradient norm of the first step, relative",
    "max_grad_rel_diff": "any gradient of the first step, relative",
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


def ledger_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A table for each pipeline rank, one for those that send the same; `rows` as of
    `train.check.ledger_rows`, each with its `pp_rank`."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        own = {key: value for key, value in row.items() if key != "pp_rank"}
        by_rank.setdefault(row["pp_rank"], []).append(own)
    alike: list[tuple[list[int], list[dict[str, Any]]]] = []
    for pp_rank, own_rows in by_rank.items():
        same = next((ranks for ranks, others in alike if others == own_rows), None)
        if same is None:
            alike.append(([pp_rank], own_rows))
        else:
            same.append(pp_rank)
    if len(by_rank) == 1:
        return [ledger_table(own_rows, "One rank") for _, own_rows in alike]
    return [
        ledger_table(own_rows, f"A rank of pipeline rank {', '.join(map(str, ranks))}")
        for ranks, own_rows in alike
    ]


def ledger_table(rows: Sequence[Mapping[str, Any]], who: str) -> Table:
    """What `who` sends in one step, predicted beside measured: calls x bytes of a call; `rows` as
    of `train.check.ledger_rows`."""
    table = plain_table(f"{who}, one optimizer step")
    table.add_column("split")
    table.add_column("phase")
    table.add_column("operation")
    for column in ("group", "predicted", "measured", "wire"):
        table.add_column(column, justify="right")
    for above, row in zip([None, *rows], rows, strict=False):
        same_split = above is not None and above["split"] == row["split"]
        table.add_row(
            "" if same_split else row["split"],
            row["phase"],
            row["op"],
            str(row["group_size"]),
            _calls(row, "predicted"),
            _calls(row, "measured"),
            format_bytes(row["measured_wire_bytes"]),
            style="" if row["agrees"] else "bold red",
        )
    table.add_section()
    splits = list(dict.fromkeys(row["split"] for row in rows))
    for split in splits if len(splits) > 1 else []:
        _add_total(table, f"all {split}", [row for row in rows if row["split"] == split])
    _add_total(table, "all", rows)
    return table


def _calls(row: Mapping[str, Any], side: str) -> str:
    """`16 x 262 KB`; to the last byte where the two sides differ."""
    calls = row[f"{side}_calls"]
    if calls == 0:
        return "-"
    payload = row[f"{side}_bytes"] / calls
    size = format_bytes(payload) if row["agrees"] else f"{payload:,.12g} B"
    return f"{calls:g} x {size}"


def _add_total(table: Table, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    totals = {
        key: sum(row[key] for row in rows)
        for key in ("predicted_bytes", "measured_bytes", "measured_wire_bytes")
    }
    table.add_row("", name, "", "", *map(format_bytes, totals.values()))


def check_report_table(report: Mapping[str, Any]) -> Table:
    """How far the layout is from one process: the keys of `DIFFERENCES` in `report`, in words."""
    steps = f"{report['steps']} step{'s' if report['steps'] > 1 else ''}"
    table = plain_table(f"{report['layout']} against one process, {steps}")
    table.add_column("largest difference in")
    for column in ("found", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("same")
    names = {
        "max_grad_rel_diff": report["worst_gradient"],
        "max_weight_abs_diff": report["worst_weight"],
    }
    for key, words in DIFFERENCES.items():
        found, limit = report[key], report["limits"].get(key)
        if found and key in names:
            words += f"\n  {names[key]}"
        table.add_row(
            words,
            "not finite" if found is None else f"{found:.1e}",
            "" if limit is None else f"{limit:.0e}",
            "" if limit is None else _verdict(found is not None and found <= limit),
        )
    differing = report["differing_replicas"]
    words = "copies on different ranks" + "".join(f"\n  {name}" for name in differing[:5])
    table.add_row(words, f"{len(differing)} differ", "0", _verdict(not differing))
    return table


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What weights, gradients and optimizer state take on a rank after a step."""
    table = plain_table("memory of a rank after a step")
    table.add_column("pp", justify="right")
    table.add_column("what")
    for column in ("predicted", "measured"):
        table.add_column(column, justify="right")
    table.add_column("within 1 %")
    for row in rows:
        sizes = (format_bytes(row["predicted_bytes"]), format_bytes(row["measured_bytes"]))
        table.add_row(str(row["pp_rank"]), row["kind"], *sizes, _verdict(row["agrees"]))
    return table


def trace_memory_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """What ranks hold at their peak, by kind; `ranks` as of `train.trace.trace_report`."""
    table = plain_table("memory of a rank at its peak")
    table.add_column("pp", justify="right")
    table.add_column("what")
    for column in ("predicted", "traced", "difference"):
        table.add_column(column, justify="right")
    for rank in ranks:
        for row in rank["memory"]:
            difference = row["predicted_bytes"] - row["measured_bytes"]
            table.add_row(
                _span(rank["pp_ranks"]) if row["kind"] == "weights" else "",
                row["kind"],
                format_bytes(row["predicted_bytes"]),
                format_bytes(row["measured_bytes"]),
                f"{difference / rank['memory'][-1]['measured_bytes']:+.2%}",
                style="" if row["agrees"] else "bold red",
                end_section=row["kind"] == "all",
            )
    return table


def trace_notes(report: Mapping[str, Any]) -> list[str]:
    """Where the peaks are, and what came out."""
    notes = [f"pp {_span(rank['pp_ranks'])}: {rank['moment']}" for rank in report["ranks"]]
    if report["ok"]:
        notes.append(
            f"{report['layout']}, {report['world_size']:,} ranks: sends as planned, to the byte, "
            "and takes as much memory."
        )
    else:
        notes.append(f"[bold red]{report['layout']}: not as planned.[/]")
    return notes


def _span(numbers: Sequence[int]) -> str:
    """`1-14`, or `1, 3-5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def check_report_notes(report: Mapping[str, Any]) -> list[str]:
    """How it was compared, and what came out, a sentence each."""
    optimizer = report["optimizer"]
    notes = [
        f"AdamW with lr {optimizer['lr']:g} (constant), eps {optimizer['eps']:g} and clipping at "
        f"{optimizer['clip']:g}, whatever the run says; in fp32; one process took "
        f"{report['one_process_s']:.1f} s, the layout {report['layout_s']:.1f} s."
    ]
    if report["precision"] != "fp32":
        notes.append(f"The messages are those of a step in {report['precision']}.")
    if report["rerouted_seeds"]:
        seeds = ", ".join(map(str, report["rerouted_seeds"]))
        notes.append(
            f"With seed {seeds} tokens chose another expert, as rounding may decide in a near-tie; "
            f"this is seed {report['seed']}."
        )
    notes += [
        f"In step {it['step']}, layer {it['layer']}, {it['tokens']} of {it['of']:,} choices of an "
        "expert fell otherwise, as rounding may decide in a near-tie."
        for it in report["rerouted"][:5]
    ]
    notes += map(ledger_difference, report["ledger_differences"][:5])
    if report["ok"]:
        notes.append(f"{report['layout']} computes what one process does, and sends as planned.")
    else:
        notes.append("[bold red]Not the same.[/]")
    return notes


def ledger_difference(row: Mapping[str, Any]) -> str:
    """A row that the plan and the run do not share, as of `train.check.compare_ledgers`."""
    who = f"pipeline rank {row['pp_rank']}" if row["rank"] is None else f"rank {row['rank']}"
    return (
        f"[bold red]{who}: {row['split']} {row['phase']} {row['op']} of "
        f"{row['payload_bytes']:,g} bytes over {row['group_size']}: "
        f"{row['predicted_calls']:g} calls predicted, {row['measured_calls']:g} measured[/]"
    )


def layout_table(layout: Layout) -> Table:
    """The axes of a layout that have more than one rank, and the groups of ranks along each."""
    table = plain_table(None)
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


def layout_report(layout: Layout) -> dict[str, Any]:
    """Plain data, as `--json` prints it."""
    listed = layout.world_size <= LARGEST_LISTED
    return {
        "layout": str(layout),
        "meaning": layout.describe(),
        "world_size": layout.world_size,
        "global_batch": layout.global_batch,
        "degrees": degrees(layout),
        "groups": {axis: ranks.groups(layout, axis).tolist() for axis in AXES if listed},
    }


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


def plain_table(title: str | None) -> Table:
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
