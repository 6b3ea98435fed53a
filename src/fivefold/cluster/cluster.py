"""A cluster: a device, a count, and the tiers of the network from inside out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.constants import USUAL_MATMUL_SHARE, Constants
from fivefold.cluster.cpu import Cpu
from fivefold.errors import UserError

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
    constants: Constants  # what no data sheet has

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

    def matmul_flops(self, precision: str, constants: Constants) -> float:
        """FLOP/s that large matrix products sustain."""
        peak = self.peak_flops(precision)
        eight_bits = ("fp8", "mxfp8")
        measured = self.measured.get("fp8" if precision in eight_bits else precision)
        best = measured or peak * USUAL_MATMUL_SHARE
        if precision in eight_bits:
            return best * constants.sustained_fp8
        return best * (constants.sustained_fp4 if precision == "nvfp4" else constants.sustained)


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
    cpu: Cpu | None = field(default=None, hash=False)  # where the devices are processes on one

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

    @property
    def cores(self) -> int | None:
        """That the devices of a node share, where they are processes on a CPU."""
        return self.cpu and self.cpu.cores

    @cached_property
    def core(self) -> Cpu:
        """The cores of a CPU as they work where all devices do."""
        assert self.cpu is not None
        return self.cpu.among(self.num_devices)

    def with_devices(self, num_devices: int) -> Cluster:
        """The same machine with another number of devices. UserError for one that it has not."""
        if num_devices < 1:
            raise UserError(f"the number of devices must be 1 or more, not {num_devices}")
        device = self.device
        if self.cpu:  # processes share the machine's memory
            share = device.memory_bytes * self.num_devices // num_devices
            device = replace(device, memory_bytes=share)
        cluster = replace(self, device=device, num_devices=num_devices)
        _ = cluster.tiers  # refuses more devices than the machine has
        return cluster


def _devices_used(size: int, inside: int, num_devices: int) -> int:
    """Devices of a block of `size` that a job uses: equally many of each block unless that would
    leave more than half of it idle; a multiple of the `inside` used of each block inside."""
    most = size // inside * inside
    for used in range(most, 0, -inside):
        if num_devices % used == 0 and 2 * used >= size:
            return used
    return most
