"""Fitting a layout to the global batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.text import nearest_multiples


def with_global_batch(
    layout: Layout, global_batch: int, given: Collection[str] = frozenset()
) -> Layout:
    """The layout with a step of `global_batch` sequences: accumulation is derived from it.

    `given` names the tokens that the text stated (see `stated`). Accumulation ("ga") stated without
    the micro-batch ("mb") derives the micro-batch; both stated must fit. UserError where
    `global_batch = dp * micro_batch * accumulation` has no solution.
    """
    formula = "global_batch = dp x micro_batch x accumulation"
    if global_batch < 1:
        raise UserError(f"the global batch must be 1 or more sequences, not {global_batch}")
    if "ga" in given and "mb" in given:
        if layout.global_batch == global_batch:
            return layout
        raise UserError(
            f"global batch {global_batch} is not dp {layout.dp} x mb {layout.micro_batch} x "
            f"ga {layout.accumulation} = {layout.global_batch} ({formula}): leave out ga, "
            "it follows from the others"
        )
    derived, stated_field = "accumulation", "micro_batch"
    if "ga" in given:
        derived, stated_field = stated_field, derived
    unit = layout.dp * getattr(layout, stated_field)
    if global_batch % unit:
        raise UserError(
            f"global batch {global_batch} is not a multiple of dp {layout.dp} x {stated_field} "
            f"{getattr(layout, stated_field)} = {unit} ({formula}): the nearest is "
            f"{nearest_multiples(global_batch, unit)}"
        )
    return replace(layout, **{derived: global_batch // unit})
