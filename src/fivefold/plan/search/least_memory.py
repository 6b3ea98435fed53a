"""The layouts that take least memory, and the fewest devices on which one fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import ORDER, Layout
from fivefold.plan.engines import Job
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.search.candidates import rank_orders, recompute_modes, with_states
from fivefold.plan.search.constraints import Constraints
from fivefold.plan.search.ranking import DISTINCT, Best, codes
from fivefold.plan.search.space import Space, shared_out, space_of

AT_ONCE = 4096
"""Layouts whose memory is estimated at once."""
MOST_DEVICES = 2**20
"""`smallest_gpus` looks no further."""


def leanest(space: Space, top: int) -> list[tuple[float, Layout]]:
    """Peak bytes of the `top` layouts that take least memory, different in their degrees.

    They have the smallest micro-batch and the most recomputation that are left.
    """
    shapes = space.shapes
    if not len(shapes):
        return []
    smallest = shapes.micro_batch == _smallest_micro_batch(shapes)
    layouts = with_states(space.job, shapes.take(smallest), space.choices)
    modes = [m for m in recompute_modes(space.job, layouts, space.choices) if m.open.any()]
    best = Best(space.job, top, 0.0)
    order = next(iter(rank_orders(layouts, space.choices)), (ORDER, None))[0]
    for mode in {mode.name: mode for mode in modes}.values():
        for first in range(0, len(layouts), AT_ONCE):
            here = np.zeros(len(layouts), bool)
            here[first : first + AT_ONCE] = True
            part = replace(mode.of(layouts, here & mode.open), order=order)
            if len(part):
                best.add(part, estimate_memory(space.job, part).peak_bytes)
    return best.ranked()


def least_memory(job: Job, constraints: Constraints) -> tuple[float, Layout] | None:
    """The peak bytes of the layout that takes least memory; None where no layout is legal."""
    found = leanest(shared_out(job, constraints)[0], 1)
    return found[0] if found else None


def smallest_gpus(job: Job, constraints: Constraints, limit_bytes: float) -> int | None:
    """The fewest devices of the job's cluster, in full nodes, on which some layout takes at most
    `limit_bytes` of each. None where the machine ends before, or `MOST_DEVICES` are not enough.

    By doubling from one node and bisection between; assumes that more devices do not need more
    memory.
    """
    node = job.cluster.system[0].size or 1

    def fits(nodes: int) -> bool:
        try:
            devices = job.cluster.with_devices(nodes * node)
            space = space_of(replace(job, cluster=devices), constraints)
        except UserError:  # the machine ends before, or what is fixed needs other devices
            return False
        return any(peak <= limit_bytes for peak, _ in leanest(space, 1))

    nodes = 1
    while not fits(nodes):
        nodes *= 2
        if nodes * node > MOST_DEVICES:
            return None
    too_few = nodes // 2
    while nodes - too_few > 1:
        middle = (nodes + too_few) // 2
        if fits(middle):
            nodes = middle
        else:
            too_few = middle
    return nodes * node


def _smallest_micro_batch(shapes: LayoutBatch) -> NDArray[np.int64]:
    """For each shape, the smallest micro-batch among those with the same other degrees."""
    _, number = np.unique(codes(shapes, (*DISTINCT, "vpp")), return_inverse=True)
    smallest = np.full(number.max(initial=0) + 1, np.iinfo(np.int64).max)
    np.minimum.at(smallest, number, shapes.micro_batch)
    return smallest[number]
