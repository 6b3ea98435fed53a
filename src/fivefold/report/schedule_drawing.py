"""Pictures of a schedule: in plain text, and as SVG."""

from __future__ import annotations

from html import escape

from fivefold.layout.actions import Action
from fivefold.parallel.pipeline.simulation import Simulation, simulate
from fivefold.parallel.pipeline.table import Schedule

_MARKS = {"F": "{}", "B": "[{}]", "I": "({})", "W": "{{{}}}"}


def draw(schedule: Schedule) -> str:
    """A picture in plain text: a row a rank, time to the right, a backward twice as long as a
    forward. `3` is the forward of micro-batch 3, `[3]` its backward, `.` an idle forward's time;
    of a backward in two parts `(3)` is the input's gradient and `{3}` the weights'. With several
    stages a rank a letter tells which of them a micro-batch meets first (`3a`)."""
    digits = len(str(schedule.micro_batches - 1))
    # Characters of one forward, with a space; half a backward has brackets on top.
    unit = digits + (schedule.vpp > 1) + 1 + 2 * bool(schedule.split)
    rows = []
    for rank, row in enumerate(simulate(schedule, 1, 2).timeline):
        line = ""
        for action, start, end in row:
            label = f"{action.micro_batch:{digits}d}{_chunk(schedule, action)}"
            line += ".".ljust(unit) * (round(start) - len(line) // unit)
            line += _MARKS[action.kind].format(label).ljust(unit * round(end - start))
        rows.append(f"rank {rank:{len(str(schedule.pp - 1))}d}  {line.rstrip()}")
    return "\n".join(rows)


def _chunk(schedule: Schedule, action: Action) -> str:
    return chr(ord("a") + action.stage // schedule.pp) if schedule.vpp > 1 else ""


COLOURS = {
    "F": ("#4c8bf5", "#9cc0fb"),
    "B": ("#35a47b", "#8fd0b6"),
    "I": ("#2a9d9d", "#8acdcd"),
    "W": ("#b36ad6", "#d9b3eb"),
}
"""Of the stage that a micro-batch meets first on a rank, and of later ones; in DualPipe, of the
micro-batches from either end."""
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
_WIDTH, _ROW, _LEFT, _TOP = 1200, 26, 70, 34


def svg(simulation: Simulation) -> str:
    """The simulated step as an SVG picture: a row a rank, time to the right. Two actions side by
    side share the height of the row."""
    schedule = simulation.schedule
    height = _TOP + (_ROW + 2) * schedule.pp + 30
    per_s = (_WIDTH - _LEFT - 10) / (simulation.step_s or 1.0)
    title = (
        f"{schedule.name}: pp {schedule.pp}, vpp {schedule.vpp}, {schedule.micro_batches} "
        f"micro-batches; idle {simulation.bubble_fraction:.1%} of the step"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(10, 20, title, 14),
    ]
    for rank, row in enumerate(simulation.timeline):
        y = _TOP + (_ROW + 2) * rank
        parts.append(_text(10, y + 17, f"rank {rank}", 12))
        previous_s = -1.0
        for place, (action, start_s, end_s) in enumerate(row):
            follows = place + 1 < len(row) and row[place + 1].start_s == start_s < end_s
            half = start_s == previous_s or follows
            top = y + _ROW / 2 * (half and not follows)
            x, width = _LEFT + start_s * per_s, (end_s - start_s) * per_s
            parts += _box(schedule, action, x, top, width, _ROW / (1 + half))
            previous_s = start_s
    kinds = {action.kind for row in schedule.table for action in row}
    for number, kind in enumerate(kind for kind in _NAMES if kind in kinds):
        x, y = _LEFT + 150 * number, height - 22
        parts.append(f'<rect x="{x}" y="{y}" width="20" height="14" fill="{COLOURS[kind][0]}"/>')
        parts.append(_text(x + 26, y + 12, _NAMES[kind], 12))
    return "\n".join([*parts, "</svg>\n"])


def _box(
    schedule: Schedule, action: Action, x: float, y: float, width: float, height: float
) -> list[str]:
    first = action.stage < schedule.pp
    if schedule.vpp == 1:
        first = schedule.rank_of(action.stage, action.micro_batch) == action.stage
    fill = COLOURS[action.kind][not first]
    parts = [
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(str(action))}</title></rect>'
    ]
    label = str(action.micro_batch)
    if width > 7 * len(label):
        parts.append(
            f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + 3.5:g}" text-anchor="middle" '
            f'fill="white" font-size="10">{label}</text>'
        )
    return parts


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="#24292f" font-size="{size}">{escape(text)}</text>'
