"""Where the ranks of a group sit: its axes as (size, stride) in the order of the ranks.

A stride is the distance between the ranks of neighbours along an axis. A group that spans several
axes is their product, inner ones first. Ranks fill the cluster in order, so size and stride say
which tiers of the network a group crosses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.cluster import Cluster
from fivefold.cluster.collectives import members_per_tier
from fivefold.layout.batch import LayoutBatch

Span = list[tuple[Any, Any]]
"""(size, stride) of each axis of a group, inner axes first; numbers or arrays [n]."""


def members(cluster: Cluster, layouts: LayoutBatch) -> dict[str, NDArray[np.int64]]:
    """For every axis, how many members of a group sit together at each tier: [tiers, n]."""
    together = {}
    for axis, span in spans(layouts).items():
        parts = [members_per_tier(cluster, size, stride) for size, stride in span]
        together[axis] = np.prod(parts, axis=0)
    return together


def spans(layouts: LayoutBatch) -> dict[str, Span]:
    """The span of every axis that a transfer can name (see `layout.ranks.AXES`)."""
    parts = {
        "tp": [("tp", layouts.tp)],
        "cp": [("ulysses", layouts.ulysses), ("ring", layouts.ring)],
        "dp": [("dp_shard", layouts.dp_shard), ("dp_replicate", layouts.dp_replicate)],
        "pp": [("pp", layouts.pp)],
    }
    stride: Any = np.ones_like(layouts.tp)
    axes: dict[str, tuple[Any, Any]] = {}
    order: list[str] = []
    for name in layouts.order:
        for part, size in parts.get(name, ()):
            axes[part] = (size, stride)
            stride = stride * size
            order.append(part)

    def product(*names: str) -> Span:
        return [axes[name] for name in order if name in names]

    sparse = _sparse(layouts, product("tp", "ulysses", "ring", "dp_shard"))
    return {
        "tp": product("tp"),
        "ulysses": product("ulysses"),
        "ring": product("ring"),
        "pp": product("pp"),
        "dp_replicate": product("dp_replicate"),
        "dp_shard_cp": product("dp_shard", "ulysses", "ring"),
        "dp_cp": product("dp_shard", "dp_replicate", "ulysses", "ring"),
        "sequence": product("tp", "ulysses", "ring"),
        "world": product(*order),
        "edp": [*sparse["edp_shard"], axes["dp_replicate"]],
        **sparse,
    }


def _sparse(layouts: LayoutBatch, stage: Span) -> dict[str, Span]:
    """etp, ep and edp share out the ranks of a stage (of one replica), in ascending order."""
    inner = layouts.ep if layouts.order.index("ep") < layouts.order.index("dp") else None
    etp, rest = _split(stage, layouts.etp)
    if inner is not None:
        ep, rest = _split(rest, layouts.ep)
        return {"etp": etp, "ep": ep, "edp_shard": rest}
    edp, rest = _split(rest, layouts.edp_shard)
    return {"etp": etp, "ep": rest, "edp_shard": edp}


def _split(span: Span, size: Any) -> tuple[Span, Span]:
    """The innermost `size` ranks of a span, and the rest of it."""
    taken, left = [], []
    for length, stride in span:
        here = np.gcd(size, length)
        taken.append((here, stride))
        left.append((length // here, stride * here))
        size = size // here
    return taken, left
