"""What the command line asks of the planner: options as text, read into a job and wishes.

What is left out has a rule, and each rule that was used is said in a note:

- sequence length: 4,096 tokens, or all positions of a model that has a learned table of fewer;
- global batch: about 4M tokens (2^22), rounded as below;
- a batch in tokens becomes the roundest number of sequences within 5 % of it: the multiple of the
  largest power of two (times the odd part of the number of devices, so that data parallelism can
  take any share of them).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.cluster.cluster import Cluster
from fivefold.cluster.load import devices_of, load_cluster
from fivefold.errors import UserError
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.notation import Layout, parse, stated
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters
from fivefold.model.huggingface.presets import are_dimensions, read_model
from fivefold.plan.engines import ENGINES, PRODUCT_BYTES, Job
from fivefold.plan.search.constraints import Constraints, parse_named
from fivefold.schema import MOST
from fivefold.text import join_or

USUAL_SEQUENCE_LENGTH = 4096
USUAL_BATCH_TOKENS = 2**22
BATCH_TOLERANCE = 0.05

MOST_SEQUENCE_TOKENS = 100_000_000
MOST_SEQUENCES = 1_000_000  # of a step
MOST_PARAMETERS = 10**15
"""What is beyond these is taken for a slip of the keyboard: sums over it would overflow."""


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
    from_megatron: str | None = None  # arguments, or the path of a script that has them
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
    """The options, read."""

    name: str  # of the model
    model: str | None  # as a plan file names it; None: only Megatron's arguments describe it
    cluster: str  # as a plan file names it
    job: Job
    wishes: Constraints
    layout: Layout | None  # the one that is asked about
    tokens: float | None  # of the whole training
    measured: tuple[tuple[Layout, float], ...]  # layouts and their step seconds
    notes: tuple[str, ...]


def ask(options: Options) -> PlanRequest:
    """Read the options. UserError for one that is missing or wrong."""
    notes: list[str] = []
    _refuse_contradictions(options)
    options = replace(options, model=options.model or options.dims)
    if options.from_megatron is not None:
        options, config = _from_megatron(options, notes)
    elif options.model is not None:
        config = read_model(options.model)
    else:
        raise UserError(
            "plan needs a model: a name such as llama-3.1-70b, the path of a config.json, or --dims"
        )
    if options.cluster is None:
        raise UserError("plan needs --cluster, such as dgx-h100; fivefold plan --list names them")
    gpus = _gpus(options)
    _check(options, config)
    notes += config.notes
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
    notes += _unfilled_nodes(job.cluster)
    if layout is not None and options.layout is not None:
        layout = with_global_batch(layout, global_batch, stated(options.layout))
    return PlanRequest(
        name=_name(options.model or config.family),
        model=options.model,
        cluster=options.cluster,
        job=job,
        wishes=_wishes(options),
        layout=layout,
        tokens=None if options.tokens is None else number(options.tokens, "--tokens"),
        measured=tuple(measured_step(text, job) for text in options.measured),
        notes=tuple(notes),
    )


def _program(options: Options, cluster: Cluster) -> tuple[str, str]:
    """Precision and engine: on the cores of a CPU this program runs, and was measured in fp32."""
    if cluster.cores is None:
        return options.precision or "bf16", options.engine or "megatron"
    if options.engine not in (None, "fivefold"):
        raise UserError(
            f"{cluster.name} is processes on a CPU, which engine {options.engine} does not run on: "
            "leave --engine out"
        )
    if options.precision not in (None, "fp32"):
        raise UserError(
            f"{cluster.name} is a CPU that was measured in fp32, not in {options.precision}: leave "
            "--precision out"
        )
    return "fp32", "fivefold"


def _refuse_contradictions(options: Options) -> None:
    """UserError for options that are given without a value, or two that say the same."""
    texts = ("model", "cluster", "precision", "layout", "from_megatron", "dims", "fix", "forbid")
    for name in texts:
        value = getattr(options, name)
        if value is not None and not value.strip():
            option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is empty: give it a value, or leave it out")
    if options.dims is not None and options.model is not None:
        raise UserError("--dims describes a model and MODEL names one: give one of them")
    if options.dims is not None and not are_dimensions(options.dims):
        raise UserError(f"--dims {options.dims!r} has no dimensions: write them as hidden=4096")
    if options.from_megatron is not None:
        given = {"MODEL": options.model, "--dims": options.dims, "--layout": options.layout}
        for option, value in given.items():
            if value is not None:
                raise UserError(
                    f"--from-megatron reads model and layout and {option} says one of them too: "
                    "give one of the two"
                )


def _check(options: Options, config: ModelConfig) -> None:
    """Refuses values that no cluster is needed to refuse."""
    if options.engine is not None and options.engine not in ENGINES:
        raise UserError(f"engine {options.engine!r} is not known: it may be {join_or(ENGINES)}")
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
            f"--imbalance {imbalance:g} is the busiest expert rank's tokens over the "
            "mean, which cannot be below 1"
        )
    if imbalance > most and moe is None:
        raise UserError(f"--imbalance {imbalance:g}: {config.family} has no experts; leave it out")
    if moe is not None and imbalance > most:
        raise UserError(
            f"--imbalance {imbalance:g} is more than all tokens on one of {moe.num_experts} "
            f"experts, of which each goes to {moe.experts_per_token}: it may be up to {most:g}"
        )


def _refuse_above(what: str, value: int | None, most: int, unit: str) -> None:
    if value is not None and value > most:
        raise UserError(f"{what} is {value:,} {unit}, which is too many: the most is {most:,}")


def _unfilled_nodes(cluster: Cluster) -> Iterator[str]:
    """How a job lies in nodes that it does not fill."""
    size, devices = cluster.system[0].size, cluster.num_devices
    if size is None or devices <= size or devices % size == 0:
        return
    used = cluster.tiers[0].size or size
    nodes, rest = divmod(devices, used)
    more = f" and one with {rest}" if rest else ""
    yield (
        f"{devices:,} devices do not fill whole nodes of {size}: they are planned as {nodes:,} "
        f"{'node' if nodes == 1 else 'nodes'} with {used}{more}"
    )


def _wishes(options: Options) -> Constraints:
    return Constraints(
        fix=options.fix or "",
        forbid=options.forbid or "",
        top=options.top,
        objective=options.objective,
        max_memory_bytes=None if options.max_memory is None else memory_bytes(options.max_memory),
        headroom=None if options.headroom is None else share(options.headroom),
    )


def _from_megatron(options: Options, notes: list[str]) -> tuple[Options, ModelConfig]:
    """What a Megatron-LM argument line says, unless an option of ours says otherwise."""
    from fivefold.interop.megatron_read import read_megatron

    run = read_megatron(_megatron_text(options.from_megatron or ""), options.gpus)
    notes += run.notes
    return (
        replace(
            options,
            layout=str(run.layout),
            gpus=options.gpus or run.layout.world_size,
            sequence_length=options.sequence_length or run.sequence_length,
            global_batch=options.global_batch
            or (None if options.global_batch_tokens else run.global_batch),
            precision=options.precision or run.precision,
            mtp=options.mtp or run.mtp,
        ),
        run.config,
    )


def _megatron_text(text: str) -> str:
    """The arguments themselves, or the script that has them."""
    if not os.path.isfile(text):
        if "--" not in text:
            raise UserError(
                f"--from-megatron {text}: there is no such file, nor are there arguments"
            )
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the script {text} cannot be read: {error}") from None


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
        if cluster.endswith((".yaml", ".yml")):
            load_cluster(cluster, 1)  # says what is wrong with the file
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
    notes.append(f"sequence length {length:,} tokens, since --seq is not given")
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
    """By what is given: sequences, tokens, the layout's own, or nothing."""
    if options.global_batch is not None and options.global_batch_tokens is not None:
        raise UserError("--global-batch and --global-batch-tokens say the same: give one of them")
    if options.global_batch is not None:
        if options.global_batch < 1:
            raise UserError(
                f"--global-batch must be 1 or more sequences, not {options.global_batch}"
            )
        return options.global_batch
    if options.global_batch_tokens is None and layout is not None:
        given = stated(options.layout or "")
        if "ga" in given:
            return layout.global_batch
    if options.global_batch_tokens is None:
        wanted, why = (
            float(USUAL_BATCH_TOKENS),
            "about 4M tokens, since --global-batch is not given",
        )
    else:
        wanted = number(options.global_batch_tokens, "--global-batch-tokens")
        why = f"the roundest near {options.global_batch_tokens} tokens"
    unit = 1 if layout is None else layout.dp * layout.micro_batch
    sequences = round_batch(wanted / sequence_length, math.lcm(odd_part(gpus), unit))
    tokens = sequences * sequence_length
    notes.append(f"global batch {sequences:,} sequences ({tokens:,} tokens): {why}")
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


# Values with units

COUNT_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LENGTH_UNITS = {"": 1, "K": 2**10, "M": 2**20}
BYTE_UNITS = {"M": 1e6, "G": 1e9, "T": 1e12, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}
TIME_UNITS = {"s": 1.0, "ms": 1e-3}
LARGEST_NUMBER = 1e18
"""Of tokens, bytes or seconds; digits enough make a float infinite."""


def number(text: str, option: str) -> float:
    """`16M`, `15T` or `4e6`: a count of tokens."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]{1,2})?)([kKmMbBtT]?)", text.strip())
    value = float(parts[1]) * COUNT_UNITS[parts[2].upper()] if parts else 0.0
    if not 1 <= value <= LARGEST_NUMBER:
        raise UserError(f"{option} {text!r} is no number of tokens: write it like 16M or 15T")
    return value


def sequence_tokens(text: str) -> int:
    """`8192` or `8K`. A sequence of 8K tokens has 8 x 1,024, as everyone's has."""
    parts = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text.strip())
    value = int(parts[1]) * LENGTH_UNITS[parts[2].upper()] if parts else 0
    if value < 1:
        raise UserError(f"--seq {text!r} is no number of tokens: write it like 8192 or 8K")
    return value


def memory_bytes(text: str) -> float:
    """`70GB`, `70G` or `64GiB`."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([MGT]i?)B?", text.strip(), re.IGNORECASE)
    value = float(parts[1]) * BYTE_UNITS[parts[2].upper()] if parts else 0.0
    if not 0 < value <= LARGEST_NUMBER:
        raise UserError(f"--max-memory {text!r} is no amount of memory: write it like 70GB")
    return value


def share(text: str) -> float:
    """`5%` or `0.05`."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text.strip())
    value = float(parts[1]) / (100 if parts[2] else 1) if parts else -1.0
    if not 0 <= value < 1:
        raise UserError(f"--headroom {text!r} is no share of the memory: write it like 5%")
    return value


def measured_step(text: str, job: Job) -> tuple[Layout, float]:
    """`tp8 pp4 mb1=9.31s`: a layout of this job and the seconds its step took."""
    line, equals, time = text.rpartition("=")
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(s|ms)", time.strip())
    seconds = float(parts[1]) * TIME_UNITS[parts[2]] if parts else 0.0
    if not equals or not line.strip() or not 0 < seconds <= LARGEST_NUMBER:
        raise UserError(f'--measured {text!r} is no measured step: write it like "tp8 pp4=9.31s"')
    layout = parse_named(line, job.cluster.num_devices)
    layout = with_global_batch(layout, job.global_batch, stated(line))
    return layout, seconds
