"""The planner's result for the terminal, made of the same data that `fivefold plan --json` prints.

It is whole at 80 columns and uses the width where there is more. The most important comes first:
the layouts, why the first is the best, its traffic, its memory. `details` adds the rest. Names come
from files and from the command line, so no text is taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fivefold.report.plan_tables import (
    layouts_table,
    memory_table,
    messages_table,
    neighbours_table,
    remedies_table,
    seconds_table,
    traffic_table,
)
from fivefold.report.text import Row, format_bytes, format_count, format_seconds, gigabytes

MORE = (
    "--details adds every message, where the step goes, neighbouring layouts and what would "
    "change the result."
)


def plan_report(result: Row, details: bool = False) -> Iterator[RenderableType]:
    """Everything that the terminal shows of a result, in order, with empty lines between."""
    yield heading(result)
    if result["layouts"]:
        yield ""
        yield layouts_table(result)
        if len(result["layouts"]) > 1:
            yield Text(
                f"Layouts within {result['search']['near']:.1%} of the best count as equal. The "
                "simplest of them comes first."
            )
        yield from _first_layout(result)
        if details:
            yield from _details(result)
    if result["nothing_fits"]:
        yield ""
        yield from nothing_fits(result["nothing_fits"])
    notes = [f"note: {note}" for note in result["notes"]]
    if result["layouts"] and not details:
        notes.append(MORE)
    if notes:
        yield ""
        yield from (Text(note, style="dim") for note in notes)


def heading(result: Row) -> Table:
    """The model, the cluster, the job and the search."""
    grid = Table.grid(padding=(0, 2))
    for name, text in _facts(result):
        grid.add_row(Text(name), Text(text))
    return grid


def _facts(result: Row) -> Iterator[tuple[str, str]]:
    model, cluster, job = result["model"], result["cluster"], result["job"]
    active = ""
    if model["active_params"] != model["total_params"]:
        active = f" ({format_count(model['active_params'])} active per token)"
    yield (
        "model",
        f"{model['name']}: {format_count(model['total_params'])} parameters{active}, "
        f"{format_count(model['flops_per_token'])}FLOP per token",
    )
    tiers = ", ".join(map(_tier, cluster["tiers"]))
    yield (
        "cluster",
        f"{cluster['name']}: {cluster['devices']:,} x {cluster['device']}, "
        f"{gigabytes(cluster['memory_bytes'])} each; {tiers}",
    )
    yield (
        "job",
        f"{job['global_batch']:,} sequences x {job['sequence_length']:,} tokens = "
        f"{job['global_batch_tokens']:,} tokens per step; {job['precision']}; "
        f"engine {job['engine']}",
    )
    for row in job["measured"]:
        yield (
            "measured",
            f"{row['layout']}: {format_seconds(row['step_time_s'])}; predicted: "
            f"{format_seconds(row['predicted_step_time_s'])}",
        )
    if job["measured"]:
        yield "", f"All predicted times are multiplied by {job['measured_factor']:.3f}."
    search = result["search"]
    skipped = f", {search['skipped']:,} skipped by a bound" if search["skipped"] else ""
    yield (
        "search",
        f"{search['layouts']:,} layouts, {search['legal']:,} legal{skipped}, "
        f"{search['fit']:,} found to fit; {search['seconds']:.2f} s",
    )


def _tier(tier: Row) -> str:
    bandwidth = tier["bandwidth_bytes_per_s"] / 1e9
    return f"{tier['name']} {bandwidth:,.4g} GB/s within {tier['devices']:,}"


def _first_layout(result: Row) -> Iterator[RenderableType]:
    """Why the first layout, its traffic and its memory."""
    first, job = result["layouts"][0], result["job"]
    if first["why"]:
        yield from _title("Why")
        yield from _list(reason["text"] for reason in first["why"])
    yield from _title(f"Traffic of a device{_of_rank(first)} per step")
    yield traffic_table(first, result["order"])
    yield Text(result["order"]["text"])
    low, high = (gigabytes(first[f"peak_memory_{end}_bytes"]) for end in ("low", "high"))
    yield from _title("Memory of a device by pipeline rank, GB")
    yield memory_table(first)
    yield Text(
        f"The peak is expected between {low} and {high}. {gigabytes(job['memory_limit_bytes'])} is "
        "available."
    )


def _of_rank(first: Row) -> str:
    """The ledger is that of one pipeline rank, the busiest."""
    rows = first["ledger"]
    return f" on pipeline rank {rows[0]['stage']}" if rows and len(first["stages"]) > 1 else ""


def _details(result: Row) -> Iterator[RenderableType]:
    first, job = result["layouts"][0], result["job"]
    yield from _title(f"Messages of a device{_of_rank(first)} per step")
    yield messages_table(first)
    yield from _title("Where the step goes")
    yield seconds_table(first)
    yield Text(
        "MFU counts causal attention FLOPs, without recomputation. With full attention the first "
        f"layout reaches {first['mfu_full_attention']:.1%}."
    )
    if result["neighbours"]:
        yield from _title("One change away")
        yield neighbours_table(result["neighbours"])
    if result["changes"]:
        yield from _title("What would change the result")
        yield from _list(change["text"] for change in result["changes"])
    yield ""
    yield Text(
        f"A checkpoint takes {format_bytes(job['checkpoint_bytes'])}. To read the weights, a node "
        f"needs {format_bytes(job['loading_bytes'])} of host memory."
    )


def nothing_fits(infeasible: Row) -> Iterator[RenderableType]:
    """Why nothing fits, and what would."""
    for number, sentence in enumerate(infeasible["text"]):
        yield Text(sentence, style="" if number else "bold")
    yield from _title("What else would help, each by itself")
    yield remedies_table(infeasible["helps"])


def _title(text: str) -> Iterator[RenderableType]:
    yield ""
    yield Text(text, style="bold")


def _list(sentences: Iterable[str]) -> Iterator[RenderableType]:
    for sentence in sentences:
        yield Padding(Text(sentence), (0, 0, 0, 2), expand=False)
