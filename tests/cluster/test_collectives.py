from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fivefold.cluster import collectives
from fivefold.cluster.cluster import Cluster, Tier
from fivefold.cluster.collectives import OPS, RING_PASSES, members_per_tier, seconds
from fivefold.cluster.load import load_cluster, load_device

GIB = 2**30
LARGE = 1e13  # bytes; latency does not count


def ideal(cluster: Cluster) -> Cluster:
    """Without losses and without reductions in the switch."""
    tiers = [replace(tier, efficiency=1.0, in_switch_reduce=None) for tier in cluster.system]
    return replace(cluster, system=tuple(tiers))


def made_of(*tiers: Tier, gpus: int) -> Cluster:
    return Cluster("test", load_device("h100"), tiers, gpus)


def time(cluster: Cluster, op: str, size: int, stride: int, payload: float) -> float:
    members = members_per_tier(cluster, size, stride)
    return float(seconds(cluster, op, members, payload)[0])


def speed(cluster: Cluster, op: str, size: int, stride: int) -> float:
    """Payload bytes a second of large messages."""
    return LARGE / time(cluster, op, size, stride, LARGE)


H100 = ideal(load_cluster("dgx-h100", 1024))


# Groups


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 16])
def test_members_of_a_block_are_those_of_the_worst_group(size: int, stride: int) -> None:
    gpus = 32 * 9 * 16
    cluster = made_of(Tier("a", 8, 1), Tier("b", 32, 1), Tier("c", None, 1), gpus=gpus)
    ranks = np.arange(gpus).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
    for tier, block in enumerate(cluster.tier_sizes):
        fewest = min(min(Counter(row.tolist()).values()) for row in ranks // block)
        ours = members_per_tier(cluster, size, stride)[tier, 0]
        assert ours == fewest if block % stride == 0 else 1 <= ours <= fewest


def test_members_of_a_group_of_two_axes_are_the_product() -> None:
    tp, cp, dp = 2, 2, 64  # cp at stride 2, dp at stride 8: pp or ep of 2 between them
    both = members_per_tier(H100, cp, tp) * members_per_tier(H100, dp, 8)
    assert both[:, 0].tolist() == [2, 64, 128]


def test_groups_are_arrays() -> None:
    members = members_per_tier(H100, np.array([8, 16, 16]), np.array([1, 1, 8]))
    assert members.tolist() == [[8, 8, 1], [8, 16, 16], [8, 16, 16]]
    for op in OPS:
        payload = np.array([1e6, 2e6, 3e6])
        together = seconds(H100, op, members, payload)
        alone = [seconds(H100, op, members[:, i : i + 1], payload[i])[0] for i in range(3)]
        assert together.tolist() == pytest.approx(alone)


def test_a_group_of_one_takes_no_time() -> None:
    assert all(time(H100, op, 1, 1, 1e9) == 0 for op in OPS)


# The cases from the field


def test_tp16_over_two_nodes_is_slower_than_tp8_within_one() -> None:
    """Llama-3.1-70B, 8192 tokens: 10 collectives of 128 MiB a layer, 80 layers.

    tp8 sends 87.5 GiB a GPU, 0.21 s over NVLink. tp16 sends 93.75 GiB: 2 s if they all pass one
    NIC of 50 GB/s, as with one member a node; with 8 members a node NCCL's rings use all 8 NICs.
    """
    payload = 80 * 10 * 128 * 2**20
    assert time(H100, "all_gather", 8, 1, payload) == pytest.approx(87.5 * GIB / 450e9, rel=1e-3)
    assert time(H100, "all_gather", 8, 1, payload) == pytest.approx(0.21, abs=0.005)
    assert time(H100, "all_gather", 16, 8, payload) == pytest.approx(93.75 * GIB / 50e9, rel=1e-3)
    assert time(H100, "all_gather", 16, 8, payload) == pytest.approx(2.0, abs=0.05)
    over_all_nics = time(H100, "all_gather", 16, 1, payload)
    assert over_all_nics == pytest.approx(93.75 * GIB / (8 * 50e9), rel=1e-3)
    real = load_cluster("dgx-h100", 16)
    calls = [800 * time(real, "all_gather", tp, 1, 128 * 2**20) for tp in (8, 16)]
    assert calls[1] > 1.1 * calls[0]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("size", "stride"), [(16, 8), (16, 1), (128, 1)])
def test_large_messages_halve_with_bandwidth_and_double_with_volume(
    op: str, size: int, stride: int
) -> None:
    slow = [replace(tier, bandwidth=tier.bandwidth / 2) for tier in H100.system]
    halved = replace(H100, system=tuple(slow))
    base = time(H100, op, size, stride, LARGE)
    assert time(halved, op, size, stride, LARGE) == pytest.approx(2 * base, rel=1e-4)
    assert time(H100, op, size, stride, 2 * LARGE) == pytest.approx(2 * base, rel=1e-4)


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72", "mi300x", "ub-mesh", "hgx-a800"])
@pytest.mark.parametrize("op", OPS)
def test_time_grows_with_volume_and_falls_with_bandwidth(name: str, op: str) -> None:
    cluster = load_cluster(name, 512)
    payloads = np.logspace(3, 10, 50)  # 1 KB to 10 GB
    fast = [replace(t, bandwidth=1.3 * t.bandwidth) for t in cluster.system]
    for size, stride in [(8, 1), (16, 1), (16, 8), (64, 8), (4, 128), (512, 1)]:
        members = members_per_tier(cluster, size, stride)
        times = seconds(cluster, op, members, payloads)
        assert (np.diff(times) > 0).all()
        assert (seconds(replace(cluster, system=tuple(fast)), op, members, payloads) < times).all()


def test_latency_dominates_small_messages() -> None:
    for op in OPS:
        small, twice = time(H100, op, 16, 8, 1e3), time(H100, op, 16, 8, 2e3)
        assert small > 5e-6
        assert twice < 1.05 * small


def test_latency_of_all_reduce_grows_with_the_logarithm_and_that_of_a_ring_in_proportion() -> None:
    latency = {
        op: [time(H100, op, size, 8, 1) for size in (32, 64, 128)]
        for op in ("all_reduce", "all_gather")
    }
    step = np.diff(latency["all_reduce"])
    assert step[1] == pytest.approx(step[0], rel=1e-2)
    step = np.diff(latency["all_gather"])
    assert step[1] == pytest.approx(2 * step[0], rel=0.05)


def test_expert_all_to_all_takes_the_bytes_that_leave() -> None:
    """DeepSeek-V3: 4096 tokens x 8 experts x 7168 x 2 bytes = 448 MiB dispatched a layer."""
    payload = 4096 * 8 * 7168 * 2
    assert payload == 448 * 2**20
    ideal_h800 = ideal(load_cluster("hgx-h800", 2048))
    factor = LARGE / payload
    one_node = time(ideal_h800, "all_to_all", 8, 1, LARGE) / factor
    assert one_node == pytest.approx(payload * 7 / 8 / 200e9, rel=1e-3)
    eight_nodes = time(ideal_h800, "all_to_all", 64, 1, LARGE) / factor
    assert eight_nodes == pytest.approx(payload * 56 / 64 / 50e9, rel=1e-3)
    # The hottest rank's twice as many bytes take twice as long.
    assert time(ideal_h800, "all_to_all", 64, 1, 2 * LARGE) == pytest.approx(
        2 * factor * eight_nodes, rel=1e-3
    )


# Measured figures (stas00/ml-engineering, NVIDIA/nccl and nccl-tests)


@pytest.mark.parametrize(
    ("name", "op", "size", "measured"),
    [
        ("dgx-a100", "all_reduce", 8, 235),
        ("dgx-h100", "all_reduce", 8, 480),
        ("dgx-h200", "all_reduce", 8, 473.1),
        ("dgx-h200", "all_gather", 8, 365.6),
        ("dgx-b200", "all_reduce", 8, 838),
        ("dgx-b200", "all_gather", 8, 682.2),
        ("gb200-nvl72", "all_reduce", 72, 850),
        ("hgx-h800", "all_reduce", 8, 215),
        ("mi300x", "all_reduce", 8, 312.9),
        ("mi300x", "all_reduce", 2, 47.7),
    ],
)
def test_large_messages_reach_the_measured_bus_bandwidth(
    name: str, op: str, size: int, measured: float
) -> None:
    cluster = load_cluster(name, 72)
    bus_bandwidth = RING_PASSES[op] * (size - 1) / size * speed(cluster, op, size, 1)
    assert bus_bandwidth / 1e9 == pytest.approx(measured, rel=0.07)


def test_rings_of_a_group_use_as_many_nics_as_it_has_members_in_a_node() -> None:
    """Two nodes with k H100s each: k times as fast (NVIDIA/nccl issue 1250)."""
    cluster = load_cluster("dgx-h100", 16)
    speeds = [
        speed(cluster, "all_gather", 2 * k, 8 // k) * (2 * k - 1) / (2 * k) for k in (1, 2, 4)
    ]
    assert np.array(speeds) / speeds[0] == pytest.approx([1, 2, 4], rel=1e-3)


@pytest.mark.parametrize(("size", "measured_us"), [(2, 10), (4, 16.9), (6, 25.2), (8, 33.7)])
def test_a_tiny_all_reduce_takes_tens_of_microseconds(size: int, measured_us: float) -> None:
    """Ring on a DGX A100 with one channel (NVIDIA/nccl-tests issue 123), an upper bound."""
    ours = 1e6 * time(load_cluster("dgx-a100", 8), "all_reduce", size, 1, 8)
    assert measured_us / 3 < ours < 1.1 * measured_us


# Shapes


def test_a_full_mesh_uses_a_link_to_each_member_and_a_send_one() -> None:
    mesh = ideal(load_cluster("mi300x", 8))
    for size in (2, 4, 8):
        sent = (size - 1) / size
        assert sent * speed(mesh, "all_gather", size, 1) == pytest.approx(
            (size - 1) * 64e9, rel=1e-3
        )
        assert sent * speed(mesh, "all_to_all", size, 1) == pytest.approx(
            (size - 1) * 64e9, rel=1e-3
        )
        assert speed(mesh, "send", size, 1) == pytest.approx(64e9, rel=1e-3)
    half = ideal(load_cluster("mi300x", 4))  # a job on 4 of the 8 has the links between them
    assert speed(half, "all_gather", 4, 1) * 3 / 4 == pytest.approx(3 * 64e9, rel=1e-3)


def test_each_dimension_of_a_mesh_has_links_of_its_own() -> None:
    mesh = ideal(load_cluster("ub-mesh", 64))
    column = speed(mesh, "all_gather", 8, 8) * 7 / 8
    assert column == pytest.approx(392e9, rel=1e-3)
    # All-to-all on a rack: 7/8 of the bytes change their place in a dimension, over 7 links.
    assert speed(mesh, "all_to_all", 64, 1) == pytest.approx(392e9 * 8 / 7, rel=1e-3)


def test_a_ring_is_a_line_for_a_part_of_it() -> None:
    ring = made_of(Tier("ring", 16, 100e9, shape="ring", links=2), gpus=16)
    assert speed(ring, "all_gather", 16, 1) * 15 / 16 == pytest.approx(100e9, rel=1e-3)
    assert speed(ring, "all_gather", 4, 1) * 3 / 4 == pytest.approx(50e9, rel=1e-3)
    assert speed(ring, "send", 4, 1) == pytest.approx(50e9, rel=1e-3)
    # All-to-all: on average a quarter of the ring, 4 hops, over both links.
    assert speed(ring, "all_to_all", 16, 1) * 15 / 16 == pytest.approx(100e9 / 4, rel=1e-3)
    torus = made_of(Tier("torus", 64, 300e9, shape="torus", links=6), gpus=64)
    assert speed(torus, "all_to_all", 64, 1) * 63 / 64 == pytest.approx(100e9, rel=1e-3)


def test_an_oversubscribed_spine_hurts_those_who_are_alone_below_it() -> None:
    flat = ideal(load_cluster("h100:8x450GB/s,256x50GB/s,50GB/s", 1024))
    spine = replace(flat.system[2], oversubscription=7.0)
    tapered = replace(flat, system=(*flat.system[:2], spine))
    # 32 members to a leaf, of which one ring crosses: its share of the uplinks is 32/7 of a NIC.
    assert speed(tapered, "all_gather", 128, 8) == pytest.approx(speed(flat, "all_gather", 128, 8))
    # One member to a leaf: a seventh.
    assert speed(tapered, "all_gather", 4, 256) == pytest.approx(
        speed(flat, "all_gather", 4, 256) / 7, rel=1e-3
    )
    assert speed(tapered, "send", 4, 256) == pytest.approx(50e9 / 7, rel=1e-3)
    assert speed(tapered, "send", 128, 8) == pytest.approx(50e9, rel=1e-3)
    assert speed(tapered, "all_to_all", 1024, 1) == pytest.approx(
        50e9 / 7 / (1 - 256 / 1024), rel=1e-3
    )


def test_messages_between_rails_pass_the_inner_tier() -> None:
    one_plane = made_of(Tier("node", 8, 60e9), Tier("net", None, 50e9), gpus=64)
    rails = made_of(Tier("node", 8, 60e9), Tier("net", None, 50e9, rails=8), gpus=64)
    fast_nic = replace(rails, system=(rails.system[0], replace(rails.system[1], bandwidth=1e12)))
    assert speed(one_plane, "all_to_all", 64, 1) == pytest.approx(50e9 * 64 / 56, rel=1e-3)
    assert speed(fast_nic, "all_to_all", 64, 1) == pytest.approx(60e9 * 8 / 7, rel=1e-3)
    # With one member a node all are on one rail.
    assert speed(rails, "all_to_all", 8, 8) == pytest.approx(50e9 * 8 / 7, rel=1e-3)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        collectives.seconds(H100, "gossip", members_per_tier(H100, 8, 1), 1e6)
