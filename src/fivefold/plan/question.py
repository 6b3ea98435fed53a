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
import re
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.cluster.cluster import load_cluster
from fivefold.errors import UserError
from fivefold.layout.notation import Layout, parse, stated, with_global_batch
from fivefold.layout.words import join_or
from fivefold.model.config import ModelConfig
from fivefold.model.presets import are_dimensions, read_model
from fivefold.plan.job import ENGINES, PRODUCT_BYTES, Job
from fivefold.plan.search import Wishes

USUAL_SEQUENCE_LENGTH = 4096
USUAL_BATCH_TOKENS = 2**22
BATCH_TOLERANCE = 0.05


@dataclass(frozen=True)
class Options:
    """The options of `fivefold plan`, as typed. None: not given."""

    model: str | None = None  # preset, path, or dimensions
    cluster: str | None = None
    gpus: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None  # sequences
    global_batch_tokens: str | None = None
    precision: str | None = None
    engine: str = "megatron"
    mtp: bool = False
    offload: bool = False
    imbalance: float = 1.0
    layout: str | None = None
    from_megatron: str | None = None
    fix: str = ""
    forbid: str = ""
    top: int = 5
    objective: str = "time"
    tokens: str | None = None
    max_memory: str | None = None
    headroom: str | None = None
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """The options, read."""

    name: str  # of the model
    model: str | None  # as a plan file names it; None: only Megatron's arguments describe it
    cluster: str  # as a plan file names it
    job: Job
    wishes: Wishes
    layout: Layout | None  # the one that is asked about
    tokens: float | None  # of the whole training
    measured: tuple[tuple[Layout, float], ...]  # layouts and their step seconds
    notes: tuple[str, ...]


def ask(options: Options) -> Question:
    """Read the options. UserError for one that is missing or wrong."""
    notes: list[str] = []
    config = None if options.model is None else read_model(options.model)
    if options.from_megatron is not None:
        options, config = _from_megatron(options, config, notes)
    if config is None:
        raise UserError(
            "plan needs a model: a name such as llama-3.1-70b, the path of a config.json, or --dims"
        )
    if options.cluster is None:
        raise UserError("plan needs --cluster, such as dgx-h100; fivefold plan --list names them")
    gpus = _gpus(options)
    _check(options, config)
    notes += config.notes
    sequence_length = options.sequence_length or _usual_length(config, notes)
    layout = None if options.layout is None else parse(options.layout, gpus)
    global_batch = _global_batch(options, gpus, sequence_length, layout, notes)
    job = Job(
        config=config,
        cluster=load_cluster(options.cluster, gpus),
        sequence_length=sequence_length,
        global_batch=global_batch,
        precision=options.precision or "bf16",
        engine=replace(ENGINES[options.engine], host_optimizer=options.offload),
        mtp=options.mtp,
        imbalance=options.imbalance,
    )
    job.cluster.device.peak_flops(job.precision)  # refuses what the device has no unit for
    if layout is not None and options.layout is not None:
        layout = with_global_batch(layout, global_batch, stated(options.layout))
    return Question(
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


def _check(options: Options, config: ModelConfig) -> None:
    """Refuses values that no cluster is needed to refuse."""
    if options.engine not in ENGINES:
        raise UserError(f"engine {options.engine!r} is not known: it may be {join_or(ENGINES)}")
    if options.precision is not None and options.precision not in PRODUCT_BYTES:
        raise UserError(
            f"--precision {options.precision} cannot be planned: it may be {join_or(PRODUCT_BYTES)}"
        )
    if options.imbalance < 1:
        raise UserError(
            f"--imbalance {options.imbalance:g} is the busiest expert rank's tokens over the "
            "mean, which cannot be below 1"
        )
    if options.mtp and not config.mtp_layers:
        raise UserError(
            f"--mtp: {config.family} has no multi-token-prediction modules; leave it out"
        )
    if options.objective == "cost" and options.tokens is None:
        raise UserError("--objective cost needs --tokens, the length of the training, such as 15T")


def _wishes(options: Options) -> Wishes:
    return Wishes(
        fix=options.fix,
        forbid=options.forbid,
        top=options.top,
        objective=options.objective,
        max_memory_bytes=None if options.max_memory is None else memory_bytes(options.max_memory),
        headroom=None if options.headroom is None else share(options.headroom),
    )


def _from_megatron(
    options: Options, config: ModelConfig | None, notes: list[str]
) -> tuple[Options, ModelConfig]:
    """What a Megatron-LM argument line says, unless an option of ours says otherwise."""
    from fivefold.plan.megatron import read_megatron

    run = read_megatron(
        options.from_megatron or "", options.gpus, config.vocab_size if config else None
    )
    notes += run.notes
    for name in ("hidden_size", "num_layers", "num_heads") if config else ():
        ours, theirs = getattr(config, name), getattr(run.config, name)
        if ours != theirs:
            raise UserError(
                f"the model has {name} {ours} and the Megatron arguments say {theirs}: "
                "leave the model out, or give its own arguments"
            )
    return (
        replace(
            options,
            layout=options.layout or str(run.layout),
            gpus=options.gpus or run.layout.world_size,
            sequence_length=options.sequence_length or run.sequence_length,
            global_batch=options.global_batch
            or (None if options.global_batch_tokens else run.global_batch),
            precision=options.precision or run.precision,
            mtp=options.mtp or run.mtp,
        ),
        config or run.config,
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
    if options.gpus is not None:
        if options.gpus < 1:
            raise UserError(f"--gpus must be 1 or more, not {options.gpus}")
        return options.gpus
    if options.layout is not None and stated(options.layout) & {"dp", "edp"}:
        return parse(options.layout).world_size
    raise UserError("plan needs --gpus, the number of devices, such as 1024")


def _usual_length(config: ModelConfig, notes: list[str]) -> int:
    positions = config.learned_positions or USUAL_SEQUENCE_LENGTH
    length = min(USUAL_SEQUENCE_LENGTH, positions)
    notes.append(f"sequence length {length:,} tokens, since --seq is not given")
    return length


def _global_batch(
    options: Options, gpus: int, sequence_length: int, layout: Layout | None, notes: list[str]
) -> int:
    """Sequences of a step, by what is given: sequences, tokens, the layout's own, or nothing."""
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
BYTE_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
TIME_UNITS = {"s": 1.0, "ms": 1e-3}


def number(text: str, option: str) -> float:
    """`16M`, `15T` or `4e6`: a count of tokens."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]{1,2})?)([kKmMbBtT]?)", text.strip())
    value = float(parts[1]) * COUNT_UNITS[parts[2].upper()] if parts else 0.0
    if value < 1:
        raise UserError(f"{option} {text!r} is no number of tokens: write it like 16M or 15T")
    return value


def memory_bytes(text: str) -> float:
    """`70GB` or `64GiB`."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([MGT]i?B)", text.strip(), re.IGNORECASE)
    value = float(parts[1]) * BYTE_UNITS[parts[2].upper()] if parts else 0.0
    if value <= 0:
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
    if not equals or parts is None or float(parts[1]) <= 0:
        raise UserError(f'--measured {text!r} is no measured step: write it like "tp8 pp4=9.31s"')
    layout = parse(line, job.cluster.num_devices)
    layout = with_global_batch(layout, job.global_batch, stated(line))
    return layout, float(parts[1]) * TIME_UNITS[parts[2]]
