"""The plan beside the run, for the terminal; rows as in the run's report.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from fivefold.report.plan_tables import SPLIT_NAMES, format_seconds
from fivefold.report.tables import format_bytes, ledger_difference, plain_table

SHOWN = 0.0005
"""Share of the step from which a part is shown."""

WORDS = {
    "world": "waiting for the last rank",
    "bubble": "bubble: waiting for a stage",
    "data": "reading data",
    "other": "other",
}


def beside_report(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What stands at the end of a run."""
    yield seconds_table(report)
    yield ""
    yield from _notes(report)


def seconds_table(report: Mapping[str, Any]) -> Table:
    """Where a step's seconds went, and the memory."""
    steps = f"mean of {report['steps']:,} steps" if report["steps"] > 1 else "one step"
    who = "all ranks" if report["pp_rank"] is None else f"pipeline rank {report['pp_rank']}"
    table = plain_table(f"the plan beside the run: a step on {who}, {steps}")
    table.add_column("")
    for column in ("predicted", "measured", "of the step"):
        table.add_column(column, justify="right")
    step = report["step_s"]
    for row in report["seconds"]:
        sides = row["predicted_s"], row["measured_s"]
        whole = step["predicted"] or step["measured"], step["measured"]
        if any(s is not None and s >= SHOWN * all_s for s, all_s in zip(sides, whole, strict=True)):
            share = "" if sides[1] is None else f"{sides[1] / step['measured']:.1%}"
            table.add_row(_part(row["part"]), *map(_seconds, sides), share)
    table.add_section()
    table.add_row("a step", _seconds(step["predicted"]), _seconds(step["measured"]), "")
    memory = report["memory"]
    sizes = memory["predicted_bytes"], memory["measured_bytes"]
    table.add_row("memory of a rank, at most", *map(_bytes, sizes), "")
    return table


def _part(part: str) -> str:
    if part in WORDS or part not in SPLIT_NAMES:
        return WORDS.get(part, part)
    return f"{SPLIT_NAMES[part]}, exposed"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    differences: Sequence[Mapping[str, Any]] = report["ledger_differences"]
    if differences:
        yield from map(ledger_difference, differences[:5])
        yield "[bold red]The last step did not send what the plan says.[/]"
    elif report["ledger"]:
        yield "Every rank sent what the plan says, to the byte, in the last step."
    if report["imbalance"] is not None:
        planned = report["step_s"]["predicted"] is not None
        yield (
            "In the last micro-batch the busiest expert rank had "
            f"{report['imbalance']:.2f} times the mean's tokens"
            + ("; the plan beside the run is made for that." if planned else ".")
        )
    if report["device"] == "cuda":
        yield (
            "Times are the host's, which issues a message to a GPU and goes on: what is waited for "
            "there is part of compute here."
        )
    if report["step_s"]["predicted"] is None:
        yield "`fivefold calibrate` measures this machine; then predicted seconds stand here too."
