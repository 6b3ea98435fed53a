"""A GPU that the planner's own formulas describe: its constants must come back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fivefold.calibrate.clusterfile import as_text, write
from fivefold.calibrate.device import head
from fivefold.calibrate.measure import Measured
from fivefold.calibrate.points import Point
from fivefold.cluster.cluster import Cluster
from fivefold.cluster.collectives import members_per_tier, seconds
from fivefold.cluster.load import load_cluster, load_device
from fivefold.model.huggingface.load import load_config
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.time.accelerator import product_s
from fivefold.plan.time.operations import Matmul
from tests.helpers import refusal

PROCESSORS, BANDWIDTH, LAUNCH_S = 132, 3e12, 8e-6
MODEL = load_config(
    {
        "model_type": "llama",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    }
)
TRUTH = load_cluster("h100:8x450GB/s,50GB/s", 16)


def product(what: str, m: int, n: int, k: int, groups: int = 1) -> Point:
    """By the planner: no misaligned shapes, and large enough not to wait for memory."""
    job = Job(MODEL, TRUTH, 4096, 16, engine=ENGINES["fivefold"])
    s = float(product_s(job, TRUTH.device.constants, Matmul(what, m, n, k, groups=float(groups))))
    sizes = {"part": "forward", "m": m, "n": n, "k": k}
    sizes |= {"groups": groups} if groups > 1 else {}
    return Point(what, sizes, s, 1e-6, "bf16")


def points() -> Iterator[Point]:
    for m, n, k in itertools.product((4096, 8192), repeat=3):
        yield product("product", m, n, k)
    yield product("grouped", 2048, 8192, 4096, groups=8)
    for heads, head_dim, sequence in ((32, 128, 8192), (32, 64, 4096)):
        flops = 4 * heads * head_dim * sequence * (sequence + 1) / 2
        narrow = (1 + 52 / head_dim) / (1 + 52 / 128)
        sizes = {"part": "forward", "batch": 1, "heads": heads, "kv_heads": 8}
        sizes |= {"head_dim": head_dim, "sequence": sequence}
        yield Point("attention", sizes, flops * narrow / (989.4e12 * 0.4), 1e-6, "bf16")
    for op, part in itertools.product(("rms_norm", "gated"), ("forward", "backward")):
        moved = {"rms_norm": 2, "gated": 3}[op] * 2 * 16384 * 8192  # bytes
        factor = 3.0 if part == "forward" else 6.0
        sizes = {"part": part, "op": op, "rows": 16384, "width": 8192}
        yield Point("light", sizes, factor * moved / BANDWIDTH, 1e-6, "bf16")
    yield Point("memory", {"op": "copy", "bytes": 2**30}, 2 * 2**30 / BANDWIDTH, 1e-6)
    yield Point("layer", {"part": "forward"}, 18 * LAUNCH_S, 18 * LAUNCH_S, "bf16")
    yield Point(
        "layer", {"part": "forward"}, 1.0, 1e-3, "bf16"
    )  # the device keeps the host waiting
    yield from messages(TRUTH)


def messages(cluster: Cluster) -> Iterator[Point]:
    """In a node of 8, and between the two nodes."""
    for size, stride in ((2, 1), (8, 1), (2, 8)):
        members = members_per_tier(cluster, size, stride)
        for op, size_bytes in itertools.product(
            ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), (256, 2**30)
        ):
            s = float(seconds(cluster, op, members, size_bytes)[0])
            sizes = {"op": op, "size": size, "groups": 16 // size, "stride": stride}
            yield Point("message", sizes | {"bytes": size_bytes}, s, 1e-6)


def written(path: Path, measured: Measured, gpus: int) -> Cluster:
    write(path, as_text({**head(measured), "points": [p.record() for p in measured.points]}))
    return load_cluster(str(path), gpus)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    peak = {"bf16": 989.4e12}
    measured = Measured("cuda", "X100", 80 * 10**9, 16, 8, 64, PROCESSORS, peak, list(points()))
    return written(tmp_path_factory.mktemp("gpu") / "x100.yaml", measured, 16)


def test_the_constants_come_back(cluster: Cluster) -> None:
    device, truth = cluster.device, load_device("h100")
    own, usual = device.constants, truth.constants
    assert device.peak == {"bf16": pytest.approx(989.4e12)}
    assert device.memory_bandwidth * own.memory == pytest.approx(BANDWIDTH, rel=1e-3)
    assert device.matmul_flops("bf16", own) == pytest.approx(
        truth.matmul_flops("bf16", usual), rel=0.01
    )
    assert own.grouped == pytest.approx(usual.grouped, rel=0.01)
    assert own.attention / own.portable_attention == pytest.approx(0.4, rel=1e-3)
    assert own.unfused_light == pytest.approx(3.0, rel=1e-3)
    assert own.light_backward == pytest.approx(2.0, rel=1e-3)
    assert own.launch_s == pytest.approx(LAUNCH_S, rel=1e-3)
    assert own.straggler == usual.straggler  # no point says anything about it


def test_the_planner_gives_products_and_messages_the_time_that_was_measured(
    cluster: Cluster,
) -> None:
    job = Job(MODEL, cluster, 4096, 16, engine=ENGINES["fivefold"])
    constants = cluster.device.constants
    for point in points():
        if point.what == "product":
            m, n, k = (float(point.sizes[name]) for name in "mnk")
            predicted = float(product_s(job, constants, Matmul("product", m, n, k)))
            assert predicted == pytest.approx(point.wall_s, rel=0.02)
    for size, stride in ((8, 1), (2, 8)):
        members = members_per_tier(cluster, size, stride)
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            for size_bytes, within in ((256, 0.3), (2**30, 0.1)):
                predicted = seconds(cluster, op, members, size_bytes)
                truth = seconds(TRUTH, op, members_per_tier(TRUTH, size, stride), size_bytes)
                assert np.allclose(predicted, truth, rtol=within), (size, stride, op, size_bytes)


def test_the_tiers_are_the_node_and_the_network(cluster: Cluster) -> None:
    node, network = cluster.system
    assert (node.size, network.size) == (8, None)
    assert node.bandwidth * node.efficiency == pytest.approx(0.8 * 450e9, rel=0.1)
    assert network.bandwidth * network.efficiency == pytest.approx(0.94 * 50e9, rel=0.1)


def test_a_single_device_is_a_cluster_of_one(tmp_path: Path) -> None:
    alone = [point for point in points() if point.what != "message"]
    measured = Measured("cuda", "X100", 80 * 10**9, 1, 1, 64, PROCESSORS, {}, alone)
    path = tmp_path / "one.yaml"
    assert written(path, measured, 1).tiers[0].size == 1
    assert "reaches 1 devices, not 2: take 1 or fewer" in refusal(load_cluster, str(path), 2)
