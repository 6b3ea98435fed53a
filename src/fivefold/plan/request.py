"""What is asked of the planner: the options of `fivefold plan` as text, parsed once into values.

An option that is left out has a rule, and a note reports each rule that was used:

- sequence length: 4,096 tokens, or all positions of a model that has a learned table of fewer;
- global batch: about 4M tokens (2^22), rounded as below;
- a batch in tokens becomes the roundest number of sequences within 5 % of it: a multiple of the
  largest power of two, times the odd part of the number of devices (which leaves data parallelism
  free to take any share of them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.cluster.cluster import Cluster
from fivefold.cluster.load import devices_of, load_cluster
from fivefold.errors import UserError
from fivefold.files import is_yaml
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.legality import violations
from fivefold.layout.notation import Layout, parse, stated
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters
from fivefold.model.huggingface.presets import are_dimensions, read_model
from fivefold.plan.engines import ENGINES, PRODUCT_BYTES, Job
from fivefold.plan.search.constraints import Constraints, parse_named
from fivefold.plan.units import layout_and_seconds, memory_bytes, memory_share, token_count
from fivefold.plan.wording import devices
from fivefold.schema import MOST
from fivefold.text import join_or

USUAL_SEQUENCE_LENGTH = 4096
USUAL_BATCH_TOKENS = 2**22
BATCH_TOLERANCE = 0.05

MOST_SEQUENCE_TOKENS = 100_000_000
MOST_SEQUENCES = 1_000_000  # of a step
MOST_PARAMETERS = 10**15
"""More than this is taken for a typing error: sums would overflow."""


@dataclass(frozen=True)
class Options:
    """The options of `fivefold plan`, as typed. None: not given."""

    model: str | None = None  # preset, path, or dimensions
    dims: str | None = None  # dimensions
    cluster: str | None = None
    gpus: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None  # sequences
    global_batch_tokens: str | None = None
    precision: str | None = None
    engine: str | None = None  # megatron, or on a CPU fivefold
    mtp: bool = False
    offload: bool = False
    imbalance: float = 1.0
    layout: str | None = None
    fix: str | None = None
    forbid: str | None = None
    top: int = 5
    objective: str = "time"
    tokens: str | None = None
    max_memory: str | None = None
    headroom: str | None = None
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanRequest:
    """The options, parsed."""

    name: str  # of the model
    model: str | None  # as a plan file names it; None: only Megatron's arguments describe it
    cluster: str  # as a plan file names it
    job: Job
    constraints: Constraints
    layout: Layout | None  # the one to evaluate, legal for the job; None: search
    tokens: float | None  # of the whole training
    measured: tuple[tuple[Layout, float], ...]  # legal layouts and their step seconds
    notes: tuple[str, ...]

    def job_of(self, layout: Layout) -> Job:
        """The job on the devices that a layout uses, which may be fewer than there are."""
        if layout.world_size == self.job.cluster.num_devices:
            return self.job
        return replace(self.job, cluster=self.job.cluster.with_devices(layout.world_size))


def parse_request(
    options: Options, config: ModelConfig | None = None, notes: Iterable[str] = ()
) -> PlanRequest:
    """Parse the options. UserError for one that is missing or wrong.

    `config` is a model that no option names, with notes on how it was read.
    """
    _refuse_contradictions(options)
    options = replace(options, model=options.model or options.dims)
    if options.model is not None:
        config = read_model(options.model)
    if config is None:
        raise UserError(
            "plan needs a model: a name such as llama-3.1-70b, the path of a config.json, or --dims"
        )
    if options.cluster is None:
        raise UserError("plan needs --cluster, such as dgx-h100; fivefold plan --list names them")
    gpus = _gpus(options)
    _check(options, config)
    notes = [*notes, *config.notes]
    sequence_length = options.sequence_length or _usual_length(config, notes)
    layout = None if options.layout is None else parse_named(options.layout, gpus)
    global_batch = _global_batch(options, gpus, sequence_length, layout, notes)
    cluster = load_cluster(options.cluster, gpus)
    precision, engine = _program(options, cluster)
    job = Job(
        config=config,
        cluster=cluster,
        sequence_length=sequence_length,
        global_batch=global_batch,
        precision=precision,
        engine=replace(ENGINES[engine], host_optimizer=options.offload),
        mtp=options.mtp,
        imbalance=options.imbalance,
    )
    job.cluster.device.peak_flops(job.precision)  # refuses what the device has no unit for
    notes += _unfilled_nodes(job)
    constraints = _constraints(options)
    constraints.check()
    return PlanRequest(
        name=_name(options.model or config.family),
        model=options.model,
        cluster=options.cluster,
        job=job,
        constraints=constraints,
        layout=None if options.layout is None else _layout_of(job, options.layout),
        tokens=None if options.tokens is None else token_count(options.tokens, "--tokens"),
        measured=tuple(measured_step(text, job) for text in options.measured),
        notes=tuple(notes),
    )


def measured_step(text: str, job: Job) -> tuple[Layout, float]:
    """`tp8 pp4 mb1=9.31s`: a layout of this job and the seconds its step took."""
    line, seconds = layout_and_seconds(text)
    return _layout_of(job, line), seconds


def _layout_of(job: Job, text: str) -> Layout:
    """A layout for this job. UserError with every rule that it breaks, the first ones first."""
    gpus = job.cluster.num_devices
    layout = with_global_batch(parse_named(text, gpus), job.global_batch, stated(text))
    broken = violations(layout, job.config, job.sequence_length, gpus, running=False)
    if broken:
        raise UserError(f"{layout} is not legal: {'; '.join(broken)}")
    return layout


def _program(options: Options, cluster: Cluster) -> tuple[str, str]:
    """Precision and engine; on a CPU, fp32 and fivefold, which was measured there."""
    if cluster.cores is None:
        return options.precision or "bf16", options.engine or "megatron"
    if options.engine not in (None, "fivefold"):
        raise UserError(
            f"{cluster.name} is a CPU, on which engine {options.engine} does not run: leave out "
            "--engine"
        )
    if options.precision not in (None, "fp32"):
        raise UserError(
            f"{cluster.name} is a CPU that was measured in fp32, not in {options.precision}: leave "
            "out --precision"
        )
    return "fp32", "fivefold"


def _refuse_contradictions(options: Options) -> None:
    """UserError for an option without a value, and for two that contradict each other."""
    for name in ("model", "cluster", "precision", "layout", "dims", "fix", "forbid"):
        refuse_empty("MODEL" if name == "model" else f"--{name}", getattr(options, name))
    if options.dims is not None and options.model is not None:
        raise UserError("--dims and MODEL both describe a model: give only one")
    if options.dims is not None and not are_dimensions(options.dims):
        raise UserError(f"--dims {options.dims!r} has no dimensions: write them like hidden=4096")


def refuse_empty(option: str, value: str | None) -> None:
    """UserError for an option that is given without a value."""
    if value is not None and not value.strip():
        raise UserError(f"{option} is empty: give it a value, or leave it out")


def _check(options: Options, config: ModelConfig) -> None:
    """UserError for values that are wrong on any cluster."""
    if options.engine is not None and options.engine not in ENGINES:
        raise UserError(f"engine {options.engine!r} is unknown: it may be {join_or(ENGINES)}")
    if options.precision is not None and options.precision not in PRODUCT_BYTES:
        raise UserError(
            f"--precision {options.precision} cannot be planned: it may be {join_or(PRODUCT_BYTES)}"
        )
    _check_imbalance(options.imbalance, config)
    _refuse_above("--seq", options.sequence_length, MOST_SEQUENCE_TOKENS, "tokens")
    total = count_parameters(config, mtp=True).total
    _refuse_above("the model's size", total, MOST_PARAMETERS, "parameters")
    if options.mtp and not config.mtp_layers:
        raise UserError(
            f"--mtp: {config.family} has no multi-token-prediction modules; leave it out"
        )
    if options.objective == "cost" and options.tokens is None:
        raise UserError("--objective cost needs --tokens, the length of the training, such as 15T")


def _check_imbalance(imbalance: float, config: ModelConfig) -> None:
    moe = config.moe
    most = moe.num_experts / moe.experts_per_token if moe else 1.0
    if not imbalance >= 1:  # nan is not
        raise UserError(
            f"--imbalance {imbalance:g}: the busiest expert rank's tokens divided by the mean "
            "cannot be below 1"
        )
    if imbalance > most and moe is None:
        raise UserError(f"--imbalance {imbalance:g}: {config.family} has no experts; leave it out")
    if moe is not None and imbalance > most:
        raise UserError(
            f"--imbalance {imbalance:g} is more than if every token went to the same experts "
            f"({moe.experts_per_token} of {moe.num_experts}): it may be up to {most:g}"
        )


def _refuse_above(what: str, value: int | None, most: int, unit: str) -> None:
    if value is not None and value > most:
        raise UserError(f"{what} is {value:,} {unit}, which is too many: it may be up to {most:,}")


def _unfilled_nodes(job: Job) -> Iterator[str]:
    """How a job lies in nodes that it does not fill."""
    cluster = job.cluster
    size, count = cluster.system[0].size, cluster.num_devices
    if size is None or count <= size or count % size == 0:
        return
    used = cluster.tiers[0].size or size
    nodes, rest = divmod(count, used)
    more = f" and one with {rest}" if rest else ""
    yield (
        f"{devices(job, count)} do not fill whole nodes of {size}: the plan has {nodes:,} "
        f"{'node' if nodes == 1 else 'nodes'} with {used}{more}"
    )


def _constraints(options: Options) -> Constraints:
    memory, headroom = options.max_memory, options.headroom
    return Constraints(
        fix=options.fix or "",
        forbid=options.forbid or "",
        top=options.top,
        objective=options.objective,
        max_memory_bytes=None if memory is None else memory_bytes(memory),
        headroom=None if headroom is None else memory_share(headroom),
    )


def _name(text: str) -> str:
    """A model's name: the preset's, or that of the file or its folder."""
    path = Path(text)
    if are_dimensions(text):
        return "by dimensions"
    if text.endswith("config.json") and path.parent.name:
        return path.parent.name
    return path.name.removesuffix(".json") if "/" in text or text.endswith(".json") else text


def _gpus(options: Options) -> int:
    gpus = options.gpus
    if gpus is None and options.layout is not None and stated(options.layout) & {"dp", "edp"}:
        gpus = parse(options.layout).world_size
    if gpus is None:
        cluster = options.cluster or ""
        if is_yaml(cluster):
            load_cluster(cluster, 1)  # names what is wrong with the file
        gpus = devices_of(cluster)
    if gpus is None:
        raise UserError("plan needs --gpus, the number of devices, such as 1024")
    if gpus < 1:
        raise UserError(f"--gpus must be 1 or more, not {gpus}")
    _refuse_above("--gpus", gpus, MOST, "devices")
    return gpus


def _usual_length(config: ModelConfig, notes: list[str]) -> int:
    positions = config.learned_positions or USUAL_SEQUENCE_LENGTH
    length = min(USUAL_SEQUENCE_LENGTH, positions)
    notes.append(f"--seq is not given: the sequence length is {length:,} tokens")
    return length


def _global_batch(
    options: Options, gpus: int, sequence_length: int, layout: Layout | None, notes: list[str]
) -> int:
    """Sequences of a step."""
    sequences = _sequences(options, gpus, sequence_length, layout, notes)
    _refuse_above("the global batch", sequences, MOST_SEQUENCES, "sequences")
    return sequences


def _sequences(
    options: Options, gpus: int, sequence_length: int, layout: Layout | None, notes: list[str]
) -> int:
    """From what is given: sequences, tokens, the layout's batch, or nothing."""
    if options.global_batch is not None and options.global_batch_tokens is not None:
        raise UserError("--global-batch and --global-batch-tokens: give only one of them")
    if options.global_batch is not None:
        if options.global_batch < 1:
            raise UserError(
                f"--global-batch must be 1 or more sequences, not {options.global_batch}"
            )
        return options.global_batch
    if options.global_batch_tokens is not None:
        wanted = token_count(options.global_batch_tokens, "--global-batch-tokens")
        rule = f"--global-batch-tokens is rounded from {options.global_batch_tokens}"
    elif layout is not None and "ga" in stated(options.layout or ""):
        return layout.global_batch
    else:
        wanted, rule = float(USUAL_BATCH_TOKENS), "--global-batch is not given"
    unit = 1 if layout is None else layout.dp * layout.micro_batch
    sequences = round_batch(wanted / sequence_length, math.lcm(odd_part(gpus), unit))
    tokens = sequences * sequence_length
    notes.append(f"{rule}: a step has {sequences:,} sequences ({tokens:,} tokens)")
    return sequences


def odd_part(count: int) -> int:
    """The largest odd divisor."""
    return count // (count & -count)


def round_batch(sequences: float, unit: int) -> int:
    """The multiple of `unit` times the largest power of two that is within 5 % of `sequences`;
    where none is, the nearest multiple of `unit`, at least one."""
    power = 2 ** max(0, math.floor(math.log2(max(1.0, sequences / unit))) + 1)
    while power > 1:
        rounded = round(sequences / (unit * power)) * unit * power
        if abs(rounded - sequences) <= BATCH_TOLERANCE * sequences:
            return rounded
        power //= 2
    return max(1, round(sequences / unit)) * unit
