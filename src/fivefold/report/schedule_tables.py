"""What `fivefold schedule` prints."""

from __future__ import annotations

from rich.table import Table

from fivefold.layout.actions import Action
from fivefold.layout.notation import FORMS
from fivefold.parallel.pipeline.simulation import Simulation
from fivefold.parallel.pipeline.table import Schedule
from fivefold.report.schedule_drawing import draw
from fivefold.report.text import Row, make_table

WIDEST = 1000
"""The longest row of the picture, in characters. `--svg` draws longer ones."""

MEANINGS = {
    "gpipe": "all forwards, then all backwards (arXiv:1811.06965)",
    "1f1b": "one forward and one backward in turn; interleaved if vpp is 2 or more "
    "(arXiv:2104.04473)",
    "bfs": "gpipe with chunks, one chunk after the other (arXiv:2211.05953)",
    "zb-h1": "1F1B with weight gradients computed while a rank would wait (arXiv:2401.10241)",
    "zb-v": "zb-h1 with two chunks per rank in a V (arXiv:2401.10241, section 6)",
    "dualpipe-v": "a forward overlaps a backward, two chunks per rank in a V "
    "(github.com/deepseek-ai/DualPipe)",
    "dualpipe": "micro-batches from both ends, two copies of the stages (arXiv:2412.19437); "
    "can be planned, not run",
    "FILE.csv": "a custom table: one row per rank, with cells such as 0F3, 1B2, 0I0, 0W0",
}
"""What each schedule does; the names are those of a layout's `schedule=`."""

assert set(MEANINGS) | {"interleaved"} == set(FORMS["schedule"].partition("=")[2].split("|"))


def schedule_report(simulation: Simulation) -> Row:
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
    """The picture and its key, or a hint where there is none."""
    drawn = draw(schedule)
    if max(map(len, drawn.splitlines())) > WIDEST:
        return "The schedule is too long to draw as text. Use --svg FILE."
    key = ["3: forward of micro-batch 3. [3]: its backward, drawn twice as long."]
    if schedule.split:
        key.append("(3): gradient of the input. {3}: gradient of the weights.")
    if schedule.vpp > 1:
        key.append("3a, 3b: on the first, second stage of the rank.")
    return "\n".join([drawn, *key])


def schedule_table(report: Row) -> Table:
    """One row per rank."""
    table = make_table(">rank", "stages", ">busy", ">idle", ">peak activations")
    for rank in report["ranks"]:
        table.add_row(
            str(rank["rank"]),
            ", ".join(map(str, rank["stages"])),
            f"{rank['busy_s']:g}",
            f"{rank['idle_fraction']:.1%}",
            str(rank["peak_in_flight"]),
        )
    return table
