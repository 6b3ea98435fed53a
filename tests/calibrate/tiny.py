"""A grid and whole steps that take seconds, with something of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.calibrate import steps
from fivefold.calibrate.grid import CPU, Grid, quick

_QUICK = quick(CPU)

TINY = Grid(
    products=((8, 16, 32), (64, 32, 16), (32, 32, 32), (128, 64, 64)),
    short_products=((16, 16, 16),),
    grouped=((2, 8, 16, 16),),
    attention=((1, 2, 1, 16, 32), (1, 2, 2, 16, 64)),
    light=((16, 64), (64, 128)),
    losses=((16, 64),),
    memory_bytes=(1024, 65536),
    optimizer=((1, 64), (4, 1024)),
    message_bytes=(256, 4096, 65536),
    blocks=tuple(replace(block, sequence=16, batch=1) for block in _QUICK.blocks),
    patience_s=0.001,
)


def shrink_steps(patch: pytest.MonkeyPatch) -> None:
    """Whole steps of the same layouts and kinds of model, but of small ones, and few."""
    sizes = {"hidden_size": 60, "intermediate_size": 64}
    patch.setattr(steps, "MODELS", {name: {**of, **sizes} for name, of in steps.MODELS.items()})
    patch.setattr(steps, "STEPS", dict.fromkeys(steps.STEPS, steps.WARM_UP + 1))
    patch.setattr(steps, "SEQUENCE_LENGTH", 32)
