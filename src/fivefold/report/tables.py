"""The tables of `check`, `trace` and `layout`, made of the same data that `--json` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fivefold.layout import ranks
from fivefold.layout.notation import Layout
from fivefold.report.text import (
    Row,
    format_bytes,
    make_table,
    op_name,
    span,
    split_name,
    traffic_name,
    verdict,
)
from fivefold.results import LayoutResult

DIFFERENCES = {
    "loss_rel_diff": "loss, first step, relative",
    "balance_loss_rel_diff": "balance loss, first step, relative",
    "grad_norm_rel_diff": "gradient norm, first step, relative",
    "max_grad_rel_diff": "any gradient, first step, relative",
    "max_grad_abs_diff": "any gradient, first step",
    "max_weight_abs_diff": "any weight, last step",
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
"""The largest world whose groups are listed. The list of a larger one would take minutes."""


def ledger_tables(rows: Sequence[Row]) -> list[Table]:
    """One table per pipeline rank, and a common one for those that send the same. `rows` are those
    of `verify.ledgers.ledger_rows`, each with its `pp_rank`."""
    by_rank: dict[int, list[Row]] = {}
    for row in rows:
        own = {key: value for key, value in row.items() if key != "pp_rank"}
        by_rank.setdefault(row["pp_rank"], []).append(own)
    alike: list[tuple[list[int], list[Row]]] = []
    for pp_rank, own_rows in by_rank.items():
        same = next((ranks for ranks, others in alike if others == own_rows), None)
        if same is None:
            alike.append(([pp_rank], own_rows))
        else:
            same.append(pp_rank)
    if len(by_rank) == 1:
        return [ledger_table(own_rows, "one rank") for _, own_rows in alike]
    return [
        ledger_table(own_rows, f"a rank on pipeline rank {span(ranks)}")
        for ranks, own_rows in alike
    ]


def ledger_table(rows: Sequence[Row], who: str) -> Table:
    """What `who` sends in one step, predicted and measured: calls x bytes per call. `rows` are
    those of `verify.ledgers.ledger_rows`."""
    table = make_table(
        "split",
        "phase",
        "operation",
        ">ranks",
        ">predicted",
        ">measured",
        ">wire",
        title=f"Messages of {who} per step",
    )
    for above, row in zip([None, *rows], rows, strict=False):
        same_split = above is not None and above["split"] == row["split"]
        table.add_row(
            "" if same_split else traffic_name(row["split"], rows),
            row["phase"],
            op_name(row["op"]),
            str(row["group_size"]),
            _calls(row, "predicted"),
            _calls(row, "measured"),
            format_bytes(row["measured_wire_bytes"]),
            style="" if row["agrees"] else "bold red",
        )
    table.add_section()
    splits = list(dict.fromkeys(row["split"] for row in rows))
    for split in splits if len(splits) > 1 else []:
        _add_total(table, split_name(split), [row for row in rows if row["split"] == split])
    _add_total(table, "", rows)
    return table


def _calls(row: Row, side: str) -> str:
    """`16 x 262 KB`. Where the two sides differ, to the last byte."""
    calls = row[f"{side}_calls"]
    if calls == 0:
        return "-"
    payload = row[f"{side}_bytes"] / calls
    size = format_bytes(payload) if row["agrees"] else f"{payload:,.12g} B"
    return f"{calls:g} x {size}"


def _add_total(table: Table, split: str, rows: Sequence[Row]) -> None:
    totals = {
        key: sum(row[key] for row in rows)
        for key in ("predicted_bytes", "measured_bytes", "measured_wire_bytes")
    }
    table.add_row("total", split, "", "", *map(format_bytes, totals.values()))


def check_report_table(report: Row) -> Table:
    """How far the layout is from one process: the keys of `DIFFERENCES` in `report`."""
    steps = f"{report['steps']} step{'s' if report['steps'] > 1 else ''}"
    table = make_table(
        "largest difference",
        ">found",
        ">allowed",
        "same",
        title=f"{report['layout']} compared with one process, {steps}",
    )
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
            "" if limit is None else verdict(found is not None and found <= limit),
        )
    differing = report["differing_replicas"]
    words = "copies on different ranks" + "".join(f"\n  {name}" for name in differing[:5])
    table.add_row(words, f"{len(differing)} differ", "0", verdict(not differing))
    return table


def memory_table(rows: Sequence[Row]) -> Table:
    """What weights, gradients and optimizer state take on a rank after a step."""
    table = make_table(
        ">pp rank",
        "kind",
        ">predicted",
        ">measured",
        "within 1%",
        title="Memory of a rank after a step",
    )
    for row in rows:
        sizes = (format_bytes(row["predicted_bytes"]), format_bytes(row["measured_bytes"]))
        table.add_row(str(row["pp_rank"]), row["kind"], *sizes, verdict(row["agrees"]))
    return table


def trace_memory_table(ranks: Sequence[Row]) -> Table:
    """What ranks hold at their peak, by kind. `ranks` are those of `verify.trace.trace_report`."""
    table = make_table(
        ">pp rank",
        "kind",
        ">predicted",
        ">traced",
        ">difference",
        title="Peak memory of a rank",
    )
    for rank in ranks:
        for row in rank["memory"]:
            difference = row["predicted_bytes"] - row["measured_bytes"]
            table.add_row(
                span(rank["pp_ranks"]) if row["kind"] == "weights" else "",
                "total" if row["kind"] == "all" else row["kind"],
                format_bytes(row["predicted_bytes"]),
                format_bytes(row["measured_bytes"]),
                f"{difference / rank['memory'][-1]['measured_bytes']:+.2%}",
                style="" if row["agrees"] else "bold red",
                end_section=row["kind"] == "all",
            )
    return table


def trace_notes(report: Row) -> list[str]:
    """Where the peaks are, and the result."""
    notes = [
        f"The peak of pp rank {span(rank['pp_ranks'])} is in the {rank['moment']}."
        for rank in report["ranks"]
    ]
    if report["ok"]:
        notes.append(
            f"{report['layout']} on {report['world_size']:,} ranks sends what the plan predicts, "
            "to the byte, and its memory is within 3% of the plan."
        )
    else:
        notes.append(f"[bold red]{report['layout']} does not agree with the plan.[/]")
    return notes


def check_report_notes(report: Row) -> list[str]:
    """How the layout was compared, and the result."""
    optimizer = report["optimizer"]
    notes = [
        f"Compared in fp32 with AdamW: lr {optimizer['lr']:g} (constant), eps "
        f"{optimizer['eps']:g}, clipping at {optimizer['clip']:g}. The run file's optimizer is not "
        f"used. One process took {report['one_process_s']:.1f} s, the layout "
        f"{report['layout_s']:.1f} s."
    ]
    if report["precision"] != "fp32":
        notes.append(f"The messages were measured in {report['precision']}.")
    if report["rerouted_seeds"]:
        seeds = ", ".join(map(str, report["rerouted_seeds"]))
        notes.append(
            f"With seed {seeds}, tokens chose another expert: rounding decides between nearly "
            f"equal probabilities. The comparison uses seed {report['seed']}."
        )
    notes += [
        f"In step {it['step']}, layer {it['layer']}, {it['tokens']} of {it['of']:,} choices of an "
        "expert differ: rounding decides between nearly equal probabilities."
        for it in report["rerouted"][:5]
    ]
    notes += map(ledger_difference, report["ledger_differences"][:5])
    if report["ok"]:
        notes.append(
            f"{report['layout']} computes what one process computes, and sends what the plan "
            "predicts."
        )
    else:
        notes.append("[bold red]The layout differs from one process or from its plan.[/]")
    return notes


def ledger_difference(row: Row) -> str:
    """A row of `verify.ledgers.compare_ledgers`, in which the plan and the run differ."""
    who = f"pipeline rank {row['pp_rank']}" if row["rank"] is None else f"rank {row['rank']}"
    return (
        f"[bold red]{who}: {split_name(row['split'])} {row['phase']} {op_name(row['op'])} of "
        f"{row['payload_bytes']:,g} bytes over {row['group_size']} ranks: "
        f"{row['predicted_calls']:g} calls predicted, {row['measured_calls']:g} measured[/]"
    )


def layout_table(layout: Layout) -> Table:
    """The axes of a layout that have more than one rank, and the groups of ranks along each."""
    table = make_table("axis", ">degree", "splits", "groups of ranks")
    has_experts = layout.ep > 1 or layout.etp > 1
    for axis, splits in AXES.items():
        degree = getattr(layout, axis)
        if degree == 1 or (axis == "edp" and not has_experts):
            continue
        if axis == "tp" and layout.sp:
            splits += ", and the sequence (sp)"
        groups = _first_groups(layout, axis) if layout.world_size <= LARGEST_LISTED else ""
        table.add_row(axis, str(degree), splits, groups)
    return table


def layout_report(layout: Layout) -> LayoutResult:
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
