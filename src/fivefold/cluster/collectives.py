"""Seconds of a collective on a group of ranks, for many layouts at once.

A group is described by how many of its members are together inside one block of each tier
(`members_per_tier`): with 8 devices a node, 16 ranks at stride 1 are (8, 16), 16 ranks at stride 8
are (1, 16). All arrays have one element a layout. Payloads are those of `fivefold.ledger`.

Bandwidth. NCCL runs as many rings as a node has members of the group, each through its own NIC, so
`k` local members use `k` NICs; every ring crosses the border of each block once. Hence the pace of
a ring at a tier is (members in the block below) x (bandwidth of a device), and the slowest tier
that is crossed decides. Sibling groups (the other ranks of the node) run at the same time on their
own NICs. An uplink that is oversubscribed is shared by all members of the block below, of which
only one a ring needs it. On a full mesh a group of n uses n-1 links of each device at once.

Latency. NCCL's own model of a ring, a tree and the protocols LL, LL128 and Simple: a fixed part, a
step for each hop, and the share of the bandwidth that the protocol reaches; the fastest protocol is
taken (NVIDIA/nccl, src/graph/tuning.cc; Hu et al., "Demystifying NCCL", arXiv:2507.04786).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.cluster.cluster import Cluster, Tier

Floats = NDArray[np.float64]

RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often the payload goes round the ring (Thakur et al. 2005, section 4)."""
OPS = (*RING_PASSES, "all_to_all", "send")

# By protocol: LL, LL128, Simple.
BASE_S = np.array([6.6e-6, 14.0e-6, 8.4e-6])[:, None]
"""Fixed time of a call (baseLat of Ring in tuning.cc)."""
PROTOCOL_SHARE = np.array([0.25, 0.92, 1.0])[:, None]
"""Share of the bandwidth: LL sends 4 bytes of flag with 4 of data and does not fill the link,
LL128 8 in 128 (the factors on busBw in tuning.cc)."""
PEER_S = 0.5e-6
"""Assumed: the time to start the send to one more peer of an all-to-all."""


def members_per_tier(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> NDArray[np.int64]:
    """Members of a group that are together inside one block of each tier: [tiers, n].

    `size`, `stride`: [n] or one number; the group has `size` ranks, `stride` apart. Where groups
    straddle the blocks, the group counts that has the fewest members in a block, since it is the
    slowest; members at a stride that does not divide the block count as alone. For a group made of
    two axes multiply the arrays of the axes.
    """
    size, stride = np.broadcast_arrays(np.atleast_1d(size), np.atleast_1d(stride))
    together = np.empty((len(cluster.tiers), len(size)), dtype=np.int64)
    together[-1] = size
    for tier, block in enumerate(cluster.tier_sizes[:-1].tolist()):
        # Blocks of `block / stride` members cut into groups of `size`: parts of gcd members.
        fits = block % stride == 0
        together[tier] = np.where(fits, np.gcd(size, block // stride), 1)
    return together


def seconds(
    cluster: Cluster, op: str, members: NDArray[np.int64], payload_bytes: ArrayLike
) -> Floats:
    """Seconds of one call on a group that is alone with its siblings: [n]; 0 for a group of one.

    `op` is one of `OPS`; `members` [tiers, n] comes from `members_per_tier`; `payload_bytes` [n] or
    one number. A `send` goes to the neighbour in the group, and the slowest hop counts.
    """
    counts = members.astype(np.float64)
    inside = np.vstack([np.ones_like(counts[:1]), counts[:-1]])  # in the block below
    size = counts[-1]
    if op in RING_PASSES:
        pace, latency = _ring(cluster, op, counts, inside)
    elif op == "all_to_all":
        pace, latency = _all_to_all(cluster, counts, inside)
    elif op == "send":
        pace, latency = _send(cluster, counts, inside)
    else:
        raise ValueError(f"unknown collective {op!r}: known are {', '.join(OPS)}")
    bulk = np.asarray(payload_bytes) * pace
    times = BASE_S + latency + bulk / PROTOCOL_SHARE
    return np.where(size > 1, times.min(axis=0), 0.0)


def _step_latencies(cluster: Cluster) -> Floats:
    """Seconds of one step: [protocols, tiers]."""
    return np.array([tier.latency_s for tier in cluster.tiers]).T


def _ring(cluster: Cluster, op: str, counts: Floats, inside: Floats) -> tuple[Floats, Floats]:
    """Seconds a payload byte [n], latency [protocols, n] of a collective that goes round rings."""
    size, passes = counts[-1], RING_PASSES[op]
    wire = passes * (size - 1) / size
    pace = np.zeros_like(size)
    for index, tier in enumerate(cluster.tiers):
        blocks = counts[index] / inside[index]
        bandwidth = _ring_bandwidth(tier, blocks, _blocks(cluster, index))
        rate = inside[index] * bandwidth / tier.oversubscription
        at_tier = wire / (rate * tier.efficiency)
        if op == "all_reduce" and index == 0 and tier.in_switch_reduce is not None:
            at_tier = np.minimum(at_tier, 1 / (tier.in_switch_reduce * tier.bandwidth))
        pace = np.maximum(pace, np.where(blocks > 1, at_tier, 0.0))

    steps = _step_latencies(cluster)
    latency = steps @ (size / inside - size / counts)  # hops of a ring that cross each tier
    if op == "all_reduce":  # a tree: a chain in the node, then the depth of a binary tree
        depth = np.vstack([counts[:1] - 1, np.log2(counts[1:] / inside[1:])])
        latency = np.minimum(latency, steps @ depth)
    return pace, passes * latency


def _ring_bandwidth(tier: Tier, blocks: Floats, all_blocks: float) -> Floats | float:
    """Bytes/s of a device on rings through `blocks` of the tier's `all_blocks` blocks."""
    if tier.shape == "fullmesh":
        return _mesh_bandwidth(tier, blocks)
    if tier.shape in ("ring", "torus"):  # a part of a ring is a line: its ends have one side only
        return tier.bandwidth * np.where(blocks >= all_blocks, 1.0, 0.5)
    return tier.bandwidth


def _mesh_bandwidth(tier: Tier, blocks: Floats) -> Floats:
    """Bytes/s of a device over its links to the `blocks` - 1 other blocks of the group."""
    return tier.bandwidth * np.clip(blocks - 1, 1, tier.links) / tier.links


def _blocks(cluster: Cluster, index: int) -> float:
    """Blocks that a tier joins, as the machine is built."""
    below = cluster.system[index - 1].size if index else 1
    size = cluster.system[index].size or cluster.num_devices
    return size / (below or 1)


def _all_to_all(cluster: Cluster, counts: Floats, inside: Floats) -> tuple[Floats, Floats]:
    """As `_ring`. Each member gets 1/size of the payload, and all tiers work at the same time.

    Through a switch goes what leaves the block below; through a mesh what changes its place in
    that dimension. Where rails are separate (or the outer tier is a mesh) a message first moves
    inside the node to the device on the receiver's rail (NCCL's PXN), so that (k-1)/k of all bytes
    use the inner tier, else only those between the k local members.
    """
    size = counts[-1]
    pace = np.zeros_like(size)
    relayed = any(tier.rails > 1 or tier.shape != "switch" for tier in cluster.tiers[1:])
    for index, tier in enumerate(cluster.tiers):
        blocks = counts[index] / inside[index]
        if index == 0 and not relayed:
            share = (counts[0] - 1) / size
        elif index == 0 or tier.shape != "switch":
            share = 1 - 1 / blocks
        else:
            share = 1 - inside[index] / size
        bandwidth = _all_to_all_bandwidth(tier, blocks) * tier.efficiency / tier.oversubscription
        pace = np.maximum(pace, share / bandwidth)
    return pace, _step_latencies(cluster) @ _outermost(counts, inside) + PEER_S * (size - 1)


def _all_to_all_bandwidth(tier: Tier, blocks: Floats) -> Floats | float:
    """Bytes/s that a device gets to all others when all send at once."""
    if tier.shape == "fullmesh":
        return _mesh_bandwidth(tier, blocks)
    if tier.shape in ("ring", "torus"):  # on average a message travels a quarter of each dimension
        dimensions = max(1, tier.links // 2)
        return tier.bandwidth / np.maximum(1, dimensions * blocks ** (1 / dimensions) / 4)
    return tier.bandwidth


def _send(cluster: Cluster, counts: Floats, inside: Floats) -> tuple[Floats, Floats]:
    """As `_ring`. A message has one link of a mesh or ring, and one NIC; of the members of a block
    one sends out of it, so that it has their share of an oversubscribed uplink for itself."""
    pace = np.zeros_like(counts[-1])
    for index, tier in enumerate(cluster.tiers):
        link = tier.bandwidth * tier.efficiency / tier.links
        rate = link * np.minimum(1, inside[index] / tier.oversubscription)
        pace = np.maximum(pace, np.where(counts[index] > inside[index], 1 / rate, 0.0))
    return pace, _step_latencies(cluster) @ _outermost(counts, inside)


def _outermost(counts: Floats, inside: Floats) -> Floats:
    """1 at the outermost tier that a group crosses, 0 elsewhere: [tiers, n]."""
    return ((counts == counts[-1]) & (inside < counts[-1])).astype(np.float64)
