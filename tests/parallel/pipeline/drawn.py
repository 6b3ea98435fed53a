"""Schedules that hypothesis draws, and tables that are written by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from fivefold.layout.actions import Action
from fivefold.layout.notation import PLANNED_SCHEDULES, SCHEDULES
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.table import Schedule

LOOPED = ("gpipe", "1f1b", "bfs")
SPLIT = ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")
EVERY = (*SCHEDULES, *PLANNED_SCHEDULES)


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = EVERY) -> Schedule:
    """A schedule of one of the names, of up to 8 ranks, with numbers that it can run."""
    name = draw(st.sampled_from(names))
    pp = draw(st.integers(1 if name in ("gpipe", "1f1b") else 2, 8))
    if name == "dualpipe":
        pp += pp % 2
    vpp = {"zb-v": 2, "dualpipe-v": 2, "bfs": 2}.get(name, 1)
    if name in ("1f1b", "bfs"):
        vpp = draw(st.integers(vpp, 4))
    least = 2 * pp if name in ("dualpipe", "dualpipe-v") else 1
    if name == "1f1b" and vpp > 1:
        micro_batches = draw(st.integers(1, 4)) * pp
    else:
        micro_batches = draw(st.integers(least, least + 20))
    if name == "dualpipe":
        micro_batches += micro_batches % 2
    return build(name, pp, vpp, micro_batches)


def row(text: str) -> tuple[Action, ...]:
    """Reads "F00 B31" as the actions (F, stage 0, micro-batch 0), (B, stage 3, micro-batch 1)."""
    return tuple(Action(word[0], int(word[1]), int(word[2])) for word in text.split())


def table(name: str, micro_batches: int, *rows: str) -> Schedule:
    return Schedule(name, len(rows), 1, micro_batches, tuple(row(text) for text in rows))
