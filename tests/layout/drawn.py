"""Layouts drawn at random, legal or not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fivefold.layout.notation import PLANNED_SCHEDULES, RECOMPUTE, SCHEDULES, Layout

DEGREES = (
    *("tp", "pp", "vpp", "dp", "dp_replicate", "ep", "etp", "ulysses", "ring"),
    *("micro_batch", "accumulation"),
)
RECOMPUTED = st.sampled_from(RECOMPUTE).flatmap(
    lambda mode: st.tuples(st.just(mode), st.integers(0, 90 if mode == "full" else 0))
)


def layouts(degrees: SearchStrategy[int], **others: SearchStrategy) -> SearchStrategy[Layout]:
    """With all degrees drawn from one strategy, save fields that have their own."""
    fields: dict[str, SearchStrategy] = dict.fromkeys(DEGREES, degrees)
    fields |= {"sp": st.booleans(), "zero": st.integers(0, 3)}
    fields["schedule"] = st.sampled_from((*SCHEDULES, *PLANNED_SCHEDULES))
    return st.builds(
        lambda recompute, **fields: Layout(
            recompute=recompute[0], recompute_layers=recompute[1], **fields
        ),
        recompute=RECOMPUTED,
        **fields | others,
    )
