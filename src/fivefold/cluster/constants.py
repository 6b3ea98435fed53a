"""The few numbers of a device that no data sheet has: `constants.yaml`.

Each entry of that file has a value, its meaning and its origin; `benchmarks/fit.py` derives those
that are fitted. A device without an entry has the defaults, and its product speed from the best
product that was ever measured on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from fivefold.files import read_yaml
from fivefold.schema import NotNegative, Section, validate

CONSTANTS = Path(__file__).with_name("constants.yaml")
USUAL_MATMUL_SHARE = 0.78
"""Of peak, in the largest products, where none was measured on the device: the median of those
that were (data sheets promise clocks that no device holds under full load)."""


class Constants(Section):
    """Shares are of the data sheet's number unless said otherwise; meanings in constants.yaml."""

    processors: NotNegative  # multiprocessors (compute units), which work off tiles in waves
    sustained: (
        NotNegative  # speed that ever larger bf16 products approach, over the best measured one
    )
    sustained_fp8: NotNegative  # the same for fp8 products
    sustained_fp4: NotNegative  # the same for fp4 products
    wave_loss: NotNegative  # waves lost to a last one that is partly filled
    misaligned_loss: NotNegative  # time lost by a product whose rows are no multiple of 128 bytes
    grouped: NotNegative  # speed of grouped products, over one product of their shapes
    attention: NotNegative  # of bf16 peak, causal FlashAttention on long sequences
    portable_attention: NotNegative  # speed of FlashAttention-2 over the device's fastest kernel
    unfused_attention: NotNegative  # of bf16 peak, batched products over the scores
    score_passes: NotNegative  # passes over the scores by unfused attention, forward or backward
    memory: NotNegative  # of memory bandwidth
    light_backward: NotNegative  # light operations: backward time over forward time
    unfused_light: NotNegative  # light operations as separate kernels, time over that of fused ones
    quantize: NotNegative  # passes over a product's input to quantize it, over the least possible
    launch_s: NotNegative  # seconds from one kernel to the next when the host cannot keep ahead
    contention: NotNegative  # seconds of compute lost for a second of messages that run beside it
    step_s: NotNegative  # once a step: data, loss, logging, synchronisation
    straggler: NotNegative  # share of the step lost for each doubling of the nodes


def constants_of(key: str, own: Mapping[str, float] | None = None, where: str = "") -> Constants:
    """The constants of a device of the catalogue, those of its architectures over the default ones;
    `own` over them, which a cluster file says of its device at `where`."""
    file = _read()
    entries = dict(file["default"])
    for architecture in file["architectures"].get(key, ()):
        entries |= file.get(architecture, {})
    values = {name: entry["value"] for name, entry in entries.items()}
    return validate(Constants, values | dict(own or {}), f"{where}.constants")


@lru_cache(maxsize=1)
def _read() -> dict:
    found = read_yaml(CONSTANTS, "file of constants")
    assert isinstance(found, dict)
    return found
