"""What a step is made of: the seconds of transfers, passes and ranks, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.ledger import Transfer
from fivefold.parallel.workload import RankWorkload


@dataclass(frozen=True)
class Row:
    """One transfer of the ledger with its time, arrays [n] over layouts."""

    transfer: Transfer
    seconds: Elementwise  # of all its calls in a step
    exposed: Elementwise  # the part that no compute hides
    waits: Elementwise = 0.0  # the part of `seconds` in which a core is free (`cluster.cores`)


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch, arrays [n]: with exposed messages, and recomputation."""

    forward: Elementwise
    input_gradient: Elementwise
    weight_gradient: Elementwise

    @property
    def backward(self) -> Elementwise:
        return self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class Waits:
    """Seconds in which a rank waits for messages that cost it no processor time, while others can
    have its core (`cluster.cores`). Of one micro-batch in all layers, and once a step."""

    forward: Elementwise = 0.0
    backward: Elementwise = 0.0
    once: Elementwise = 0.0


NO_WAITS = Waits()


@dataclass(frozen=True)
class Rank:
    """What one pipeline rank does. Seconds, arrays [n] over layouts."""

    layers: Passes  # of all layers of all its chunks, with all messages
    outside: Passes  # of the embedding, the head and the loss
    micro_batches: Elementwise  # that go through each chunk
    chunks: Elementwise
    once: Elementwise  # before and after all micro-batches: exposed messages and the optimizer
    optimizer: Elementwise  # part of `once`
    send: Elementwise  # of one message to the next stage
    rows: list[Row]
    waits: Waits = NO_WAITS
    for_experts: Waits = NO_WAITS  # the part of `waits` for the rank with the most tokens

    @property
    def busy(self) -> Elementwise:
        """Seconds of one micro-batch, both passes."""
        layers, outside = self.layers, self.outside
        return layers.forward + layers.backward + outside.forward + outside.backward


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch on the virtual stages of one layout. Arrays [stage]."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    weight: NDArray[np.float64]  # part of `backward`
    wait_forward: NDArray[np.float64]  # for messages, after the work
    wait_backward: NDArray[np.float64]
    send: float  # of a message between two ranks


@dataclass(frozen=True)
class PipelineRun:
    """A schedule that was simulated."""

    seconds: float  # from the first forward to the last backward
    slowdowns: tuple[float, ...]  # by rank: seconds that it was busy per second of work


@dataclass(frozen=True)
class Time:
    """Seconds, arrays [n] over layouts."""

    step: Elementwise
    ranks: dict[str, Rank]  # by role


@dataclass(frozen=True)
class Message:
    """One transfer of the ledger and its seconds on the network, arrays [n] over layouts."""

    transfer: Transfer
    total: Elementwise  # seconds of all calls of a step
    waits: Elementwise = 0.0  # seconds of all calls, not in `total`, in which a core is free


@dataclass(frozen=True)
class Traffic:
    """What one pipeline rank holds and sends, which no constant of a device changes."""

    work: RankWorkload
    messages: list[Message]
