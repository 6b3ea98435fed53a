"""A run compared with its plan, for the terminal; rows as in the run's report.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from fivefold.report.tables import ledger_difference
from fivefold.report.text import Row, format_bytes, format_seconds, make_table, part_name

SHOWN = 0.0005
"""Share of the step from which a part is shown."""


def plan_vs_run_report(report: Row) -> Iterator[RenderableType]:
    """What is printed at the end of a run."""
    yield seconds_table(report)
    yield ""
    yield from _notes(report)


def seconds_table(report: Row) -> Table:
    """Where a step's seconds went, and the memory."""
    steps = f"mean of {report['steps']:,} steps" if report["steps"] > 1 else "1 step"
    who = "all ranks" if report["pp_rank"] is None else f"pipeline rank {report['pp_rank']}"
    title = f"Time per step: {who}, {steps}"
    table = make_table("part", ">predicted", ">measured", ">share", title=title)
    step = report["step_s"]
    for row in report["seconds"]:
        sides = row["predicted_s"], row["measured_s"]
        whole = step["predicted"] or step["measured"], step["measured"]
        if any(s is not None and s >= SHOWN * all_s for s, all_s in zip(sides, whole, strict=True)):
            share = "" if sides[1] is None else f"{sides[1] / step['measured']:.1%}"
            table.add_row(part_name(row["part"]), *map(_seconds, sides), share)
    table.add_section()
    table.add_row("step", _seconds(step["predicted"]), _seconds(step["measured"]), "")
    memory = report["memory"]
    sizes = memory["predicted_bytes"], memory["measured_bytes"]
    table.add_row("peak memory per rank", *map(_bytes, sizes), "")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def _notes(report: Row) -> Iterator[str]:
    differences: Sequence[Row] = report["ledger_differences"]
    if differences:
        yield from map(ledger_difference, differences[:5])
        yield "[bold red]Measured bytes differ from the plan (last step).[/]"
    elif report["ledger"]:
        yield "Measured bytes match the plan exactly on every rank (last step)."
    if report["imbalance"] is not None:
        planned = report["step_s"]["predicted"] is not None
        yield (
            f"Expert imbalance in the last micro-batch: {report['imbalance']:.2f}x "
            "(max/mean tokens per rank)." + (" The prediction uses this value." if planned else "")
        )
    if report["device"] == "cuda":
        yield (
            "Times are host times. The host does not wait for a message that it issues to a GPU: "
            "time spent waiting on the GPU counts as compute."
        )
    if report["step_s"]["predicted"] is None:
        yield "Run `fivefold calibrate` to measure this machine: predicted times then appear too."
