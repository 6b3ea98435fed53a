"""Draws the figures of docs/ as SVG files beside this one: python docs/figures/draw.py

Ranks, schedules and zigzag positions come from the program itself.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from fivefold.layout.notation import parse
from fivefold.layout.ranks import dense_ranks, groups
from fivefold.parallel.context.positions import ring_positions
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.simulation import simulate
from fivefold.parallel.pipeline.table import Schedule
from fivefold.report.schedule_drawing import COLOURS

FOLDER = Path(__file__).parent
INK, GREY, PALE = "#24292f", "#8c959f", "#eef1f4"
RANKS = ("#4c8bf5", "#f2a33c", "#35a47b", "#b36ad6")
"""A colour for each rank."""


class Canvas:
    """An SVG picture with a white ground, so that it is read on dark pages too."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, text: str = "", ink: str = INK
    ) -> None:
        stroke = "white" if fill in RANKS else GREY
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, "middle", ink)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", ink: str = INK, size: int = 12
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}" '
            f'font-size="{size}">{escape(text)}</text>'
        )

    def title(self, x: float, y: float, text: str) -> None:
        self.text(x, y, text, size=14)

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str = INK) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}" '
            f'stroke-width="1.5"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, ink: str = INK) -> None:
        """A line with a head at its second end."""
        self.line(x1, y1, x2, y2, ink)
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        left = f"{x2 - 8 * dx + 4 * dy:.1f},{y2 - 8 * dy - 4 * dx:.1f}"
        right = f"{x2 - 8 * dx - 4 * dy:.1f},{y2 - 8 * dy + 4 * dx:.1f}"
        self.parts.append(f'<polygon points="{x2:g},{y2:g} {left} {right}" fill="{ink}"/>')

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">'
        )
        ground = f'<rect width="{width}" height="{height}" fill="white"/>'
        return "\n".join([head, ground, *self.parts, "</svg>"]) + "\n"


def ranks() -> Canvas:
    """The 8 ranks of the first run and who talks to whom."""
    layout = parse("tp2 sp pp2 dp2 ep2")
    places = dense_ranks(layout)[:, 0, :, 0, 0, :]  # [pp, dp, tp]
    c = Canvas(760, 270)
    for stage in range(layout.pp):
        left = 40 + 380 * stage
        c.box(left, 40, 300, 190, PALE)
        layers = "embedding, first half of the layers" if stage == 0 else "second half, head, loss"
        c.text(left + 150, 30, f"stage {stage}: {layers}", "middle")
        for replica in range(layout.dp):
            for part in range(layout.tp):
                x, y = left + 20 + 160 * part, 55 + 100 * replica
                rank = places[stage, replica, part]
                c.box(x, y, 100, 60, RANKS[2 * replica + part], f"rank {rank}", "white")
            y = 85 + 100 * replica
            c.arrow(left + 140, y, left + 122, y)
            c.arrow(left + 140, y, left + 178, y)
            c.text(left + 150, y - 8, "TP (sp),", "middle", size=11)
            c.text(left + 150, y + 18, "EP", "middle", size=11)
        for part in range(layout.tp):
            x = left + 70 + 160 * part
            c.arrow(x, 135, x, 117)
            c.arrow(x, 135, x, 153)
            c.text(x + 10, 140, "DP", size=11)
    for y in (85, 185):
        c.arrow(340, y - 6, 420, y - 6)
        c.arrow(420, y + 6, 340, y + 6)
        c.text(380, y - 14, "PP", "middle", size=11)
    assert groups(layout, "ep").tolist() == groups(layout, "tp").tolist()
    c.text(40, 255, "A row of a stage has the same samples, a column the same part of the weights.")
    return c


def data() -> Canvas:
    """What each of 4 ranks holds under each ZeRO stage."""
    c = Canvas(760, 290)
    for column, name in enumerate(("weights", "gradients", "optimizer state")):
        c.text(145 + 140 * column, 24, name, "middle")
    c.text(500, 24, "what is sent")
    sent = (
        "all-reduce of gradients, once a step",
        "reduce-scatter once, all-gather once",
        "reduce-scatter each micro-batch",
        "all-gather before each pass as well",
    )
    for stage, words in enumerate(sent):
        top = 42 + 56 * stage
        c.text(20, top + 27, f"ZeRO {stage}", size=14)
        c.text(500, top + 26, words)
        sharded = (stage == 3, stage >= 2, stage >= 1)
        for column, is_sharded in enumerate(sharded):
            for rank in range(4):
                x, y = 85 + 140 * column, top + 11 * rank
                c.box(x, y, 120, 10, PALE if is_sharded else RANKS[rank])
                if is_sharded:
                    c.box(x + 30 * rank, y, 30, 10, RANKS[rank])
    c.text(
        20,
        280,
        "One bar a rank: what it holds within a step. "
        "From step to step ZeRO 1 and 2 keep only the shard of the weights.",
    )
    return c


def pipeline() -> Canvas:
    """Schedules with whole backwards on 4 ranks with 8 micro-batches, on one scale of time."""
    c = Canvas(760, 500)
    schedules = [
        (build("gpipe", 4, 1, 8), 1.0, "GPipe"),
        (build("1f1b", 4, 1, 8), 1.0, "1F1B"),
        (build("1f1b", 4, 2, 8), 0.5, "interleaved 1F1B, 2 chunks a rank"),
    ]
    for index, (schedule, forward_s, name) in enumerate(schedules):
        _timeline(c, schedule, forward_s, name, top=20 + 155 * index)
    c.box(60, 477, 20, 14, RANKS[0])
    c.text(86, 489, "forward")
    c.box(150, 477, 40, 14, RANKS[2])
    c.text(196, 489, "backward (twice as long)")
    c.text(360, 489, "numbers are micro-batches; the second chunk is paler")
    return c


def schedules() -> Canvas:
    """Schedules with backwards in two parts, on 4 ranks with 8 micro-batches."""
    c = Canvas(760, 500)
    named = [
        (build("zb-h1", 4, 1, 8), 1.0, "ZB-H1"),
        (build("zb-v", 4, 2, 8), 0.5, "ZB-V"),
        (build("dualpipe-v", 4, 2, 8), 0.5, "DualPipe-V"),
    ]
    for index, (schedule, forward_s, name) in enumerate(named):
        _timeline(c, schedule, forward_s, name, top=20 + 155 * index)
    for x, kind, words in (
        (60, "F", "forward"),
        (160, "B", "backward"),
        (270, "I", "gradient of the input"),
        (450, "W", "of the weights"),
    ):
        c.box(x, 477, 20, 14, COLOURS[kind][0])
        c.text(x + 26, 489, words)
    c.text(575, 489, "second chunk paler")
    return c


def _timeline(c: Canvas, schedule: Schedule, forward_s: float, name: str, top: float) -> None:
    result = simulate(schedule, forward_s, 2 * forward_s)
    held = max(result.peak_in_flight) / schedule.vpp
    c.title(
        20,
        top,
        f"{name}: idle {result.bubble_fraction:.0%} of the step; "
        f"rank 0 keeps the activations of up to {held:g} micro-batches",
    )
    for rank, row in enumerate(result.timeline):
        y = top + 10 + 28 * rank
        c.text(20, y + 17, f"rank {rank}", size=11)
        for (kind, stage, micro_batch), start, end in row:
            fill = COLOURS[kind][stage >= schedule.pp]
            x, width = 60 + 20.5 * start, 20.5 * (end - start)
            c.parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="25" fill="{fill}" '
                f'stroke="white"/>'
            )
            c.text(x + width / 2, y + 16, str(micro_batch), "middle", "white", size=10)


def tensor() -> Canvas:
    """An MLP on 2 ranks, without and with Megatron's sequence parallelism."""
    c = Canvas(760, 400)
    c.title(20, 24, "TP: both ranks have all hidden states")
    _mlp(c, 40, split=False, joins=("", "all-reduce"))
    c.title(20, 214, "TP (sp): each rank has half of the sequence")
    _mlp(c, 230, split=True, joins=("all-gather", "reduce-scatter"))
    return c


def _mlp(c: Canvas, top: float, split: bool, joins: tuple[str, str]) -> None:
    before, after = joins
    for rank in range(2):
        y, colour = top + 75 * rank, RANKS[rank]
        c.text(20, y + 36, f"rank {rank}")
        for x in (80, 640):
            c.box(x, y, 60, 60, PALE)
            c.box(x, y + 30 * rank if split else y, 60, 30 if split else 60, colour)
        c.box(240, y, 60, 60, PALE, "x")
        c.box(340, y, 90, 60, PALE)
        c.box(340 + 45 * rank, y, 45, 60, colour)
        c.text(385, y + 35, "gate, up", "middle")
        c.box(470, y, 60, 60, PALE)
        c.box(470, y + 30 * rank, 60, 30, colour)
        c.text(500, y + 35, "down", "middle")
        for x in (144, 304, 434, 534):
            end = {144: 236, 304: 336, 434: 466, 534: 636}[x]
            c.arrow(x, y + 30, end, y + 30)
    c.text(190, top + 71, before, "middle")
    c.text(585, top + 71, after, "middle")
    if split:
        c.text(110, top + 150, "norm, dropout", "middle", GREY, 11)
    c.text(385, top + 150, "by columns", "middle", GREY, 11)
    c.text(500, top + 150, "by rows", "middle", GREY, 11)


def sequence() -> Canvas:
    """Ulysses exchanges sequence for heads; a zigzag ring shares out causal attention evenly."""
    c = Canvas(760, 350)
    c.title(20, 24, "Ulysses on 2 ranks")
    for column, caption in enumerate(("between layers", "around attention")):
        x = 50 + 170 * column
        for rank in range(2):
            for row in range(4):
                for head in range(4):
                    own = row // 2 == rank if column == 0 else head // 2 == rank
                    fill = RANKS[rank] if own else PALE
                    c.box(x + 22 * head, 60 + 130 * rank + 22 * row, 22, 22, fill)
        c.text(x + 44, 50, "heads →", "middle", size=11)
        c.text(x + 44, 300, caption, "middle", GREY, 11)
    for rank in range(2):
        c.text(10, 108 + 130 * rank, f"rank {rank}", size=11)
        c.arrow(146, 104 + 130 * rank, 212, 104 + 130 * rank)
        c.text(179, 96 + 130 * rank, "all-to-all", "middle", size=11)
    c.text(50, 320, "sequence runs downwards", size=11, ink=GREY)

    c.title(380, 24, "Ring on 4 ranks: who computes which scores")
    owner = {}
    for rank in range(4):
        for position in ring_positions(8, 4, rank):
            owner[int(position)] = rank
    for query in range(8):
        for key in range(8):
            fill = RANKS[owner[query]] if key <= query else PALE
            c.box(440 + 28 * key, 60 + 28 * query, 28, 28, fill)
        c.text(434, 79 + 28 * query, f"chunk {query}", "end", size=11)
    c.text(552, 50, "keys and values travel →", "middle", size=11)
    for rank in range(4):
        c.box(684, 70 + 30 * rank, 16, 16, RANKS[rank])
        c.text(706, 83 + 30 * rank, f"rank {rank}", size=11)
    c.text(380, 310, "Of 8 chunks of the sequence each rank has an early and a late one,", size=11)
    c.text(380, 326, "so each has 9 of the 36 blocks.", size=11)
    return c


def expert() -> Canvas:
    """Tokens travel to the ranks of their experts and back."""
    c = Canvas(760, 270)
    chosen = ((0, 2, 1, 3), (2, 0, 3, 2))  # the expert of each token, on each rank
    top = (50, 160)
    for x, words in (
        (95, "tokens"),
        (245, "dispatch"),
        (385, "experts"),
        (530, "combine"),
        (665, "weighted sum"),
    ):
        c.text(x, 28, words, "middle")
    for rank in range(2):
        c.text(15, top[rank] + 44, f"rank {rank}")
        for half in range(2):
            c.box(340, top[rank] + 42 * half, 90, 36, PALE, f"expert {2 * rank + half}")
    for rank, experts in enumerate(chosen):
        for place, number in enumerate(experts):
            y = top[rank] + 8 + 20 * place
            target = top[number // 2] + 18 + 42 * (number % 2)
            c.box(70, y - 8, 50, 16, RANKS[rank])
            c.box(640, y - 8, 50, 16, RANKS[rank])
            c.arrow(124, y, 336, target, RANKS[rank])
            c.arrow(434, target, 636, y, RANKS[rank])
    c.text(
        15, 262, "Drawn with one expert a token; with k experts, k copies of it travel.", size=11
    )
    return c


FIGURES: dict[str, Callable[[], Canvas]] = {
    "ranks": ranks,
    "data": data,
    "pipeline": pipeline,
    "schedules": schedules,
    "tensor": tensor,
    "sequence": sequence,
    "expert": expert,
}


def main() -> None:
    for name, figure in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(figure().svg())


if __name__ == "__main__":
    main()
