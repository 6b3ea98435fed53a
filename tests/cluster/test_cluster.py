from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from fivefold.cluster import constants
from fivefold.cluster.load import (
    CATALOGUE,
    catalogue_names,
    device_names,
    devices_of,
    load_cluster,
    load_device,
)
from fivefold.errors import UserError

HARDWARE = {
    # system: bf16 (V100: fp16) and fp8 TFLOP/s, memory bandwidth TB/s, GB/s of scale-up a device
    # and direction, devices in reach of it, Gbit/s of NIC a device, measured bf16 and fp8 TFLOP/s.
    # From the sources named in the catalogue, collected independently of it.
    "dgx2-v100": (125, None, 0.9, 150, 16, 50, None, None),
    "dgx-a100-40gb": (312, None, 1.555, 300, 8, 200, 271.2, None),
    "dgx-a100": (312, None, 2.039, 300, 8, 200, 271.2, None),
    "p4d-a100-40gb": (312, None, 1.555, 300, 8, 50, 271.2, None),
    "a100-80gb-4x100g": (312, None, 2.039, 300, 8, 50, 271.2, None),
    "hgx-a800": (312, None, 2.039, 200, 8, 100, 271.2, None),
    "dgx-h100": (989.4, 1978.9, 3.35, 450, 8, 400, 794.5, 1402.6),
    "grand-teton-h100": (989.4, 1978.9, 3.35, 450, 8, 400, 794.5, 1402.6),
    "grand-teton-h100-96gb": (989.4, 1978.9, 2.4, 450, 8, 400, None, None),
    "hgx-h800": (989, 1979, 3.35, 200, 8, 400, 794.5, 1402.6),
    "dgx-h200": (989.4, 1978.9, 4.8, 450, 8, 400, 794.5, 1453.4),
    "hgx-h20": (148, 296, 4.0, 450, 8, 400, None, None),
    "dgx-b200": (2250, 4500, 8.0, 900, 8, 400, 1745, 3432.5),
    "dgx-b300": (2250, 4500, 8.0, 900, 8, 800, 1769, 3353.3),
    "gb200-nvl72": (2500, 5000, 8.0, 900, 72, 400, 1822, 3615.6),
    "gb300-nvl72": (2500, 5000, 8.0, 900, 72, 800, None, None),
    "frontier-mi250x": (191.5, None, 1.64, 200, 2, None, None, None),
    "mi300x": (1307.4, 2614.9, 5.3, 448, 8, 400, 668.4, None),
    "mi325x": (1307.4, 2614.9, 6.0, 448, 8, 400, 784.9, None),
    "mi350x": (2307, 4614, 8.0, 535.5, 8, 400, None, None),
    "mi355x": (2516.6, 5033, 8.0, 535.5, 8, 400, 1565, None),
    "atlas-910b": (320, None, 1.6, 392, 8, 200, None, None),
    "cloudmatrix384-910c": (376, None, 1.6, 196, 768, 200, None, None),
    "l20-pcie": (119.5, 239, 0.864, 31, 8, 100, None, None),
    "rtx4090-pcie": (165.2, 330.3, 1.008, 31, 8, 100, None, None),
}


@pytest.mark.parametrize("name", [n for n in catalogue_names() if n != "ub-mesh"])
def test_the_catalogue_has_the_published_numbers(name: str) -> None:
    bf16, fp8, memory, scale_up, reach, nic, best_bf16, best_fp8 = HARDWARE[name]
    cluster = load_cluster(name, 1536)
    device, inner = cluster.device, cluster.system[0]
    assert device.peak_flops("fp16" if "v100" in name else "bf16") == bf16 * 1e12
    assert device.peak.get("fp8", 0) == (fp8 or 0) * 1e12
    assert device.memory_bandwidth == memory * 1e12
    assert (inner.bandwidth, inner.size) == (scale_up * 1e9, reach)
    if nic is not None:
        assert cluster.tiers[1].bandwidth == nic / 8 * 1e9
    assert device.measured.get("bf16", 0) == (best_bf16 or 0) * 1e12
    assert device.measured.get("fp8", 0) == (best_fp8 or 0) * 1e12


@pytest.mark.parametrize(
    ("device", "memory_bytes"),
    [
        ("a100-40gb", 42405855232),
        ("h200", 143771 * 2**20),
        ("b200", 183359 * 2**20),
        ("gb200", 189471 * 2**20),
        ("b300", 275040 * 2**20),
        ("gb300", 284208 * 2**20),
    ],
)
def test_memory_is_what_the_system_reports(device: str, memory_bytes: int) -> None:
    assert load_device(device).memory_bytes == memory_bytes


@pytest.mark.parametrize("path", sorted(CATALOGUE.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_number_of_the_catalogue_has_a_source(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    for entry in data.get("tiers", [data]):
        without = {"name", "shape", "sources"}
        assert set(entry) - without == set(entry["sources"]), entry["name"]
        assert all(isinstance(text, str) and len(text) > 3 for text in entry["sources"].values())


def test_a_measured_maximum_is_below_the_peak() -> None:
    shares = [
        flops / device.peak_flops(precision)
        for device in map(load_device, device_names())
        for precision, flops in device.measured.items()
    ]
    assert shares and all(0.4 < share < 1 for share in shares)


def test_every_cluster_loads_for_any_number_of_devices() -> None:
    for name in catalogue_names():
        cluster = load_cluster(name, 96)
        for gpus in (1, 2, 3, 8, 12, 64, 72, 500, 768):
            sizes = cluster.with_devices(gpus).tier_sizes.tolist()
            assert sizes[-1] == gpus
            assert all(b % a == 0 for a, b in pairwise(sizes[:-1]))


def test_a_job_uses_equally_many_devices_of_each_domain() -> None:
    assert load_cluster("gb200-nvl72", 512).tier_sizes.tolist() == [64, 512]
    assert load_cluster("gb200-nvl72", 144).tier_sizes.tolist() == [72, 144]
    assert load_cluster("dgx-h100", 12).tier_sizes.tolist() == [6, 12]
    assert load_cluster("dgx-h100", 16384).tier_sizes.tolist() == [8, 256, 16384]
    assert load_cluster("dgx-h100", 8).tier_sizes.tolist() == [8]


def test_a_job_does_not_leave_most_of_a_domain_idle() -> None:
    assert load_cluster("dgx-h100", 11 * 13).tier_sizes.tolist()[0] == 8
    assert load_cluster("dgx-h100", 8 * 37).tier_sizes.tolist() == [8, 256, 296]


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"A100-80GB SXM has no .* fp8: it has fp32, fp16, bf16"):
        load_device("a100-80gb").peak_flops("fp8")
    with pytest.raises(UserError, match="bf16"):
        load_device("v100-32gb").peak_flops("bf16")
    assert load_device("b200").peak_flops("mxfp8") == 4500e12


def test_a_line_of_numbers_is_a_cluster() -> None:
    cluster = load_cluster("h100:8x450GB/s,256x400Gb/s,12.5GB/s", 1024)
    assert cluster.device == load_device("h100")
    assert cluster.tier_sizes.tolist() == [8, 256, 1024]
    assert [tier.bandwidth for tier in cluster.tiers] == [450e9, 50e9, 12.5e9]
    mesh = load_cluster("MI300X:8xmesh448GB/s,50GB/s", 16)
    assert (mesh.tiers[0].shape, mesh.tiers[0].links) == ("fullmesh", 7)
    unknown = load_cluster("989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s", 16)
    assert unknown.device.peak_flops("bf16") == 989e12
    assert (unknown.device.memory_bytes, unknown.device.memory_bandwidth) == (80 * 10**9, 3.35e12)


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((CATALOGUE / "mi300x.yaml").read_text())
    mine, known = load_cluster(str(path), 64), load_cluster("mi300x", 64)
    assert (mine.name, mine.device, mine.tiers) == ("mine", known.device, known.tiers)
    device = "{name: X, memory_bytes: 8e10, memory_bandwidth_tb_s: 3, peak_tflops: {bf16: 900}}"
    device = device.replace("8e10", "80000000000")
    path.write_text(f"device: {device}\ntiers: [{{name: all, bandwidth_gb_s: 20}}]\n")
    assert load_cluster(str(path), 64).device.peak_flops("bf16") == 900e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-h10", "unknown cluster 'dgx-h10': did you mean dgx-h100"),
        ("../devices/h100", "unknown cluster"),
        ("h10:8x450GB/s,50GB/s", "unknown device 'h10': did you mean h100"),
        ("h100:8x450,50GB/s", "'8x450' is no tier: write 8x450GB/s"),
        ("h100:0x450GB/s,50GB/s", "'0x450GB/s' reaches 0 devices: it may be 1 to 10,000,000"),
        ("h100:99999999999x450GB/s,50GB/s", "it may be 1 to 10,000,000"),
        (f"h100:8x{'9' * 400}GB/s,50GB/s", "is no number above 0"),
        ("h100:450GB/s,50GB/s", "tier 1 has no size"),
        ("h100:8x450GB/s,12x50GB/s,5GB/s", "must be a multiple of the 8 of tier 1, such as 16"),
        ("h100:8x450GB/s,16x0GB/s", "no number above 0"),
        ("h100:8x450GB/s,16xmesh50GB/s", "a mesh must be the first tier"),
        ("989,80GB,3TB/s:8x450GB/s", "is no device: write its name, or"),
        ("h100:8x450GB/s", "reaches 8 devices, not 64: take 8 or fewer"),
        ("none.yaml", "none.yaml: there is no such cluster file"),
    ],
)
def test_a_wrong_name_or_line_is_refused_with_what_would_work(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_cluster(text, 64)
    assert message in str(error.value)


def tier(keys: str) -> str:
    return f"device: h100\ntiers: [{{name: a, {keys}}}]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("device: h100\ntier: []", "unknown key tier; did you mean tiers?"),
        ("device: h100", "tiers is missing"),
        ("device: h100\ntiers: []", "tiers must be a list of 1 or more, and is a list of 0"),
        (
            "device: h100\ntiers: [{name: a, bandwith_gb_s: 1}]",
            "unknown key tiers.0.bandwith_gb_s; did you mean tiers.0.bandwidth_gb_s?",
        ),
        (tier("bandwidth_gb_s: fast"), 'tiers.0.bandwidth_gb_s must be a number, and is "fast"'),
        (tier("bandwidth_gb_s: -1"), "tiers.0.bandwidth_gb_s must be more than 0, and is -1"),
        (tier("bandwidth_gb_s: 1, size: 8.5"), "tiers.0.size must be a whole number, and is 8.5"),
        (tier("bandwidth_gb_s: 1, shape: star"), "tiers.0.shape must be 'switch', 'fullmesh', "),
        (tier("bandwidth_gb_s: 1, shape: ring"), "tiers.0: a ring needs links"),
        (tier("bandwidth_gb_s: 1, efficiency: 2"), "efficiency must be 1 or less, and is 2"),
        (tier("bandwidth_gb_s: 1, latency_us: 3"), "latency_us must be a list, and is 3"),
        ("device: {name: X}\ntiers: [{name: a, bandwidth_gb_s: 1}]", "device.memory_bytes is mis"),
        ("- 1", "must be a mapping of keys, not a list of 1; it needs at least device, tiers"),
        ("a: [", "the cluster file is not valid YAML, line 1"),
        ("a: !!python/object/apply:os.getcwd []", "the cluster file is not valid YAML, line 1"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_key(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        load_cluster(str(path), 8)
    assert message in str(error.value)


def test_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(tier("bandwidth_gb_s: 4.5e2, size: 8.0"))
    [read] = load_cluster(str(path), 8).system
    assert (read.bandwidth, read.size) == (450e9, 8)


def test_a_cluster_of_no_devices_is_refused() -> None:
    with pytest.raises(UserError, match="1 or more, not 0"):
        load_cluster("dgx-h100", 0)
    with pytest.raises(UserError, match="1 or more, not -8"):
        load_cluster("dgx-h100", 8).with_devices(-8)


def test_constants_of_a_device_come_over_the_default_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {
        "architectures": {"h100": ["hopper"]},
        "default": {name: {"value": 1.0} for name in constants.Constants.model_fields},
        "hopper": {"memory": {"value": 3.0}},
    }
    monkeypatch.setattr(constants, "_read", lambda: entries)
    hopper, ampere = (load_device(name).constants for name in ("h100", "a100-80gb"))
    assert (hopper.memory, hopper.attention) == (3.0, 1.0)
    assert (ampere.memory, ampere.attention) == (1.0, 1.0)


# --- what a measured machine says more ---------------------------------------------------------

MEASURED = """
device:
  name: box
  memory_bytes: 1.0e+9
  memory_bandwidth_tb_s: 0.02
  peak_tflops: {fp32: 0.1}
  constants: {memory: 1.0, wave_loss: 0}
tiers: [{name: a, bandwidth_gb_s: 1}]
devices: 8
cpu:
  cores: 2
  forward: &pass
    {matmul_flop: 0, matmul_byte: 0, attention_flop: 0, elementwise_byte: 0, operation: 1e-6}
  backward: *pass
  copy_byte: 1e-11
  optimizer_element: 2e-9
  messages:
  - {op: all_reduce, ranks: 2, bytes: 256, busy_s: 1.0e-4, wait_s: 2.0e-4}
points:
- {what: host, op: node, wall_s: 1.0e-6, cpu_s: 1.0e-6}
"""


def test_a_file_may_have_constants_of_its_own_and_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(MEASURED)
    cluster = load_cluster(str(path), 4)
    assert cluster.cpu is not None and cluster.cpu.cores == 2
    assert cluster.cpu.message_s("all_reduce", 2, 256).busy == 1e-4
    found = cluster.device.constants
    assert (found.memory, found.wave_loss) == (1.0, 0)
    assert found.launch_s == load_device("h100").constants.launch_s  # the default one
    assert devices_of(str(path)) == 8
    assert devices_of("dgx-h100") is None
    assert cluster.with_devices(16).cpu == cluster.cpu
    assert hash(cluster) == hash(load_cluster(str(path), 4))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("wave_loss", "wave_los", "unknown key wave_los; did you mean wave_loss?"),
        ("wave_loss: 0", "wave_loss: -1", "constants: wave_loss must be 0 or more, and is -1"),
        ("memory: 1.0", "memory: .nan", "device.constants must be a finite number, and is NaN"),
        ("cores: 2", "cores: 0.5", "cpu.cores must be a whole number, and is 0.5"),
        ("devices: 8", "devices: many", 'devices must be a whole number, and is "many"'),
        ("busy_s: 1.0e-4, ", "", "cpu.messages.0.busy_s is missing"),
        ("wait_s: 2.0e-4", "wait_s: -1", "cpu.messages.0.wait_s must be 0 or more, and is -1"),
        ("busy_s: 1.0e-4", "busy_s: .nan", "cpu.messages.0.busy_s must be a finite number"),
        ("op: all_reduce", "op: all_red", "cpu.messages.0.op must be 'all_reduce', "),
        ("messages:", "message:", "unknown key cpu.message; did you mean cpu.messages?"),
        ("cpu_s: 1.0e-6", "cpu_s: []", "points.0 must be text or a number, and is a list of 0"),
        ("points:\n-", "points:\n ", "points must be a list, and is a mapping"),
    ],
)
def test_what_was_measured_is_refused_where_it_is_wrong(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(MEASURED.replace(old, new))
    with pytest.raises(UserError, match=re.escape(told)):
        load_cluster(str(path), 4)
