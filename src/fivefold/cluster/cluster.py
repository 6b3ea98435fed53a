"""Clusters: a device, a count, and the tiers of the network from inside out.

A cluster is named in one of three ways (`load_cluster`): by an entry of the catalogue beside this
module (`dgx-h100`), by a YAML file of the same form (such as `fivefold calibrate` writes), or by
one line of numbers:

    DEVICE:NxBANDWIDTH,NxBANDWIDTH,...,BANDWIDTH
    h100:8x450GB/s,50GB/s                           8 to a switch, then one network for all
    mi300x:8xmesh448GB/s,50GB/s                     8 in a full mesh, 448 GB/s over all 7 links
    989TFLOPS,80GB,3.35TB/s:8x450GB/s,256x50GB/s,7GB/s

N counts all the devices within reach at that tier; bandwidths are a device and direction, in GB/s,
TB/s or Gb/s. A device is a catalogue name, or its bf16 peak, memory and memory bandwidth.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.cores import Core, check_messages, core_of
from fivefold.errors import UserError
from fivefold.files import read_yaml

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
SHAPES = ("switch", "fullmesh", "ring", "torus")
CATALOGUE = Path(__file__).parent / "catalogue"
CONSTANTS = Path(__file__).parent / "constants.yaml"

MOST_DEVICES = 10_000_000
"""No machine has more; a slip of the keyboard must not become sums that overflow."""

NEAR_LATENCY_S = (0.6e-6, 1.9e-6, 3.4e-6)
FAR_LATENCY_S = (2.7e-6, 4.0e-6, 14.0e-6)
"""What NCCL takes for a step of a ring over NVLink and over a network, by protocol: LL, LL128 and
Simple (hwLat in NVIDIA/nccl, src/graph/tuning.cc). For tiers that state none."""
NEAR_EFFICIENCY, FAR_EFFICIENCY = 0.8, 0.94
"""For tiers that state none: NVLink loses about 20 % to its protocol, and a NIC of 50 GB/s carries
46 to 48 (NCCL's developers, NVIDIA/nccl-tests issues 212 and 290)."""


@dataclass(frozen=True)
class Device:
    """One accelerator as a rank sees it (a die, where dies are separate devices)."""

    key: str  # its name in the catalogue, and in constants.yaml
    name: str
    memory_bytes: int  # as the system reports it where known, not as the label says
    memory_bandwidth: float  # bytes/s
    peak: Mapping[str, float] = field(hash=False)  # precision -> dense FLOP/s of the data sheet
    measured: Mapping[str, float] = field(hash=False)  # precision -> best matrix product, FLOP/s
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Planner constants of this device by name, from constants.yaml; empty if it has none."""

    @property
    def half(self) -> str:
        """The 16-bit precision that training uses here: bf16, or fp16 on devices before it."""
        return "bf16" if "bf16" in self.peak else "fp16"

    def peak_flops(self, precision: str) -> float:
        """Dense peak FLOP/s by the data sheet. UserError where the device has no such unit."""
        if precision not in self.peak:
            raise UserError(
                f"{self.name} has no matrix products in {precision}: it has {', '.join(self.peak)}"
            )
        return self.peak[precision]


@dataclass(frozen=True)
class Tier:
    """One level of the network: what joins the blocks of the tier below (or the devices)."""

    name: str
    size: int | None  # devices within reach, the tiers inside included; None: any number
    bandwidth: float  # bytes/s a device and direction, over all its links of this tier
    shape: str = "switch"
    links: int = 1  # fullmesh: to each other block; ring 2, torus 2 for each dimension
    latency_s: tuple[float, float, float] = NEAR_LATENCY_S  # a step in protocol LL, LL128, Simple
    efficiency: float = 1.0  # share of the bandwidth that large messages get
    oversubscription: float = 1.0  # bandwidth of the devices below / bandwidth of the uplinks
    rails: int = 1  # separate planes; devices of one node are on different ones
    in_switch_reduce: float | None = None
    """Payload bytes/s of an all-reduce that the switch sums up, as a share of the bandwidth."""


@dataclass(frozen=True)
class Cluster:
    """`num_devices` devices, and the network between them."""

    name: str
    device: Device
    system: tuple[Tier, ...]  # as the machine is built
    num_devices: int
    cores: int | None = None  # that the devices of a node share, where they are processes on a CPU
    operations: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """What the cores of this machine do and send, as a file has it (see docs/calibration.md);
    `core` and `cores.message_s` read it."""

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, from inside out, as a job on `num_devices` devices sees them.

        A job takes equally many devices from each block where it can (64 of the 72 of an NVL72 for
        512 devices), and the outermost tier ends at `num_devices`.
        """
        tiers: list[Tier] = []
        inside = 1
        for tier in self.system:
            if tier.size is None or tier.size >= self.num_devices:
                return (*tiers, replace(tier, size=self.num_devices))
            inside = _devices_used(tier.size, inside, self.num_devices)
            tiers.append(replace(tier, size=inside))
        raise UserError(
            f"{self.name} reaches {self.system[-1].size} devices, not {self.num_devices}: "
            f"take {self.system[-1].size} or fewer"
        )

    @cached_property
    def tier_sizes(self) -> NDArray[np.int64]:
        """Devices within reach at each tier: [tiers]; the last is `num_devices`."""
        return np.array([tier.size for tier in self.tiers], dtype=np.int64)

    @cached_property
    def core(self) -> Core:
        """One of the cores that the devices share, as it works where all of them do. UserError
        where the file lacks a part of it."""
        return core_of(self.operations, self.name).among(self.num_devices)

    def with_devices(self, num_devices: int) -> Cluster:
        """The same machine with another number of devices."""
        device = self.device
        if self.cores:  # processes share the machine's memory
            share = device.memory_bytes * self.num_devices // num_devices
            device = replace(device, memory_bytes=share)
        return _checked(replace(self, device=device, num_devices=num_devices))


def _devices_used(size: int, inside: int, num_devices: int) -> int:
    """Devices of a block of `size` that a job uses: equally many of each block unless that would
    leave more than half of it idle; a multiple of the `inside` used of each block inside."""
    most = size // inside * inside
    for used in range(most, 0, -inside):
        if num_devices % used == 0 and 2 * used >= size:
            return used
    return most


# Loading


def catalogue_names() -> list[str]:
    """The names of the clusters in the catalogue."""
    return sorted(path.stem for path in CATALOGUE.glob("*.yaml"))


def device_names() -> list[str]:
    """The names of the devices in the catalogue."""
    return sorted(path.stem for path in (CATALOGUE / "devices").glob("*.yaml"))


def load_cluster(text: str, gpus: int) -> Cluster:
    """The cluster that `text` names (see above), with `gpus` devices.

    UserError for a name, a file, a key or a number that is wrong.
    """
    if text.endswith((".yaml", ".yml")):
        path = Path(text)
        cluster = cluster_of(_read(path), path.stem, text, gpus)
    elif ":" in text:
        cluster = _from_line(text, gpus)
    else:
        path = CATALOGUE / f"{text.lower()}.yaml"
        if "/" in text or not path.is_file():
            raise UserError(f"unknown cluster {text!r}: {_nearest(text, catalogue_names())}")
        cluster = cluster_of(_read(path), text.lower(), path.name, gpus)
    return _checked(cluster)


def devices_of(text: str) -> int | None:
    """How many devices a cluster file says that its machine has; None where it does not say, and
    for clusters that are named otherwise."""
    path = Path(text)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return None
    data = _read(path)
    stated = isinstance(data, dict) and "devices" in data
    return _whole(data, "devices", text) if stated else None


def load_device(name: str) -> Device:
    """The device of that name in the catalogue."""
    key = name.strip().lower()
    path = CATALOGUE / "devices" / f"{key}.yaml"
    if "/" in key or not path.is_file():
        raise UserError(f"unknown device {name!r}: {_nearest(name, device_names())}")
    return _device(_read(path), key, path.name)


def _checked(cluster: Cluster) -> Cluster:
    if cluster.num_devices < 1:
        raise UserError(f"the number of devices must be 1 or more, not {cluster.num_devices}")
    _ = cluster.tiers  # refuses more devices than the machine has
    return cluster


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


def _read(path: Path) -> Any:
    return read_yaml(path, "cluster file")


CLUSTER_KEYS = (
    "summary",
    "devices",
    "device",
    "tiers",
    "cores",
    "operations",
    "messages",
    "points",
)
DEVICE_KEYS = (
    "name",
    "memory_bytes",
    "memory_bandwidth_tb_s",
    "peak_tflops",
    "measured_tflops",
    "constants",
    "sources",
)
TIER_KEYS = (
    "name",
    "size",
    "shape",
    "links",
    "bandwidth_gb_s",
    "latency_us",
    "efficiency",
    "oversubscription",
    "rails",
    "in_switch_reduce",
    "sources",
)


def cluster_of(data: Any, name: str, where: str, gpus: int) -> Cluster:
    """The cluster that a mapping describes, read from `where`. UserError for a wrong one."""
    _check_keys(data, CLUSTER_KEYS, ("device", "tiers"), where)
    if isinstance(data["device"], str):
        device = load_device(data["device"])
    else:
        device = _device(data["device"], name, f"{where}: device")
    if not isinstance(data["tiers"], list) or not data["tiers"]:
        raise UserError(f"{where}: tiers must be a list of one tier or more, from inside out")
    tiers = [_tier(entry, index, where) for index, entry in enumerate(data["tiers"])]
    if "devices" in data:
        _whole(data, "devices", where)
    _records(data, "points", where)
    cluster = Cluster(
        name,
        device,
        _nested(tiers, where),
        gpus,
        cores=_whole(data, "cores", where) if "cores" in data else None,
        operations=_records(data, "operations", where),
        messages=_records(data, "messages", where),
    )
    if cluster.cores:
        if cluster.operations:
            _ = cluster.core  # refuses what is missing or no number
        check_messages(cluster.messages, name)
        # The file has the share of each of the processes that were measured.
        measured = int(data.get("devices", gpus))
        return replace(cluster, num_devices=measured).with_devices(max(1, gpus))
    return cluster


def _records(data: Mapping[str, Any], key: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """A list of mappings from names to numbers and words."""
    records = data.get(key, [])
    if not isinstance(records, list) or not all(_is_record(record) for record in records):
        raise UserError(f"{where}: {key} must be a list of mappings from names to numbers or words")
    return tuple(records)


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and all(
        isinstance(name, str) and isinstance(value, str | int | float)
        for name, value in record.items()
    )


def _device(data: Any, key: str, where: str) -> Device:
    needed = ("name", "memory_bytes", "memory_bandwidth_tb_s", "peak_tflops")
    _check_keys(data, DEVICE_KEYS, needed, where)
    return Device(
        key=key,
        name=str(data["name"]),
        memory_bytes=int(_number(data, "memory_bytes", where)),
        memory_bandwidth=_number(data, "memory_bandwidth_tb_s", where) * 1e12,
        peak=_flops(data["peak_tflops"], f"{where}: peak_tflops"),
        measured=_flops(data.get("measured_tflops", {}), f"{where}: measured_tflops"),
        constants=_constants(key) | _own_constants(data.get("constants", {}), where),
    )


def _own_constants(data: Any, where: str) -> dict[str, float]:
    """What a device says itself about the planner's constants."""
    where = f"{where}: constants"
    _check_keys(data, tuple(_read(CONSTANTS)["default"]), (), where)
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise UserError(f"{where}: {name} must be a number of 0 or more, not {value!r}")
    return dict(data)


def _flops(data: Any, where: str) -> dict[str, float]:
    _check_keys(data, PRECISIONS, (), where)
    return {precision: _number(data, precision, where) * 1e12 for precision in data}


def _constants(key: str) -> dict[str, float]:
    """The planner's constants of a device: the default ones, its architectures' over them."""
    data = _read(CONSTANTS)
    entries = dict(data["default"])
    for architecture in data["architectures"].get(key, ()):
        entries |= data.get(architecture, {})
    return {name: entry["value"] for name, entry in entries.items()}


def _tier(data: Any, index: int, where: str) -> Tier:
    where = f"{where}: tier {index + 1}"
    _check_keys(data, TIER_KEYS, ("name", "bandwidth_gb_s"), where)
    near = index == 0
    shape = data.get("shape", "switch")
    if shape not in SHAPES:
        raise UserError(f"{where}: unknown shape {shape!r}: known are {', '.join(SHAPES)}")
    if shape != "switch" and "links" not in data:
        raise UserError(f"{where}: a {shape} needs links, the number of links of a device")
    latency_s = NEAR_LATENCY_S if near else FAR_LATENCY_S
    if "latency_us" in data:
        steps = data["latency_us"]
        if not isinstance(steps, list) or len(steps) != 3:
            raise UserError(f"{where}: latency_us must be 3 numbers: LL, LL128, Simple")
        ll, ll128, simple = (_number({"latency_us": us}, "latency_us", where) for us in steps)
        latency_s = (ll * 1e-6, ll128 * 1e-6, simple * 1e-6)
    return Tier(
        name=str(data["name"]),
        size=_whole(data, "size", where) if "size" in data else None,
        bandwidth=_number(data, "bandwidth_gb_s", where) * 1e9,
        shape=shape,
        links=_whole(data, "links", where, 1),
        latency_s=latency_s,
        efficiency=_share(data, "efficiency", where, NEAR_EFFICIENCY if near else FAR_EFFICIENCY),
        oversubscription=_number(data, "oversubscription", where, 1),
        rails=_whole(data, "rails", where, 1),
        in_switch_reduce=(
            _number(data, "in_switch_reduce", where) if "in_switch_reduce" in data else None
        ),
    )


def _nested(tiers: list[Tier], where: str) -> tuple[Tier, ...]:
    """The tiers, once their sizes are known to grow: each a multiple of the one inside."""
    for inner, outer in pairwise(tiers):
        if inner.size is None:
            raise UserError(f"{where}: {inner.name} has no size, which only the last tier may lack")
        if outer.size is not None and (outer.size % inner.size or outer.size <= inner.size):
            raise UserError(
                f"{where}: {outer.name} reaches {outer.size} devices, which must be a multiple of "
                f"the {inner.size} of {inner.name}, such as {2 * inner.size}"
            )
    return tuple(tiers)


def _check_keys(data: Any, known: tuple[str, ...], needed: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise UserError(f"{where} must be a mapping with the keys {', '.join(known)}")
    for key in data:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}: {_nearest(str(key), list(known))}")
    for key in needed:
        if key not in data:
            raise UserError(f"{where}: the key {key!r} is missing")


def _share(data: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = _number(data, key, where, default)
    if value > 1:
        raise UserError(f"{where}: {key} is a share of the whole, at most 1, not {value:g}")
    return value


def _number(data: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise UserError(f"{where}: {key} must be a number above 0, not {value!r}")
    return value


def _whole(data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = _number(data, key, where, default)
    if value != int(value) or value > MOST_DEVICES:
        raise UserError(
            f"{where}: {key} must be a whole number of 1 to {MOST_DEVICES:,}, not {value!r}"
        )
    return int(value)


# One line of numbers

UNITS = {"GB/s": 1e9, "TB/s": 1e12, "Gb/s": 1e9 / 8}
LINE_FORM = "h100:8x450GB/s,50GB/s"


def _from_line(text: str, gpus: int) -> Cluster:
    left, _, right = text.partition(":")
    device = _device_of_numbers(left) if "," in left else load_device(left)
    tiers = [_tier_of_numbers(part, index) for index, part in enumerate(right.split(","))]
    return Cluster(text, device, _nested(tiers, text), gpus)


def _device_of_numbers(text: str) -> Device:
    parts = re.fullmatch(r"([0-9.]+)TFLOPS,([0-9.]+)(GB|GiB),([0-9.]+)([GT]B/s)", text)
    if parts is None:
        raise UserError(
            f"{text!r} is no device: write its name, or bf16 peak, memory and memory bandwidth "
            "like 989TFLOPS,80GB,3.35TB/s"
        )
    return Device(
        key=text,
        name=text,
        memory_bytes=int(_plain(parts[2], text) * (1e9 if parts[3] == "GB" else 2**30)),
        memory_bandwidth=_plain(parts[4], text) * UNITS[parts[5]],
        peak={"bf16": _plain(parts[1], text) * 1e12},
        measured={},
        constants=_constants(text),
    )


def _tier_of_numbers(text: str, index: int) -> Tier:
    parts = re.fullmatch(r"(?:([0-9]+)x)?(mesh)?([0-9.]+)([GT]B/s|Gb/s)", text.strip())
    if parts is None:
        raise UserError(f"{text.strip()!r} is no tier: write 8x450GB/s, as in {LINE_FORM}")
    size = int(parts[1][:20]) if parts[1] else None
    if size is not None and not 0 < size <= MOST_DEVICES:
        raise UserError(
            f"{text.strip()!r} reaches {parts[1]} devices: it may be 1 to {MOST_DEVICES:,}"
        )
    if parts[2] and (size is None or size < 2 or index > 0):
        raise UserError(f"{text.strip()!r}: a mesh must be the first tier, of 2 devices or more")
    return Tier(
        name=f"tier {index + 1}",
        size=size,
        bandwidth=_plain(parts[3], text) * UNITS[parts[4]],
        shape="fullmesh" if parts[2] else "switch",
        links=size - 1 if parts[2] and size else 1,
        latency_s=FAR_LATENCY_S if index else NEAR_LATENCY_S,
        efficiency=FAR_EFFICIENCY if index else NEAR_EFFICIENCY,
    )


def _plain(digits: str, text: str) -> float:
    """The number that a text of digits and dots stands for."""
    try:
        value = float(digits)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise UserError(f"{digits[:20]!r} in {text[:80]!r} is no number above 0")
    return value
