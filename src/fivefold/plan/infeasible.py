"""When no layout fits: the least that one takes, how many devices would do, and what else helps.

The lower bound counts weights, gradients and optimizer state alone, spread evenly over all
devices; no layout can take less. Everything else is a search with something changed, so that what
is advised has a layout that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.model.counts import count_parameters
from fivefold.plan.engines import Engine, Job
from fivefold.plan.estimate import Estimate
from fivefold.plan.explain import gb
from fivefold.plan.memory.states import FITS, fewest_devices
from fivefold.plan.search.constraints import Constraints
from fivefold.plan.search.least_memory import least_memory, smallest_gpus

WEIGHT_BYTES = 2
"""Of a bf16 weight. With LoRA that is all: gradients and optimizer state are the adapters'."""


@dataclass(frozen=True)
class StateBound:
    """Devices that weights, gradients and optimizer state alone fill."""

    bytes_per_parameter: int
    devices: int


@dataclass(frozen=True)
class Remedy:
    """The least memory of any layout with something changed."""

    change: str
    peak_memory_bytes: float
    fits: bool
    layout: str | None  # None: a lower bound, not a layout


@dataclass(frozen=True)
class NearMiss:
    """A layout that takes little, though too much."""

    layout: str
    peak_memory_bytes: float


@dataclass(frozen=True)
class Shortage:
    """What there is to say where no layout fits."""

    limit_bytes: float  # of a device
    closest: list[NearMiss]  # least memory first
    state_bytes: float  # of the whole model
    bounds: list[StateBound]  # fewer bytes a parameter first
    smallest_gpus: int | None  # of full nodes; None: no number of them does
    smallest_gpus_to_spare: int | None  # on which a layout leaves the usual headroom too
    helps: list[Remedy]
    text: list[str]


def shortage(job: Job, wishes: Constraints, limit: float, closest: Sequence[Estimate]) -> Shortage:
    """What would fit, given that nothing does in `limit` bytes of a device, which the search held
    layouts to; `closest` are those that take least."""
    close = [NearMiss(str(each.layout), each.peak_memory_bytes) for each in closest]
    close.sort(key=lambda each: each.peak_memory_bytes)
    memory = wishes.max_memory_bytes or job.cluster.device.memory_bytes
    total = count_parameters(job.config, mtp=job.mtp).total
    bounds = [
        StateBound(size, fewest_devices(job.config, memory, size, mtp=job.mtp))
        for size in _state_sizes(job.engine)
    ]
    smallest = smallest_gpus(job, wishes, limit)
    to_spare = smallest_gpus(job, wishes, wishes.limit_bytes(job))
    state_bytes = float(total * bounds[-1].bytes_per_parameter)
    return Shortage(
        limit_bytes=limit,
        closest=close,
        state_bytes=state_bytes,
        bounds=bounds,
        smallest_gpus=smallest,
        smallest_gpus_to_spare=to_spare,
        helps=list(_helps(job, wishes, limit, total)),
        text=[
            *_sentences(job, memory, limit, close, bounds, state_bytes),
            _enough(smallest, to_spare),
        ],
    )


def _state_sizes(engine: Engine) -> list[int]:
    """Bytes a parameter: as the engine keeps them, and with bf16 gradients; fewer first."""
    moments = 0 if engine.host_optimizer else engine.optimizer_bytes
    own = WEIGHT_BYTES + engine.gradient_bytes + moments
    return sorted({own - engine.gradient_bytes + 2, own})


def _helps(job: Job, wishes: Constraints, limit: float, total: int) -> Iterator[Remedy]:
    """Each change that may lower the least memory, by itself."""
    engine, length = job.engine, job.sequence_length
    changed: dict[str, tuple[Job, Constraints]] = {}
    if wishes.fix or wishes.forbid:
        changed["without --fix and --forbid"] = job, replace(wishes, fix="", forbid="")
    if not engine.host_optimizer:
        host = replace(engine, host_optimizer=True)
        changed["optimizer state in host memory"] = replace(job, engine=host), wishes
    if engine.gradient_bytes > 2:
        lower = replace(engine, gradient_bytes=2, reduced_bytes=2, optimizer_bytes=8)
        changed["bf16 gradients and moments"] = replace(job, engine=lower), wishes
    if length % 2 == 0 and length > 1024:
        shorter = replace(job, sequence_length=length // 2)
        changed[f"sequences of {length // 2:,} tokens"] = shorter, wishes
    for change, (other, wanted) in changed.items():
        try:
            least = least_memory(other, wanted)
        except UserError:  # what is fixed does not suit the changed job
            continue
        if least is not None:
            yield Remedy(change, least[0], least[0] <= limit, str(least[1]))
    frozen = total * WEIGHT_BYTES / job.cluster.num_devices
    yield Remedy("LoRA: frozen bf16 weights alone, fully sharded", frozen, frozen <= limit, None)


def _sentences(
    job: Job,
    memory: float,
    limit: float,
    close: Sequence[NearMiss],
    bounds: list[StateBound],
    state_bytes: float,
) -> Iterator[str]:
    devices = job.cluster.num_devices
    many = f"{devices:,} devices of {gb(memory)}" if devices > 1 else f"one device of {gb(memory)}"
    may = "" if limit == memory else f", of which a layout may take {gb(limit)}"
    least = close[0]
    yield (
        f"Nothing fits {many}{may}: the layout that takes least needs "
        f"{gb(least.peak_memory_bytes)}, {least.layout}."
    )
    few, own = bounds[0], bounds[-1]
    also = f" ({few.devices:,} at {few.bytes_per_parameter} B)" if few is not own else ""
    verdict = "so this is infeasible" if own.devices > devices else "which there are"
    yield (
        f"Weights, gradients and optimizer state are {gb(state_bytes)} at "
        f"{own.bytes_per_parameter} B a parameter: they fill at least {own.devices:,} "
        f"devices{also}, {verdict}; {gb(state_bytes / devices)} a device."
    )


def _enough(smallest: int | None, to_spare: int | None) -> str:
    """How many devices would do."""
    if smallest is None:
        return "No number of full nodes does."
    text = f"The smallest number of devices that does is {smallest:,}, in full nodes"
    if to_spare == smallest:
        return f"{text}."
    tight = f"{text}; it is tight there, with less than {1 - FITS:.0%} to spare"
    return f"{tight}." if to_spare is None else f"{tight}, which {to_spare:,} leave."
