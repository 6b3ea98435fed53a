"""The run file: one YAML file that says what is trained, on what, how it is split and how long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from fivefold.errors import UserError
from fivefold.files import is_yaml, parse_yaml, read_yaml
from fivefold.schema import Section, kind, refuse_unknown_keys, required, validate

Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean


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
    resume: bool = False  # from the newest checkpoint in `out`


class Run(Section):
    """A run file, checked. Paths are absolute: relative ones are relative to the file's folder."""

    model: str | dict[str, Any]  # path of a Hugging Face config.json, or its keys
    data: Data
    layout: str = "dp1"
    global_batch: PositiveInt  # sequences per optimizer step, whatever the layout
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
    cluster: str | None = None  # for which the run is predicted; None: this machine
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

    `layout`, `steps` and `out` come last. `out` is relative to the current folder, every path in
    the file or in an override to the file's folder. Raises UserError for a file that cannot be read
    and for any key or value that is not right.
    """
    name = str(path)
    values = _read_mapping(Path(path))
    refuse_unknown_keys(values, Run, name)
    for override in overrides or []:
        _apply_override(values, override)
    if layout is not None:
        values["layout"] = layout
    if steps is not None:
        values["steps"] = steps
    if out is not None:
        values["out"] = os.path.abspath(out)
    folder = Path(path).absolute().parent
    return _with_absolute_paths(validate(Run, values, name, folder=folder))


# --- reading ----------------------------------------------------------------------------------


def _read_mapping(path: Path) -> dict:
    values = read_yaml(path, "run file")
    if values is None:
        raise UserError(f"{path}: the run file is empty; it needs at least {required(Run)}")
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: the run file must be a mapping of keys, not {kind(values)};"
            f" it needs at least {required(Run)}"
        )
    return values


def _apply_override(values: dict, override: str) -> None:
    """Puts "optimizer.lr=1e-3" into `values`, making the section if the file has none."""
    source = f"--set {override}"
    dotted, equals, text = override.partition("=")
    path = dotted.strip().split(".")
    if not equals or not all(path):
        raise UserError(f"{source}: write it as key=value, such as optimizer.lr=1e-3")
    value = parse_yaml(text, source, "value")

    nested = value
    for key in reversed(path):
        nested = {key: nested}
    refuse_unknown_keys(nested, Run, source)

    section = values
    for depth, key in enumerate(path[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise UserError(
                f"{source}: {'.'.join(path[:depth])} is {kind(section)} in the run file,"
                f" which has no key {path[depth]} to set"
            )
    section[path[-1]] = value


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
