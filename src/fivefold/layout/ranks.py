"""Which rank does what: the rank order, and the groups of ranks that talk to each other.

The ranks of a layout are laid out twice: once for the dense weights (tp, cp, dp) and once, within
each pipeline stage, for the experts (etp, ep, edp). The layout must be legal (see `legality`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.notation import Layout

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
SPARSE_AXES = ("pp", "dp_replicate", "edp_shard", "ep", "etp")

AXES = {
    "pp": ("pp",),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "cp": ("ring", "ulysses"),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "tp": ("tp",),
    "dp_cp": ("dp_replicate", "dp_shard", "ring", "ulysses"),  # replicas of a dense weight
    "dp_shard_cp": ("dp_shard", "ring", "ulysses"),  # what ZeRO shards dense weights over
    "sequence": ("ring", "ulysses", "tp"),  # ranks that hold parts of the same sequences
    "stage": ("dp_replicate", "dp_shard", "ring", "ulysses", "tp"),  # a pipeline stage
    "ep": ("ep",),
    "etp": ("etp",),
    "edp": ("dp_replicate", "edp_shard"),  # replicas of an expert weight
    "edp_shard": ("edp_shard",),  # what ZeRO shards expert weights over
}
"""The axes a rank can have peers along, each as axes of one of the two arrays of ranks."""


@lru_cache(maxsize=64)
def dense_ranks(layout: Layout) -> NDArray[np.int64]:
    """The rank at each place [pp, dp_replicate, dp_shard, ring, ulysses, tp]; read-only.

    Ranks count up along the axes as `layout.order` nests them, innermost fastest. Within cp,
    ulysses is the inner part and ring the outer one; within dp, dp_shard and dp_replicate.
    """
    nested = [axis for axis in reversed(layout.order) if axis != "ep"]
    ranks = np.arange(layout.world_size).reshape([getattr(layout, axis) for axis in nested])
    ranks = ranks.transpose([nested.index(axis) for axis in ("pp", "dp", "cp", "tp")])
    ranks = ranks.reshape(
        layout.pp, layout.dp_replicate, layout.dp_shard, layout.ring, layout.ulysses, layout.tp
    )
    ranks.flags.writeable = False
    return ranks


@lru_cache(maxsize=64)
def sparse_ranks(layout: Layout) -> NDArray[np.int64]:
    """The rank at each place [pp, dp_replicate, edp_shard, ep, etp]; read-only.

    In each pipeline stage and replica the ranks, ascending, are shared out to edp_shard and ep;
    "ep" before "dp" in `layout.order` makes ep the inner one. Experts split by tensor parallelism
    (etp = tp > 1) keep the tp axis; whole experts (etp = 1) spread over the tp ranks as well.
    """
    replicas = (layout.pp, layout.dp_replicate)
    ranks = np.sort(dense_ranks(layout).reshape(*replicas, -1, layout.etp), axis=2)
    if layout.order.index("ep") < layout.order.index("dp"):
        ranks = ranks.reshape(*replicas, layout.edp_shard, layout.ep, layout.etp)
    else:
        ranks = ranks.reshape(*replicas, layout.ep, layout.edp_shard, layout.etp).swapaxes(2, 3)
    ranks.flags.writeable = False
    return ranks


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank stands along pp, dp, cp, tp, edp, ep, etp and along the parts of dp and cp.

    Ranks with the same pp, ep and etp hold the same experts.
    """
    _check_rank(layout, rank)
    dense = np.argwhere(dense_ranks(layout) == rank)[0].tolist()
    sparse = np.argwhere(sparse_ranks(layout) == rank)[0].tolist()
    place: dict[str, int] = {}
    place.update(zip(DENSE_AXES, dense, strict=True))
    place.update(zip(SPARSE_AXES, sparse, strict=True))
    place["dp"] = place["dp_replicate"] * layout.dp_shard + place["dp_shard"]
    place["cp"] = place["ring"] * layout.ulysses + place["ulysses"]
    place["edp"] = place["dp_replicate"] * layout.edp_shard + place["edp_shard"]
    return place


def groups(layout: Layout, axis: str) -> NDArray[np.int64]:
    """All groups of ranks along an axis of `AXES`, one a row: [world_size / degree, degree].

    The ranks of a row ascend, which is how torch.distributed numbers the members of a group. Along
    an axis of one part, and along dp and cp, a member's number is its coordinate.
    """
    parts = AXES[axis]
    if set(parts) <= set(DENSE_AXES):
        ranks, names = dense_ranks(layout), DENSE_AXES
    else:
        ranks, names = sparse_ranks(layout), SPARSE_AXES
    degree = math.prod(ranks.shape[names.index(part)] for part in parts)
    last = range(-len(parts), 0)
    rows = np.moveaxis(ranks, [names.index(part) for part in parts], last).reshape(-1, degree)
    return np.sort(rows, axis=1)


def group(layout: Layout, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, that differ from `rank` at most along an axis of `AXES`."""
    _check_rank(layout, rank)
    rows = groups(layout, axis)
    return tuple(rows[(rows == rank).any(axis=1)][0].tolist())


def _check_rank(layout: Layout, rank: int) -> None:
    if not 0 <= rank < layout.world_size:
        raise UserError(
            f"there is no rank {rank} in a layout of {layout.world_size} ranks: "
            f"they are 0 to {layout.world_size - 1}"
        )
