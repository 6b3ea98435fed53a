"""The run file: one YAML file that says what is trained, on what, how it is split and how long."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig, load_config

if TYPE_CHECKING:
    from fivefold.plan.planfile import PlanFile

Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean


class Section(BaseModel):
    """Keys are known, values have their own type ("3" and 3.0 are no int), nothing changes."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class Data(Section):
    """What is read. Without `files`: the source code of Python's standard library."""

    files: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None  # or globs
    text_field: str = "text"  # the field of a .jsonl file that holds the document
    tokenizer: str = "bytes"  # "bytes", "bpe:VOCABULARY" (trained on the data) or a tokenizer.json
    eos_token: str | None = None  # ends each document; None: the tokenizer's own
    sequence_length: PositiveInt  # tokens
    isolate_documents: bool = False  # attention does not cross a document's border
    cache: str | None = None  # folder of the packed token files


class Optimizer(Section):
    """AdamW."""

    lr: PositiveFloat  # the peak of the schedule
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: PositiveFloat | None = 1.0  # largest norm of the gradient; None: no clipping


class LrSchedule(Section):
    warmup_steps: NonNegativeInt = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_fraction: Fraction = 0.1  # of the peak, reached after the last step


class Checkpoint(Section):
    every: PositiveInt | None = None  # steps; None: no checkpoints
    keep: PositiveInt = 2  # newest checkpoints that are kept
    resume: bool = False  # go on from the newest checkpoint in `out`


class Run(Section):
    """A run file, checked. Paths are absolute: relative ones are meant from the file's folder."""

    model: str | dict[str, Any]  # path of a Hugging Face config.json, or its keys
    data: Data
    layout: str = "dp1"
    global_batch: PositiveInt  # sequences an optimizer step, whatever the layout
    steps: PositiveInt
    optimizer: Optimizer
    lr_schedule: LrSchedule = LrSchedule()
    precision: Literal["fp32", "bf16"] = "fp32"
    dropout: Decay = 0.0  # of what attention and MLP add to the hidden states
    seed: NonNegativeInt = 0
    checkpoint: Checkpoint = Checkpoint()
    log_every: PositiveInt = 1  # steps
    tensorboard: bool = False
    timeline: str | None = None  # file of what all ranks did and sent; None: it is not written
    timeline_steps: PositiveInt = 3  # steps in it, those after the first of the run
    cluster: str | None = None  # that the plan beside the run is for; None: this machine
    out: str | None = None  # folder of metrics and checkpoints; None: nothing is written
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: PositiveInt = 300  # a collective that waits longer than this has failed
    folder: Path = Field(exclude=True)  # of the run file; not a key of it

    @model_validator(mode="after")
    def _keys_agree(self) -> Run:
        if self.out is None:
            for key, wanted in (
                ("checkpoint.every", self.checkpoint.every is not None),
                ("checkpoint.resume", self.checkpoint.resume),
                ("tensorboard", self.tensorboard),
            ):
                if wanted:
                    raise ValueError(f"{key} needs a folder: set out")
        return self


def load_run(
    path: str | Path,
    layout: str | None = None,
    overrides: list[str] | None = None,
    steps: int | None = None,
    out: str | None = None,
) -> Run:
    """The run file at `path`, with `overrides` ("optimizer.lr=1e-3", values in YAML) applied.

    `layout`, `steps` and `out` come last; `layout` may be the path of a plan file, whose layout
    is taken. `out` is relative to the current folder, every path in the file or in an override to
    the file's folder. Raises UserError for a file that cannot be read and for any key or value
    that is not right.
    """
    name = str(path)
    values = _read_mapping(Path(path))
    _refuse_unknown_keys(values, Run, name)
    for override in overrides or []:
        _apply_override(values, override)
    plan = None if layout is None else _plan_at(layout)
    if layout is not None:
        values["layout"] = layout if plan is None else str(plan.parsed_layout())
    if steps is not None:
        values["steps"] = steps
    if out is not None:
        values["out"] = os.path.abspath(out)
    folder = Path(path).absolute().parent
    try:
        run = Run.model_validate({**values, "folder": folder})
    except ValidationError as error:
        raise UserError(f"{name}: {_sentence(error.errors())}") from None
    run = _with_absolute_paths(run)
    if plan is not None:
        _refuse_another_job(plan, run, str(layout))
    return run


def is_yaml(text: str) -> bool:
    """Does a text that may be something else name a YAML file?"""
    return text.endswith((".yaml", ".yml"))


# --- plan files -----------------------------------------------------------------------------


def _plan_at(text: str) -> PlanFile | None:
    """The plan file that a layout's text names; None for a line of layout notation."""
    if not is_yaml(text):
        return None
    from fivefold.plan.planfile import load

    return load(text)


def _refuse_another_job(plan: PlanFile, run: Run, path: str) -> None:
    """UserError where a layout was planned for something else than what the run trains."""
    if plan.parsed_layout().is_bidirectional:
        raise UserError(
            f"{path}: schedule={plan.parsed_layout().schedule} can be planned, not run: plan "
            f'with --fix "schedule=1f1b"'
        )
    for key, planned, trained in (
        ("global_batch", plan.global_batch, run.global_batch),
        ("sequence_length", plan.sequence_length, run.data.sequence_length),
        ("model", _shape(plan.read_model()), _shape(load_config(run.model))),
    ):
        if planned != trained:
            raise UserError(f"{path} is a plan for {key} {planned}, but the run has {trained}")


def _shape(config: ModelConfig) -> str:
    moe = "" if config.moe is None else f", {config.moe.num_experts} experts"
    return f"{config.family} of {config.num_layers} layers, width {config.hidden_size}{moe}"


# --- reading YAML ---------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML, with two repairs: a key given twice is an error, and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in the mantissa and a sign in the exponent; YAML 1.2 and people do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_mapping(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such run file{_similar_file(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: the run file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the run file is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: the run file is not valid YAML{_yaml_problem(error)}") from None
    if values is None:
        raise UserError(f"{path}: the run file is empty; it needs at least {_required(Run)}")
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: the run file must be a mapping of keys, not {_kind(values)};"
            f" it needs at least {_required(Run)}"
        )
    return values


def _yaml_problem(error: Exception) -> str:
    """Line and reason of what the YAML parser did not understand."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f", line {mark.line + 1}"
    if isinstance(error, RecursionError):
        return f"{where}: it is nested too deeply"
    reason = getattr(error, "problem", None) or str(error)
    return f"{where}: {' '.join(reason.split())}"


def _similar_file(path: Path) -> str:
    others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, others, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


# --- keys -----------------------------------------------------------------------------------


def _keys(section: type[Section]) -> dict[str, type[Section] | None]:
    """The keys of a section; those that hold a section of their own, with its class."""
    return {
        # A class of Section is told by its metaclass: Python 3.10 calls tuple[str] a class too.
        key: field.annotation if isinstance(field.annotation, type(Section)) else None
        for key, field in section.model_fields.items()
        if not field.exclude
    }


def _required(section: type[Section]) -> str:
    fields = section.model_fields
    return ", ".join(key for key in _keys(section) if fields[key].is_required())


def _refuse_unknown_keys(
    values: dict, section: type[Section], source: str, prefix: str = ""
) -> None:
    keys = _keys(section)
    for key, value in values.items():
        if key not in keys:
            raise UserError(
                f"{source}: unknown key {prefix}{key}; {_nearest(str(key), keys, prefix)}"
            )
        inner = keys[key]
        if inner is not None and isinstance(value, dict):
            _refuse_unknown_keys(value, inner, source, f"{prefix}{key}.")


def _nearest(key: str, keys: dict[str, Any], prefix: str) -> str:
    """What the user may have meant: a key of this section, the same key of another, or any."""
    near = difflib.get_close_matches(key, keys, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    for place, inner in [("", Run), *_keys(Run).items()]:
        dot = "." if place else ""
        if inner is not None and key in _keys(inner):
            return f"did you mean {place}{dot}{key}?"
    return f"known here: {', '.join(keys)}"


def _apply_override(values: dict, override: str) -> None:
    """Puts "optimizer.lr=1e-3" into `values`, making the section if the file has none."""
    source = f"--set {override}"
    dotted, equals, text = override.partition("=")
    path = dotted.strip().split(".")
    if not equals or not all(path):
        raise UserError(f"{source}: write it as key=value, such as optimizer.lr=1e-3")
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: the value is not valid YAML{_yaml_problem(error)}") from None

    nested = value
    for key in reversed(path):
        nested = {key: nested}
    _refuse_unknown_keys(nested, Run, source)

    section = values
    for depth, key in enumerate(path[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise UserError(
                f"{source}: {'.'.join(path[:depth])} is {_show(section)} in the run file,"
                f" which has no key {path[depth]} to set"
            )
    section[path[-1]] = value


# --- values ---------------------------------------------------------------------------------

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} or fewer",
}
"""pydantic's error types, in the words of one sentence; the braces are its error context."""


def _sentence(errors: list[ErrorDetails]) -> str:
    """The first error in one sentence. A value that may have one of two types and has neither
    gives two errors at the same key: those are joined."""
    first = errors[0]
    key = _dotted(first["loc"])
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "value_error":  # from a validator of our own
        return first["msg"].removeprefix("Value error, ")
    expected = [
        _EXPECTED[error["type"]].format(**error.get("ctx", {}))
        if error["type"] in _EXPECTED
        else error["msg"]
        for error in errors
        if _dotted(error["loc"]) == key
    ]
    return f"{key} must be {' or '.join(expected)}, and is {_show(first['input'])}"


def _dotted(location: tuple[int | str, ...]) -> str:
    """("optimizer", "betas", 0) -> "optimizer.betas.0". pydantic ends the location of a union
    with the type it tried, which is no key."""
    keys: dict[str, type[Section] | None] = _keys(Run)
    parts = []
    for part in location:
        if isinstance(part, str):
            if part not in keys:
                break
            inner = keys[part]
            keys = {} if inner is None else _keys(inner)
        parts.append(str(part))
    return ".".join(parts)


def _show(value: Any) -> str:
    """A value as the file has it, short."""
    if isinstance(value, dict | list | set):
        return _kind(value)
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | set):
        return f"a list of {len(value)}"
    return _show(value)


# --- paths ----------------------------------------------------------------------------------


def _with_absolute_paths(run: Run) -> Run:
    def absolute(path: str) -> str:
        return os.path.join(run.folder, os.path.expanduser(path))

    def absolute_or_none(path: str | None) -> str | None:
        return None if path is None else absolute(path)

    data, tokenizer, cluster = run.data, run.data.tokenizer, run.cluster
    names_a_file = tokenizer != "bytes" and not tokenizer.startswith("bpe:")
    return run.model_copy(
        update={
            "model": absolute(run.model) if isinstance(run.model, str) else run.model,
            "out": absolute_or_none(run.out),
            "timeline": absolute_or_none(run.timeline),
            "cluster": absolute(cluster) if cluster and is_yaml(cluster) else cluster,
            "data": data.model_copy(
                update={
                    "files": data.files and tuple(absolute(path) for path in data.files),
                    "tokenizer": absolute(tokenizer) if names_a_file else tokenizer,
                    "cache": absolute_or_none(data.cache),
                }
            ),
        }
    )
