"""What `fivefold schedule` says of a schedule."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from fivefold.layout.actions import Action
from fivefold.layout.notation import FORMS
from fivefold.parallel.pipeline.simulation import Simulation
from fivefold.parallel.pipeline.table import Schedule
from fivefold.report.schedule_drawing import draw

WIDEST = 1000
"""Characters of a row of the picture; beyond, `--svg` shows more."""

MEANINGS = {
    "gpipe": "all forwards, then all backwards (arXiv:1811.06965)",
    "1f1b": "one forward and one backward in turn; interleaved with vpp2 (arXiv:2104.04473)",
    "bfs": "gpipe with chunks, one chunk after the other (arXiv:2211.05953)",
    "zb-h1": "1F1B with the weights' gradients where a rank would wait (arXiv:2401.10241)",
    "zb-v": "the same with two chunks a rank in a V (arXiv:2401.10241, section 6)",
    "dualpipe-v": "a forward beside a backward, two chunks a rank in a V "
    "(github.com/deepseek-ai/DualPipe)",
    "dualpipe": "micro-batches from both ends, two copies of the stages (arXiv:2412.19437); "
    "is not run",
    "FILE.csv": "a table of your own: a row a rank, with cells such as 0F3, 1B2, 0I0, 0W0",
}
"""What each schedule does; the names are those of a layout's `schedule=`."""

assert set(MEANINGS) | {"interleaved"} == set(FORMS["schedule"].partition("=")[2].split("|"))


def schedule_report(simulation: Simulation) -> dict[str, Any]:
    """Plain data, as `--json` prints it. Seconds, and activations in those of one micro-batch on
    one virtual stage."""
    schedule = simulation.schedule
    ranks = [
        {
            "rank": rank,
            "stages": sorted({action.stage for action in row}),
            "busy_s": simulation.busy_s[rank],
            "idle_fraction": 1 - simulation.busy_s[rank] / (simulation.step_s or 1.0),
            "peak_in_flight": simulation.peak_in_flight[rank],
        }
        for rank, row in enumerate(schedule.table)
    ]
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "vpp": schedule.vpp,
        "micro_batches": schedule.micro_batches,
        "step_s": simulation.step_s,
        "bubble_fraction": simulation.bubble_fraction,
        "ranks": ranks,
        "table": [[_cell(action) for action in row] for row in schedule.table],
    }


def _cell(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.micro_batch}"


def picture(schedule: Schedule) -> str:
    """The picture and its key, or why there is none."""
    drawn = draw(schedule)
    if max(map(len, drawn.splitlines())) > WIDEST:
        return "too long to be drawn in text: --svg FILE draws it"
    key = "3 forward of micro-batch 3, [3] its backward"
    if schedule.split:
        key += "; or in two parts: (3) gradient of the input, {3} of the weights"
    if schedule.vpp > 1:
        key += "; 3a, 3b: on the first, second stage of the rank"
    return f"{drawn}\n{key}; a backward is drawn twice as long as a forward"


def schedule_table(report: dict[str, Any]) -> Table:
    """A row a rank."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "stages", "busy", "idle", "peak activations"):
        table.add_column(name, justify="left" if name == "stages" else "right")
    for rank in report["ranks"]:
        table.add_row(
            str(rank["rank"]),
            ", ".join(map(str, rank["stages"])),
            f"{rank['busy_s']:g}",
            f"{rank['idle_fraction']:.1%}",
            str(rank["peak_in_flight"]),
        )
    return table
