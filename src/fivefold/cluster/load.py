"""Reading clusters by name, from a file, or from one line of numbers.

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
from itertools import pairwise
from pathlib import Path

from fivefold.cluster.cluster import (
    FAR_EFFICIENCY,
    FAR_LATENCY_S,
    NEAR_EFFICIENCY,
    NEAR_LATENCY_S,
    Cluster,
    Device,
    Tier,
)
from fivefold.cluster.constants import constants_of
from fivefold.cluster.schema import ClusterFile, DeviceEntry, TierEntry
from fivefold.errors import UserError
from fivefold.files import is_yaml, read_yaml
from fivefold.schema import MOST, validate

CATALOGUE = Path(__file__).parent / "catalogue"


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
    if is_yaml(text):
        cluster = cluster_of(read_yaml(text, "cluster file"), Path(text).stem, text, gpus)
    elif ":" in text:
        cluster = _from_line(text, gpus)
    else:
        path = CATALOGUE / f"{text.lower()}.yaml"
        if "/" in text or not path.is_file():
            raise UserError(f"unknown cluster {text!r}: {_nearest(text, catalogue_names())}")
        cluster = cluster_of(read_yaml(path, "cluster file"), path.stem, path.name, gpus)
    return cluster.with_devices(gpus)


def devices_of(text: str) -> int | None:
    """How many devices a cluster file says that its machine has; None where it does not say, and
    for clusters that are named otherwise."""
    if not is_yaml(text) or not Path(text).is_file():
        return None
    return _file_of(read_yaml(text, "cluster file"), text).devices


def load_device(name: str) -> Device:
    """The device of that name in the catalogue."""
    key = name.strip().lower()
    values, where = _device_values(key)
    return _device(validate(DeviceEntry, values, where), key, where)


def _device_values(key: str) -> tuple[object, str]:
    path = CATALOGUE / "devices" / f"{key}.yaml"
    if "/" in key or not path.is_file():
        raise UserError(f"unknown device {key!r}: {_nearest(key, device_names())}")
    return read_yaml(path, "device file"), path.name


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


# From a mapping


def cluster_of(values: object, name: str, where: str, gpus: int) -> Cluster:
    """The cluster of `gpus` devices that a mapping describes, read from `where`. UserError for a
    wrong one."""
    file = _file_of(values, where)
    key = values["device"] if isinstance(values, dict) else None
    device = _device(
        file.device, key.strip().lower() if isinstance(key, str) else name, f"{where}: device"
    )
    tiers = [_tier(entry, index) for index, entry in enumerate(file.tiers)]
    # The file has the share of memory of each of the processes that were measured.
    measured = file.devices if file.cpu and file.devices else gpus
    cluster = Cluster(name, device, _nested(tiers, where), measured, file.cpu)
    return cluster.with_devices(gpus)


def _file_of(values: object, where: str) -> ClusterFile:
    """A cluster file, checked. A device may be named; then it is read from the catalogue."""
    if isinstance(values, dict) and isinstance(values.get("device"), str):
        device, _ = _device_values(values["device"].strip().lower())
        values = {**values, "device": device}
    return validate(ClusterFile, values, where)


def _device(entry: DeviceEntry, key: str, where: str) -> Device:
    return Device(
        key=key,
        name=entry.name,
        memory_bytes=int(entry.memory_bytes),
        memory_bandwidth=entry.memory_bandwidth_tb_s * 1e12,
        peak=entry.peak_tflops.flops(),
        measured=entry.measured_tflops.flops(),
        constants=constants_of(key, entry.constants, where),
    )


def _tier(entry: TierEntry, index: int) -> Tier:
    near = index == 0
    latency_s = NEAR_LATENCY_S if near else FAR_LATENCY_S
    if entry.latency_us is not None:
        ll, ll128, simple = entry.latency_us
        latency_s = (ll * 1e-6, ll128 * 1e-6, simple * 1e-6)
    return Tier(
        name=entry.name,
        size=entry.size,
        bandwidth=entry.bandwidth_gb_s * 1e9,
        shape=entry.shape,
        links=entry.links or 1,
        latency_s=latency_s,
        efficiency=entry.efficiency or (NEAR_EFFICIENCY if near else FAR_EFFICIENCY),
        oversubscription=entry.oversubscription,
        rails=entry.rails,
        in_switch_reduce=entry.in_switch_reduce,
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
        constants=constants_of(text),
    )


def _tier_of_numbers(text: str, index: int) -> Tier:
    parts = re.fullmatch(r"(?:([0-9]+)x)?(mesh)?([0-9.]+)([GT]B/s|Gb/s)", text.strip())
    if parts is None:
        raise UserError(f"{text.strip()!r} is no tier: write 8x450GB/s, as in {LINE_FORM}")
    size = int(parts[1][:20]) if parts[1] else None
    if size is not None and not 0 < size <= MOST:
        raise UserError(f"{text.strip()!r} reaches {parts[1]} devices: it may be 1 to {MOST:,}")
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
