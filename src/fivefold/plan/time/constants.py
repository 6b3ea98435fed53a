"""The few numbers of a device that no data sheet has: `cluster/constants.yaml`.

Each entry of that file has a value, its meaning and its origin; `benchmarks/fit.py` derives those
that are fitted. A device without an entry has the defaults, and its product speed from the best
product that was ever measured on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fivefold.cluster.cluster import Device

USUAL_PRODUCT_SHARE = 0.78
"""Of peak, in the largest products, where none was measured on the device: the median of those
that were (data sheets promise clocks that no device holds under full load)."""


@dataclass(frozen=True)
class Constants:
    """Shares are of the data sheet's number unless said otherwise; meanings in constants.yaml."""

    processors: float  # multiprocessors (compute units), which work off tiles in waves
    sustained: float  # speed that ever larger bf16 products approach, over the best measured one
    sustained_fp8: float  # the same for fp8 products
    sustained_fp4: float  # the same for fp4 products
    wave_loss: float  # waves lost to a last one that is partly filled
    misaligned_loss: float  # time lost by a product whose rows are no multiple of 128 bytes
    grouped: float  # speed of grouped products, over one product of their shapes
    attention: float  # of bf16 peak, causal FlashAttention on long sequences
    portable_attention: float  # speed of FlashAttention-2 over the device's fastest kernel
    unfused_attention: float  # of bf16 peak, batched products over the scores
    score_passes: float  # passes over the scores by unfused attention, forward or backward
    memory: float  # of memory bandwidth
    light_backward: float  # light operations: backward time over forward time
    unfused_light: float  # light operations as separate kernels, time over that of fused ones
    quantize: float  # passes over a product's input to quantize it, over the least possible
    launch_s: float  # seconds from one kernel to the next when the host cannot keep ahead
    contention: float  # seconds of compute lost for a second of messages that run beside it
    step_s: float  # once a step: data, loss, logging, synchronisation
    straggler: float  # share of the step lost for each doubling of the nodes

    @staticmethod
    def of(device: Device) -> Constants:
        """The constants of a device."""
        return Constants(
            **{field.name: device.constants[field.name] for field in fields(Constants)}
        )

    def product_flops(self, device: Device, precision: str) -> float:
        """FLOP/s that large products sustain."""
        peak = device.peak_flops(precision)
        eight_bits = ("fp8", "mxfp8")
        measured = device.measured.get("fp8" if precision in eight_bits else precision)
        best = measured or peak * USUAL_PRODUCT_SHARE
        if precision in eight_bits:
            return best * self.sustained_fp8
        return best * (self.sustained_fp4 if precision == "nvfp4" else self.sustained)
