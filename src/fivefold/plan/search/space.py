"""The candidates of a search, before any of them is timed: how many, and on how many devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.plan.engines import Job
from fivefold.plan.search.candidates import (
    degrees,
    rank_orders,
    recompute_modes,
    state_options,
    with_micro_batches,
)
from fivefold.plan.search.constraints import Choices, Constraints

SMALLER_TRIED = 256
"""Numbers of devices tried where the one asked for cannot be shared out."""
SIZES_TRIED = 4
"""For the objective cost: the devices, half of them, and so on."""


@dataclass(frozen=True)
class Space:
    """The shapes (degrees, chunks, micro-batch) to look at."""

    job: Job
    choices: Choices
    shapes: LayoutBatch
    variants: NDArray[np.int64]  # [shape] ZeRO stages times recompute modes times rank orders
    dropped: int  # candidates that broke a rule

    @property
    def legal(self) -> int:
        """Legal layouts."""
        return int(self.variants.sum())


def space_of(job: Job, constraints: Constraints) -> Space:
    """The candidates on all devices of the job. UserError where what is fixed breaks a rule."""
    choices = constraints.choices
    split, degrees_tried = degrees(job, choices)
    shapes, tried = with_micro_batches(job, split, choices, constraints.planned_schedules)
    modes = sum(mode.open.astype(np.int64) for mode in recompute_modes(job, shapes, choices))
    states = state_options(job, shapes, choices)[0].sum(axis=1)
    orders = sum(changed.astype(np.int64) for _, changed in rank_orders(shapes, choices))
    dropped = degrees_tried - len(split) + tried - len(shapes)
    return Space(job, choices, shapes, states * modes * orders, dropped)


def shared_out(job: Job, constraints: Constraints) -> tuple[Space, list[str]]:
    """The candidates on all devices, or else on as many as can be shared out; and notes."""
    asked, batch = job.cluster.num_devices, job.global_batch
    space = space_of(job, constraints)
    if space.legal:
        return space, []
    for devices in islice(_fewer(asked, job.cluster.system[0].size or 1), SMALLER_TRIED):
        smaller = replace(job, cluster=job.cluster.with_devices(devices))
        space = space_of(smaller, constraints)
        if space.legal:
            note = f"a global batch of {batch} cannot be divided among {asked} devices"
            return space, [f"{note}: {devices} of them are used"]
    what = f"a global batch of {batch} sequences of {job.sequence_length} tokens"
    if not constraints.fix and not constraints.forbid:
        cure = f"a batch that is a multiple of {asked} would do"
        raise UserError(f"no layout of {asked} devices or fewer has {what}: {cure}")
    kept = f" that keeps {constraints.fix!r}" if constraints.fix else ""
    kept += f" without {constraints.forbid!r}" if constraints.forbid else ""
    raise UserError(
        f"no layout of {asked} devices{kept} has {what}: leave out some of what is fixed or "
        "forbidden"
    )


def _fewer(devices: int, node: int) -> Iterator[int]:
    """Smaller numbers of devices: full nodes, then parts of one."""
    yield from range((devices - 1) // node * node, 0, -node)
    yield from range(min(devices - 1, node - 1), 0, -1)


def smaller_spaces(space: Space, constraints: Constraints) -> Iterator[Space]:
    """The same job on half of the devices, and so on."""
    devices = space.job.cluster.num_devices
    for _ in range(SIZES_TRIED - 1):
        if devices % 2:
            return
        devices //= 2
        cluster = space.job.cluster.with_devices(devices)
        try:
            smaller = space_of(replace(space.job, cluster=cluster), constraints)
        except UserError:  # what is fixed needs more devices
            return
        if smaller.legal:
            yield smaller
