"""What each pipeline schedule can run."""

from __future__ import annotations

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.layout.actions import is_table_file
from fivefold.layout.degrees import Degrees
from fivefold.layout.notation import Layout
from fivefold.layout.rule import is_one_of, rule


def has_file(layout: Degrees) -> bool:
    """Is the schedule a table in a file? Of many layouts none is: those are planned."""
    return isinstance(layout.schedule, str) and is_table_file(layout.schedule)


@rule(lambda layout: (layout.schedule != "gpipe") | (layout.vpp == 1))
def gpipe_has_one_chunk(layout: Layout) -> str:
    return (
        f"schedule gpipe runs one chunk a rank but vpp is {layout.vpp}: use vpp1, or "
        "schedule=1f1b, which interleaves the chunks, or schedule=bfs, gpipe with chunks"
    )


@rule(lambda layout: (layout.schedule != "bfs") | (layout.vpp > 1))
def breadth_first_has_chunks(layout: Layout) -> str:
    return (
        f"schedule=bfs runs one chunk of a rank after the other but vpp is {layout.vpp}: use vpp2, "
        "or schedule=gpipe, which is bfs with one chunk"
    )


@rule(
    lambda layout: (
        (layout.vpp == 1) | (layout.schedule != "1f1b") | (layout.accumulation % layout.pp == 0)
    )
)
def interleaving_fills_the_ranks(layout: Layout) -> str:
    pp, micro_batches = layout.pp, layout.accumulation
    below = max(pp, micro_batches // pp * pp)
    return (
        f"interleaved 1F1B (vpp{layout.vpp}) needs a number of micro-batches that is a multiple of "
        f"pp {pp}, not {micro_batches}: the nearest that work are {below} and {below + pp}"
    )


def _has_fixed_chunks(layout: Degrees) -> Elementwise:
    """Is the schedule one for a certain number of chunks, and for a pipeline only?"""
    return (layout.schedule == "zb-h1") | layout.is_bidirectional | _is_v(layout)


def _is_v(layout: Degrees) -> Elementwise:
    return is_one_of(layout.schedule, ("zb-v", "dualpipe-v"))


@rule(lambda layout: (layout.pp > 1) | np.logical_not(_has_fixed_chunks(layout)))
def schedule_has_a_pipeline(layout: Layout) -> str:
    return f"schedule={layout.schedule} orders the work of a pipeline, but pp is 1: use pp2 or 1f1b"


@rule(lambda layout: np.logical_not(_has_fixed_chunks(layout)) | (layout.vpp == 1 + _is_v(layout)))
def schedule_has_its_chunks(layout: Layout) -> str:
    chunks = 1 + layout.is_v_shaped
    return f"schedule={layout.schedule} is for vpp {chunks}, not vpp {layout.vpp}: use vpp{chunks}"


@rule(
    lambda layout: (
        np.logical_not(layout.is_bidirectional | (layout.schedule == "dualpipe-v"))
        | (layout.accumulation >= 2 * layout.pp)
    )
)
def dualpipe_is_filled(layout: Layout) -> str:
    return (
        f"schedule={layout.schedule} needs 2 x pp {layout.pp} = {2 * layout.pp} micro-batches or "
        f"more, not {layout.accumulation}: use ga{2 * layout.pp}"
    )


@rule(
    lambda layout: (
        np.logical_not(layout.is_bidirectional)
        | ((layout.pp % 2 == 0) & (layout.accumulation % 2 == 0))
    )
)
def dualpipe_halves_ranks_and_micro_batches(layout: Layout) -> str:
    return (
        f"schedule=dualpipe halves the ranks and the micro-batches, and pp {layout.pp} or "
        f"ga {layout.accumulation} is odd: use pp{layout.pp + layout.pp % 2} "
        f"ga{layout.accumulation + layout.accumulation % 2}, or dualpipe-v"
    )


def _table_degrees(layout: Layout) -> dict[str, int]:
    table = layout.table
    return {"pp": table.pp, "vpp": table.vpp, "ga": table.micro_batches} if table else {}


@rule(
    lambda layout: (
        not has_file(layout)
        or _table_degrees(layout) == {"pp": layout.pp, "vpp": layout.vpp, "ga": layout.accumulation}
    )
)
def table_is_for_the_layout(layout: Layout) -> str:
    if layout.table is None:
        return f"{layout.schedule} was not read: its table is needed"
    wanted = " ".join(f"{name}{value}" for name, value in _table_degrees(layout).items())
    return (
        f"{layout.schedule} is a table for {wanted}, not for pp{layout.pp} vpp{layout.vpp} "
        f"ga{layout.accumulation}: change the layout, or the global batch, from which ga follows"
    )


SCHEDULE_RULES = (
    gpipe_has_one_chunk,
    breadth_first_has_chunks,
    interleaving_fills_the_ranks,
    schedule_has_a_pipeline,
    schedule_has_its_chunks,
    dualpipe_is_filled,
    dualpipe_halves_ranks_and_micro_batches,
    table_is_for_the_layout,
)
