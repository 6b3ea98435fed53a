"""The planner's answer for the terminal, made of the same data that `fivefold plan --json` prints.

Everything fits in 100 columns. Names come from files and from the command line, so that no text
is taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fivefold.plan.explain import counts_as
from fivefold.report.tables import format_bytes

WIDTH = 100
SHOWN = 5e-5
"""Share of the step from which a part of it is listed."""
STAGES_SHOWN = 8
"""Pipeline ranks in the table of memory; of more, those that differ most are shown."""
SPLIT_NAMES = {"dp": "DP", "pp": "PP", "tp": "TP", "cp": "CP", "ep": "EP", "world": "all"}
SHORT_NAMES = {
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "overhead": "alloc",
}
STYLES = {"fits": "", "tight": "yellow", "no": "bold red"}
VERDICTS = {"fits": "fits", "tight": "tight", "no": "OVER"}

Row = Mapping[str, Any]


def plan_report(answer: Row) -> Iterator[RenderableType]:
    """Everything that the terminal shows of an answer, in order, with empty lines between."""
    yield from map(Text, heading(answer))
    if answer["layouts"]:
        yield ""
        yield layouts_table(answer)
        if len(answer["layouts"]) > 1:
            yield Text(_order_note(answer["search"]))
        yield Text(_mfu_note(answer["layouts"][0]))
        yield from _details(answer)
    if answer["nothing_fits"]:
        yield ""
        yield from nothing_fits(answer["nothing_fits"])
    for note in answer["notes"]:
        yield Text(f"note: {note}", style="dim")


def _details(answer: Row) -> Iterator[RenderableType]:
    """What there is to say about the first layout."""
    first, limit = answer["layouts"][0], answer["job"]["memory_limit_bytes"]
    low, high = (first[f"peak_memory_{end}_bytes"] / 1e9 for end in ("low", "high"))
    yield from _title(
        f"memory of a device by pipeline rank, GB; its limit is {limit / 1e9:,.1f}, the peak from "
        f"{low:,.1f} to {high:,.1f}"
    )
    yield stages_table(first)
    yield Text(_host_note(answer["job"]))
    yield from _title(f"what a device{_of_rank(first)} sends in a step")
    yield traffic_table(first, answer["order"])
    yield Text(answer["order"]["text"])
    yield from _title("where the step goes")
    yield seconds_table(first)
    if first["why"]:
        yield from _title("why")
        yield from _list(reason["text"] for reason in first["why"])
    if answer["neighbours"]:
        yield from _title("one change away")
        yield neighbours_table(answer["neighbours"], limit)
    if answer["changes"]:
        yield from _title("what would change it")
        yield from _list(change["text"] for change in answer["changes"])


def _title(text: str) -> Iterator[RenderableType]:
    yield ""
    yield Text(text, style="italic")


def heading(answer: Row) -> Iterator[str]:
    """The model, the cluster, the batch and the search, a line each."""
    model, cluster, job = answer["model"], answer["cluster"], answer["job"]
    active = (
        ""
        if model["active_params"] == model["total_params"]
        else (f", {_count(model['active_params'])} of them for a token")
    )
    yield (
        f"model    {model['name']}: {_count(model['total_params'])} parameters{active}; "
        f"{_count(model['flops_per_token'])}FLOP a token (causal attention)"
    )
    tiers = ", then ".join(map(_tier, cluster["tiers"]))
    yield (
        f"cluster  {cluster['name']}: {cluster['devices']:,} x {cluster['device']}, "
        f"{cluster['memory_bytes'] / 1e9:,.1f} GB; {tiers}"
    )
    yield (
        f"a step   {job['global_batch']:,} sequences of {job['sequence_length']:,} tokens "
        f"({job['global_batch_tokens']:,} tokens), {job['precision']}, engine {job['engine']}"
    )
    for row in job["measured"]:
        yield (
            f"measured {row['layout']}: {format_seconds(row['step_time_s'])}, predicted "
            f"{format_seconds(row['predicted_step_time_s'])}"
        )
    if job["measured"]:
        yield f"so all times are predicted {job['measured_factor']:.3f} x as long"
    search = answer["search"]
    skipped = f", {search['skipped']:,} ruled out by a bound" if search["skipped"] else ""
    yield (
        f"search   {search['layouts']:,} layouts, {search['legal']:,} legal{skipped}, "
        f"{search['fit']:,} seen to fit; {search['seconds']:.2f} s"
    )


def _tier(tier: Row) -> str:
    bandwidth = tier["bandwidth_bytes_per_s"] / 1e9
    return f"{tier['devices']:,} over {tier['name']} at {bandwidth:,.4g} GB/s"


def layouts_table(answer: Row) -> Table:
    """The best layouts, a line each."""
    rows = list(answer["layouts"])
    costs = rows[0]["device_hours"] is not None
    fewer = any(row["devices"] != answer["cluster"]["devices"] for row in rows)
    table = _table()
    table.add_column("", justify="right")
    table.add_column("layout", overflow="fold", ratio=1)
    if fewer:
        table.add_column("GPUs", justify="right", no_wrap=True)
    for name in ("step", "tokens/s/GPU", "MFU", "memory", "", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    if costs:
        table.add_column("GPU-hours", justify="right", no_wrap=True)
    numbered = [(str(rank), row) for rank, row in enumerate(rows, 1)]
    if answer["best_found"] and answer["best_found"]["layout"] != rows[0]["layout"]:
        numbered = [("asked", rows[0]), ("best", answer["best_found"])]
    for name, row in numbered:
        cells = [
            name,
            escape(row["layout"]),
            *([f"{row['devices']:,}"] if fewer else []),
            _with_interval(row),
            f"{row['tokens_per_s_per_device']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['peak_memory_bytes'] / 1e9:.1f} GB",
            f"[{STYLES[row['verdict']] or 'default'}]{VERDICTS[row['verdict']]}[/]",
            f"{row['bubble_fraction']:.1%}",
        ]
        table.add_row(*cells, *([f"{row['device_hours']:,.0f}"] if costs else []))
    return table


def _with_interval(row: Row) -> str:
    """`7.92 s (7.3-8.6)`; without an interval where there is none."""
    step, low, high = (row[f"step_time{name}_s"] for name in ("", "_low", "_high"))
    if low == high:
        return format_seconds(step)
    unit = 1e-3 if step < 0.9995 else 1.0
    return f"{format_seconds(step)} ({_three(low / unit)}-{_three(high / unit)})"


def _order_note(search: Row) -> str:
    return (
        f"Layouts within {search['near']:.1%} of the best count as equal: the simplest of them "
        "comes first."
    )


def _mfu_note(first: Row) -> str:
    return (
        "MFU counts causal attention, no recomputation; counting the full square, the first has "
        f"{first['mfu_full_attention']:.1%}."
    )


def stages_table(first: Row) -> Table:
    """Memory by pipeline rank and kind, the worst rank marked."""
    stages = first["stages"]
    kinds = [k for k in first["memory_bytes"] if any(s["memory_bytes"][k] for s in stages)]
    table = _table()
    table.add_column("rank", justify="right")
    table.add_column("layers", justify="right")
    table.add_column("flight", justify="right")
    for kind in (*kinds, "total"):
        table.add_column(SHORT_NAMES.get(kind, kind), justify="right")
    table.add_column("")
    shown = _shown_stages(len(stages), first["worst_stage"])
    for index, rank in enumerate(shown):
        if index and rank > shown[index - 1] + 1:
            table.add_row("..")
        worst = rank == first["worst_stage"]
        sizes = [stages[rank]["memory_bytes"][kind] for kind in kinds]
        table.add_row(
            str(rank),
            _layers(stages[rank]["layers"]),
            f"{stages[rank]['in_flight']:.3g}",
            *(f"{size / 1e9:.1f}" for size in (*sizes, sum(sizes))),
            "worst" if worst and len(stages) > 1 else "",
            style="bold" if worst and len(stages) > 1 else "",
        )
    return table


def _host_note(job: Row) -> str:
    """What weights and checkpoints take outside the devices."""
    checkpoint, loading = (format_bytes(job[f"{name}_bytes"]) for name in ("checkpoint", "loading"))
    return f"A checkpoint takes {checkpoint}; reading the weights, {loading} of a node's memory."


def _layers(chunks: Sequence[int]) -> str:
    """`8`, `4 x 5` for four chunks of five layers, `5+6` for unlike ones."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} x {chunks[0]}"
    return "+".join(map(str, chunks)) if len(chunks) <= 4 else f"{sum(chunks)}"


def _shown_stages(count: int, worst: int) -> list[int]:
    """All ranks; of many the first, the last and the worst with their neighbours."""
    if count <= STAGES_SHOWN:
        return list(range(count))
    near = {0, 1, worst - 1, worst, worst + 1, count - 2, count - 1}
    return sorted(rank for rank in near if 0 <= rank < count)


def _of_rank(first: Row) -> str:
    """The ledger is that of one pipeline rank, the busiest."""
    rows = first["ledger"]
    return f" of pipeline rank {rows[0]['stage']}" if rows and len(first["stages"]) > 1 else ""


def traffic_table(first: Row, order: Row) -> Table:
    """What a device of the busiest pipeline rank sends in a step, by split; then the sums, with the
    outermost tier that each split crosses, as `order` has them."""
    rows = [row for row in first["ledger"] if row["wire_bytes"]]
    total = sum(row["wire_bytes"] for row in rows) or 1.0
    table = _table()
    for column in ("split", "operation"):
        table.add_column(column)
    table.add_column("group", justify="right")
    table.add_column("sent", justify="right")
    table.add_column("share", justify="right")
    table.add_column("tier")
    for column in ("seconds", "exposed"):
        table.add_column(column, justify="right")
    by_split: dict[str, list[Row]] = {}
    for row in rows:
        by_split.setdefault(row["split"], []).append(row)
    largest_first = sorted(by_split.items(), key=lambda item: -_sum(item[1], "wire_bytes"))
    for split, own in largest_first:
        for index, row in enumerate(_merged(own)):
            table.add_row(
                _traffic_name(split, own) if index == 0 else "",
                f"{row['op'].replace('_', '-')}, {row['phase']}",
                str(row["group_size"]),
                format_bytes(row["wire_bytes"]),
                f"{row['wire_bytes'] / total:.1%}",
                escape(row["tier"]),
                format_seconds(row["time_s"]),
                format_seconds(row["exposed_s"]),
            )
    table.add_section()
    for split, own in _in_all(rows):
        table.add_row(
            SPLIT_NAMES.get(split, split),
            "in all",
            "",
            format_bytes(_sum(own, "wire_bytes")),
            f"{_sum(own, 'wire_bytes') / total:.1%}",
            escape(order["tiers"].get(split, "")),
            format_seconds(_sum(own, "time_s")),
            format_seconds(_sum(own, "exposed_s")),
        )
    return table


def _traffic_name(split: str, rows: Sequence[Row]) -> str:
    """`TP (sp)` where the messages of tensor parallelism are Megatron's sequence parallel ones."""
    name = SPLIT_NAMES.get(split, split)
    return f"{name} (sp)" if split == "tp" and any(r["op"] == "all_gather" for r in rows) else name


def _in_all(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by whose traffic they are, as in the order of the splits; the largest first. Empty
    where that would repeat the rows."""
    by_split: dict[str, list[Row]] = {}
    for row in rows:
        by_split.setdefault(counts_as(row["split"], row["op"]), []).append(row)
    if not len(rows) > len(by_split) > 1:
        return []
    return sorted(by_split.items(), key=lambda item: -_sum(item[1], "wire_bytes"))


def _merged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of one operation, phase, group and tier together: they differ in the payload only."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["phase"], row["op"], row["group_size"], row["tier"])
        if key not in merged:
            merged[key] = dict(row)
            continue
        for name in ("wire_bytes", "time_s", "exposed_s"):
            merged[key][name] += row[name]
    return list(merged.values())


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(row[key] for row in rows)


def seconds_table(first: Row) -> Table:
    """Where the step goes."""
    table = _table()
    table.add_column("")
    for column in ("seconds", "share"):
        table.add_column(column, justify="right")
    for name, seconds in first["seconds"].items():
        if abs(seconds) >= SHOWN * first["step_time_s"]:
            share = f"{seconds / first['step_time_s']:.1%}"
            table.add_row(_part(name), format_seconds(seconds), share)
    return table


def _part(name: str) -> str:
    """`exposed_tp` -> `TP, exposed`."""
    exposed, split = name.startswith("exposed_"), name.removeprefix("exposed_")
    return f"{SPLIT_NAMES.get(split, split)}, exposed" if exposed else escape(name)


def neighbours_table(neighbours: Sequence[Row], limit_bytes: float) -> Table:
    """What one change would cost."""
    table = _table()
    table.add_column("change", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("", overflow="fold", ratio=1)
    for row in neighbours:
        if row["verdict"] == "illegal":
            reason = row["reason"].partition(":")[0]  # what would be legal instead is left out
            table.add_row(escape(row["change"]), "-", "-", escape(reason), style="dim")
            continue
        peak = row["peak_memory_bytes"] / 1e9
        words = {"no": "does not fit", "tight": "tight"}.get(row["verdict"])
        table.add_row(
            escape(row["change"]),
            f"{row['step_time_ratio']:.3f} x",
            f"{peak:,.1f} GB",
            f"{words}: {peak:,.1f} GB of {limit_bytes / 1e9:,.1f}" if words else "",
            style={"no": "red", "tight": "yellow"}.get(row["verdict"], ""),
        )
    return table


def nothing_fits(shortage: Row) -> Iterator[RenderableType]:
    """Why nothing fits, and what would."""
    yield from (
        Text(sentence, style="bold" if i == 0 else "")
        for i, sentence in enumerate(shortage["text"])
    )
    table = _table()
    table.add_column("change", overflow="fold")
    table.add_column("least memory", justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("layout", overflow="fold", ratio=1)
    for row in shortage["helps"]:
        table.add_row(
            escape(row["change"]),
            f"{row['peak_memory_bytes'] / 1e9:,.1f} GB",
            "fits" if row["fits"] else "over",
            escape(row["layout"] or ""),
        )
    yield from _title("what else helps, each by itself")
    yield table


# Numbers


def format_seconds(value: float) -> str:
    """`7.92 s`, `312 ms` or `45.0 us`: three digits."""
    if value == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size or unit == "us":
            return f"{_three(value / size)} {unit}"
    raise AssertionError("unreachable")


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _count(value: float) -> str:
    """`405.9 B`: a count in thousands, millions, billions or (FLOP) trillions."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{_three(value / size)} {unit}"
    return f"{value:,.0f} "


def _list(sentences: Any) -> Iterator[RenderableType]:
    for sentence in sentences:
        yield Padding(Text(sentence), (0, 0, 0, 2), expand=False)


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
