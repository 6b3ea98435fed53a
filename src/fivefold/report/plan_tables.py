"""The tables of a plan, made of the same data that `fivefold plan --json` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from fivefold.plan.explain import counts_as
from fivefold.report.text import (
    Row,
    format_bytes,
    format_seconds,
    gigabytes,
    make_table,
    op_name,
    part_name,
    percent,
    three_digits,
    time_unit,
    traffic_name,
)

SHOWN = 5e-5
"""Share of the step from which a part of it is listed."""
STAGES_SHOWN = 6
"""Pipeline ranks in the table of memory. Of more, the ends and the fullest are shown."""
MEMORY_NAMES = {"optimizer": "optimizer state", "overhead": "overhead", "reserve": "allocator"}
STYLES = {"fits": "", "tight": "yellow", "no": "bold red"}
VERDICTS = {"fits": "fits", "tight": "tight", "no": "OVER"}


def layouts_table(result: Row) -> Table:
    """The best layouts, one per line."""
    rows = list(result["layouts"])
    costs = rows[0]["device_hours"] is not None
    fewer = any(row["devices"] != result["cluster"]["devices"] for row in rows)
    optional = {">devices": fewer, ">device-\nhours": costs}
    columns = ">#", "layout", ">devices", ">step time", ">tokens/s\n/device", ">MFU", ">memory", ""
    columns += ">bubble", ">device-\nhours"
    table = make_table(*(name for name in columns if optional.get(name, True)))
    numbered = [(str(rank), row) for rank, row in enumerate(rows, 1)]
    best = result["best_found"]
    if best and best["layout"] != rows[0]["layout"]:
        numbered = [("given", rows[0]), ("best", best)]
    for name, row in numbered:
        table.add_row(
            name,
            escape(row["layout"]),
            *([f"{row['devices']:,}"] if fewer else []),
            _with_interval(row),
            f"{row['tokens_per_s_per_device']:,.0f}",
            f"{row['mfu']:.1%}",
            gigabytes(row["peak_memory_bytes"]),
            f"[{STYLES[row['verdict']] or 'default'}]{VERDICTS[row['verdict']]}[/]",
            f"{row['bubble_fraction']:.1%}",
            *([f"{row['device_hours']:,.0f}"] if costs else []),
        )
    return table


def _with_interval(row: Row) -> str:
    """`7.92 s (7.30-8.60)`, without an interval where there is none."""
    step, low, high = (row[f"step_time{name}_s"] for name in ("", "_low", "_high"))
    if low == high:
        return format_seconds(step)
    size, _ = time_unit(step)
    return f"{format_seconds(step)} ({three_digits(low / size)}-{three_digits(high / size)})"


def memory_table(first: Row) -> Table:
    """Memory by kind and pipeline rank, in GB. The fullest rank is marked."""
    stages, worst = first["stages"], first["worst_stage"]
    kinds: list[str] = [
        k for k in first["memory_bytes"] if any(s["memory_bytes"][k] for s in stages)
    ]
    shown = _shown_stages(len(stages), worst)
    table = make_table("pipeline rank")
    columns: list[int | None] = []
    for index, rank in enumerate(shown):
        if index and rank > shown[index - 1] + 1:
            columns.append(None)
            table.add_column("..")
        columns.append(rank)
        marked = rank == worst and len(stages) > 1
        header = f"{rank}\n(peak)" if marked else str(rank)
        table.add_column(header, justify="right", style="bold" if marked else "")

    def add(name: str, cell: Callable[[Row], str]) -> None:
        table.add_row(name, *("" if rank is None else cell(stages[rank]) for rank in columns))

    add("layers", lambda stage: _layers(stage["layers"]))
    add("micro-batches in flight", lambda stage: f"{stage['in_flight']:.3g}")
    table.add_section()
    for kind in kinds:
        add(MEMORY_NAMES.get(kind, kind), lambda stage, k=kind: _gb(stage["memory_bytes"][k]))
    table.add_section()
    add("total", lambda stage: _gb(sum(stage["memory_bytes"][kind] for kind in kinds)))
    return table


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f}"


def _layers(chunks: Sequence[int]) -> str:
    """`8`, `4 x 5` for four chunks of five layers, `5+6` for unlike ones."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} x {chunks[0]}"
    return "+".join(map(str, chunks)) if len(chunks) <= 4 else f"{sum(chunks)}"


def _shown_stages(count: int, worst: int) -> list[int]:
    """All ranks. Of many, the first, the last, and the fullest with its neighbours."""
    if count <= STAGES_SHOWN:
        return list(range(count))
    near = {0, worst - 1, worst, worst + 1, count - 1}
    return sorted(rank for rank in near if 0 <= rank < count)


def traffic_table(first: Row, order: Row) -> Table:
    """What a device of the busiest pipeline rank sends per step, by split. The tier is the
    outermost that the split crosses, as `order` has it."""
    by_split: dict[str, list[Row]] = {}
    for row in _sent(first):
        by_split.setdefault(counts_as(row["split"], row["op"]), []).append(row)
    total = sum(_sum(rows, "wire_bytes") for rows in by_split.values()) or 1.0
    table = make_table(
        "split", "tier", ">calls", ">bytes/call", ">sent", ">share", ">time", ">exposed"
    )
    for split, rows in sorted(by_split.items(), key=lambda item: -_sum(item[1], "wire_bytes")):
        sent = _sum(rows, "wire_bytes")
        table.add_row(
            traffic_name(split, rows),
            escape(order["tiers"].get(split, rows[0]["tier"])),
            *_calls(rows),
            format_bytes(sent),
            f"{sent / total:.1%}",
            format_seconds(_sum(rows, "time_s")),
            format_seconds(_sum(rows, "exposed_s")),
        )
    if len(by_split) > 1:
        rows = _sent(first)
        sums = format_bytes(total), "", *(format_seconds(_sum(rows, k)) for k in TIMES)
        table.add_row("total", "", f"{_sum(rows, 'calls'):,.0f}", "", *sums)
    return table


TIMES = ("time_s", "exposed_s")


def messages_table(first: Row) -> Table:
    """Every kind of message of that device: `bytes/call` is the mean payload."""
    by_kind: dict[tuple[str, str, str, int, str], list[Row]] = {}
    splits: dict[str, float] = {}
    for row in _sent(first):
        key = row["split"], row["op"], row["phase"], row["group_size"], row["tier"]
        by_kind.setdefault(key, []).append(row)
        splits[row["split"]] = splits.get(row["split"], 0.0) + row["wire_bytes"]
    table = make_table("split", "operation", "phase", ">ranks", ">calls", ">bytes/call", ">sent")
    table.add_column("tier")
    shown = ""
    for (split, op, phase, ranks, tier), rows in sorted(
        by_kind.items(), key=lambda item: -splits[item[0][0]]
    ):
        table.add_row(
            "" if split == shown else traffic_name(split, first["ledger"]),
            op_name(op),
            phase,
            str(ranks),
            *_calls(rows),
            format_bytes(_sum(rows, "wire_bytes")),
            escape(tier),
        )
        shown = split
    return table


def _sent(first: Row) -> list[Row]:
    return [row for row in first["ledger"] if row["wire_bytes"]]


def _calls(rows: Iterable[Row]) -> tuple[str, str]:
    """The number of calls, and the mean payload of a call."""
    calls = _sum(rows, "calls")
    payload = sum(row["calls"] * row["payload_bytes"] for row in rows)
    return f"{calls:,.0f}", format_bytes(round(payload / calls) if calls else 0)


def _sum(rows: Iterable[Row], key: str) -> float:
    return sum(row[key] for row in rows)


def seconds_table(first: Row) -> Table:
    """Where the step goes."""
    table = make_table("part", ">time", ">share")
    step = first["step_time_s"]
    for name, seconds in first["seconds"].items():
        if abs(seconds) >= SHOWN * step:
            table.add_row(escape(part_name(name)), format_seconds(seconds), f"{seconds / step:.1%}")
    table.add_section()
    table.add_row("step", format_seconds(step), "")
    return table


def neighbours_table(neighbours: Sequence[Row]) -> Table:
    """What one change would cost."""
    table = make_table("change", ">step time", ">memory", "")
    table.columns[0].no_wrap = True
    for row in neighbours:
        if row["verdict"] == "illegal":
            reason = row["reason"].partition(":")[0]  # what would be legal instead is left out
            table.add_row(escape(row["change"]), "-", "-", escape(reason), style="dim")
            continue
        table.add_row(
            escape(row["change"]),
            percent(row["step_time_ratio"]),
            gigabytes(row["peak_memory_bytes"]),
            {"no": "does not fit", "tight": "tight"}.get(row["verdict"], ""),
            style={"no": "red", "tight": "yellow"}.get(row["verdict"], ""),
        )
    return table


def remedies_table(helps: Sequence[Row]) -> Table:
    """What the job needs with one thing changed."""
    table = make_table("change", ">memory", "", "layout")
    for row in helps:
        table.add_row(
            escape(row["change"]),
            gigabytes(row["peak_memory_bytes"]),
            "fits" if row["fits"] else "OVER",
            escape(row["layout"] or ""),
        )
    return table
