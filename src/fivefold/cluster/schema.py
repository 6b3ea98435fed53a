"""The keys of a cluster file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fivefold.cluster.cpu import Cpu
from fivefold.schema import Count, Positive, Section

Share = Annotated[float, Field(gt=0, le=1)]
Sources = dict[str, str]
"""By key, where its number is from."""


class Precisions(Section):
    """Dense TFLOP/s of matrix products, by precision."""

    fp32: Positive | None = None
    fp16: Positive | None = None
    bf16: Positive | None = None
    fp8: Positive | None = None
    mxfp8: Positive | None = None
    nvfp4: Positive | None = None
    mxfp4: Positive | None = None

    def flops(self) -> dict[str, float]:
        """FLOP/s of the precisions that there are."""
        return {name: value * 1e12 for name, value in self if value is not None}


class DeviceEntry(Section):
    """One accelerator as a rank sees it."""

    name: str
    memory_bytes: Positive
    memory_bandwidth_tb_s: Positive
    peak_tflops: Precisions
    measured_tflops: Precisions = Precisions()
    constants: dict[str, float] = Field(default_factory=dict)  # over those of constants.yaml
    sources: Sources = Field(default_factory=dict)


class TierEntry(Section):
    """One level of the network. What is left out has a default, see `cluster.Tier`."""

    name: str
    size: Count | None = None  # devices within reach
    shape: Literal["switch", "fullmesh", "ring", "torus"] = "switch"
    links: Count | None = None
    bandwidth_gb_s: Positive
    latency_us: Annotated[tuple[Positive, Positive, Positive], Field(strict=False)] | None = None
    efficiency: Share | None = None
    oversubscription: Positive = 1.0
    rails: Count = 1
    in_switch_reduce: Positive | None = None
    sources: Sources = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_links(self) -> TierEntry:
        if self.shape != "switch" and self.links is None:
            raise ValueError(f"a {self.shape} needs links, the number of links of a device")
        return self


class ClusterFile(Section):
    """A device, the tiers between devices, and what was measured of a machine."""

    summary: str = ""
    devices: Count | None = None  # of the machine that was measured
    device: DeviceEntry
    tiers: Annotated[list[TierEntry], Field(min_length=1)]  # from inside out
    cpu: Cpu | None = None  # whose cores the devices share, which are processes
    points: list[dict[str, str | float]] = Field(
        default_factory=list
    )  # all that was measured; no plan reads it
