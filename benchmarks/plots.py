"""The plots of docs/accuracy.md: SVG, drawn on the canvas of docs/figures/draw.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

import numpy as np

from benchmarks.scores import Scored
from docs.figures.draw import GREY, PALE, RANKS, Canvas

COLOURS = {"dense": RANKS[0], "MoE": RANKS[1]}
BAND, BAND_INK = 0.2, "#c5cbd3"
"""Errors within which a point lies between the two outer lines."""
BIN, LIMIT = 0.05, 0.5
"""Width of a bar, and the error from which on rows share the last bar."""


def predicted_against_measured(rows: Sequence[Scored], memory: bool = False) -> Canvas:
    """A point a row, both axes logarithmic; on the diagonal the prediction is right."""
    pairs = [
        (row.case.memory_bytes, row.memory_bytes, row.case.kind)
        if memory
        else (row.case.step_s, row.step_s, row.case.kind)
        for row in rows
    ]
    scale = 1e9 if memory else 1.0
    points = [(m / scale, p / scale, kind) for m, p, kind in pairs if m and p]
    return predicted_beside_measured(points, "GB" if memory else "s")


def predicted_beside_measured(points: Sequence[tuple[float, float, str]], unit: str) -> Canvas:
    """Of points (measured, predicted, dense or MoE)."""
    canvas = Canvas(560, 560)
    values = [value for m, p, _ in points for value in (m, p)] or [1.0]
    low, high = floor(log10(min(values)) * 4) / 4, floor(log10(max(values)) * 4 + 1) / 4

    def at(value: float) -> float:
        return 470 * (log10(value) - low) / (high - low)

    canvas.box(70, 20, 470, 470, "white")
    for tick in _ticks(10**low, 10**high):
        x = at(tick)
        canvas.line(70 + x, 490, 70 + x, 20, PALE)
        canvas.line(70, 490 - x, 540, 490 - x, PALE)
        canvas.text(70 + x, 508, f"{tick:g}", "middle", size=11)
        canvas.text(62, 494 - x, f"{tick:g}", "end", size=11)
    canvas.line(70, 490, 540, 20, GREY)
    for factor in (1 + BAND, 1 - BAND):
        shift = 470 * log10(factor) / (high - low)
        right, up = max(0.0, -shift), max(0.0, shift)
        canvas.line(70 + right, 490 - up, 540 - up, 20 + right, BAND_INK)
    for measured, predicted, kind in points:
        canvas.parts.append(
            f'<circle cx="{70 + at(measured):.1f}" cy="{490 - at(predicted):.1f}" r="3" '
            f'fill="{COLOURS[kind]}" fill-opacity="0.55"/>'
        )
    canvas.text(305, 530, f"measured, {unit}", "middle")
    canvas.text(70, 14, f"predicted, {unit}")
    _legend(canvas, 400, 14)
    canvas.text(70, 552, f"thin lines: {BAND:.0%} too high and too low", ink=GREY, size=11)
    return canvas


def error_histogram(rows: Sequence[Scored]) -> Canvas:
    """How many rows have which error of the step time, dense below and MoE above."""
    count = round(LIMIT / BIN)
    edges = np.linspace(-LIMIT - BIN, LIMIT + BIN, 2 * count + 3)
    stacks = {kind: np.histogram(_errors(rows, kind), edges)[0] for kind in COLOURS}
    highest = max(1, int(np.sum(list(stacks.values()), axis=0).max()))
    canvas = Canvas(760, 300)
    width = 680 / (len(edges) - 1)
    base = np.zeros(len(edges) - 1)
    for kind, numbers in stacks.items():
        for i, number in enumerate(numbers):
            if number:
                height = 220 * number / highest
                y = 250 - 220 * base[i] / highest - height
                canvas.box(50 + i * width, y, width - 2, height, COLOURS[kind])
        base = base + numbers
    canvas.line(50, 250, 730, 250)
    for i in range(1, len(edges) - 1, 2):
        canvas.text(50 + i * width, 268, f"{edges[i]:+.0%}", "middle", size=11)
    words = "error of the predicted step time; the outermost bars hold all beyond"
    canvas.text(390, 290, words, "middle")
    canvas.text(44, 38, f"{highest}", "end", size=11)
    canvas.text(44, 254, "0", "end", size=11)
    canvas.text(50, 16, "rows")
    _legend(canvas, 600, 16)
    return canvas


def _errors(rows: Sequence[Scored], kind: str) -> list[float]:
    """Of the step time, no further out than the middle of the outermost bars."""
    most = LIMIT + BIN / 2
    errors = [row.step_error for row in rows if row.case.kind == kind]
    return [min(max(error, -most), most) for error in errors if error is not None]


def _ticks(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def _legend(canvas: Canvas, x: float, y: float) -> None:
    for i, (kind, colour) in enumerate(COLOURS.items()):
        canvas.box(x + 70 * i, y - 10, 12, 12, colour)
        canvas.text(x + 70 * i + 18, y, kind)
