"""When no layout fits: the least that one takes, how many devices are enough, and what else helps.

The lower bound counts weights, gradients and optimizer state alone, spread evenly over all
devices; no layout can take less. Everything else is a search with something changed, so for what
is advised there is a layout that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.model.counts import count_parameters
from fivefold.plan.engines import Engine, Job
from fivefold.plan.estimate import Estimate
from fivefold.plan.memory.states import FITS, fewest_devices
from fivefold.plan.search.constraints import Constraints
from fivefold.plan.search.least_memory import least_memory, smallest_gpus
from fivefold.plan.wording import device_noun, devices, gb

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
    layout: Layout | None  # None: a lower bound, not a layout


@dataclass(frozen=True)
class NearMiss:
    """A layout that takes little, though too much."""

    layout: Layout
    peak_memory_bytes: float


@dataclass(frozen=True)
class Infeasible:
    """What there is to say where no layout fits."""

    limit_bytes: float  # of a device
    closest: list[NearMiss]  # least memory first
    state_bytes: float  # of the whole model
    bounds: list[StateBound]  # fewer bytes per parameter first
    smallest_gpus: int | None  # of full nodes; None: no number of them is enough
    smallest_gpus_to_spare: int | None  # on which a layout leaves the usual headroom too
    helps: list[Remedy]
    text: list[str]


def infeasible(
    job: Job, constraints: Constraints, limit: float, closest: Sequence[Estimate]
) -> Infeasible:
    """What would fit, given that nothing does in `limit` bytes of a device; `closest` are the
    layouts that take least."""
    near = [NearMiss(each.layout, each.peak_memory_bytes) for each in closest]
    near.sort(key=lambda each: each.peak_memory_bytes)
    memory = constraints.memory_bytes(job)
    total = count_parameters(job.config, mtp=job.mtp).total
    bounds = [
        StateBound(size, fewest_devices(job.config, memory, size, mtp=job.mtp))
        for size in _state_sizes(job.engine)
    ]
    smallest = smallest_gpus(job, constraints, limit)
    to_spare = smallest_gpus(job, constraints, constraints.limit_bytes(job))
    state_bytes = float(total * bounds[-1].bytes_per_parameter)
    return Infeasible(
        limit_bytes=limit,
        closest=near,
        state_bytes=state_bytes,
        bounds=bounds,
        smallest_gpus=smallest,
        smallest_gpus_to_spare=to_spare,
        helps=list(_remedies(job, constraints, limit, total)),
        text=[
            _least(job, memory, limit, near[0]),
            _states(job, bounds, state_bytes),
            _enough(job, smallest, to_spare),
        ],
    )


def _state_sizes(engine: Engine) -> list[int]:
    """Bytes per parameter: as the engine keeps them, and with bf16 gradients; fewer first."""
    moments = 0 if engine.host_optimizer else engine.optimizer_bytes
    kept = WEIGHT_BYTES + engine.gradient_bytes + moments
    return sorted({kept - engine.gradient_bytes + 2, kept})


def _remedies(job: Job, constraints: Constraints, limit: float, total: int) -> Iterator[Remedy]:
    """Each change that may lower the least memory, by itself."""
    engine, length = job.engine, job.sequence_length
    changed: dict[str, tuple[Job, Constraints]] = {}
    if constraints.fix or constraints.forbid:
        changed["without --fix and --forbid"] = job, replace(constraints, fix="", forbid="")
    if not engine.host_optimizer:
        host = replace(engine, host_optimizer=True)
        changed["optimizer state in host memory"] = replace(job, engine=host), constraints
    if engine.gradient_bytes > 2:
        lower = replace(engine, gradient_bytes=2, reduced_bytes=2, optimizer_bytes=8)
        changed["bf16 gradients and moments"] = replace(job, engine=lower), constraints
    if length % 2 == 0 and length > 1024:
        shorter = replace(job, sequence_length=length // 2)
        changed[f"sequences of {length // 2:,} tokens"] = shorter, constraints
    for change, (other, wanted) in changed.items():
        try:
            least = least_memory(other, wanted)
        except UserError:  # what is fixed does not suit the changed job
            continue
        if least is not None:
            yield Remedy(change, least[0], least[0] <= limit, least[1])
    frozen = total * WEIGHT_BYTES / job.cluster.num_devices
    yield Remedy("LoRA: frozen bf16 weights alone, fully sharded", frozen, frozen <= limit, None)


def _least(job: Job, memory: float, limit: float, least: NearMiss) -> str:
    many, noun = devices(job, job.cluster.num_devices), device_noun(job)
    may = "" if limit == memory else f", of which a layout may use {gb(limit)}"
    return (
        f"No layout fits on {many} with {gb(memory)}{may}. The one that needs least memory takes "
        f"{gb(least.peak_memory_bytes)} per {noun}: {least.layout}."
    )


def _states(job: Job, bounds: list[StateBound], state_bytes: float) -> str:
    few, kept, there = bounds[0], bounds[-1], job.cluster.num_devices
    also = f" ({few.devices:,} with {few.bytes_per_parameter} B/parameter)" if few != kept else ""
    too_few = kept.devices > there
    return (
        f"{'Infeasible: weights' if too_few else 'Weights'}, gradients and optimizer state take "
        f"{gb(state_bytes)} ({kept.bytes_per_parameter} B/parameter), i.e. "
        f"{gb(state_bytes / there)} per {device_noun(job)}. At least "
        f"{devices(job, kept.devices)}{also} are needed{'' if too_few else ' for them alone'}."
    )


def _enough(job: Job, smallest: int | None, to_spare: int | None) -> str:
    if smallest is None:
        return "No number of full nodes is enough."
    text = f"In full nodes, at least {devices(job, smallest)} are needed for a layout to fit"
    if to_spare == smallest:
        return f"{text}."
    tight = f"{text}. The fit is tight there, with less than {1 - FITS:.0%} free"
    return f"{tight}." if to_spare is None else f"{tight}; with {devices(job, to_spare)} it is not."
