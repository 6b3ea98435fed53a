"""The plan file: a small YAML that keeps one chosen layout and what it was chosen for.

`fivefold plan --save plan.yaml` writes it, `fivefold train --layout plan.yaml` takes its layout
and `fivefold export plan.yaml` turns it into another program's arguments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import yaml
from pydantic import PositiveFloat, PositiveInt

from fivefold.errors import UserError
from fivefold.files import atomic_write, read_yaml
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.presets import read_model
from fivefold.parallel.pipeline.table_file import with_table
from fivefold.schema import Section, validate

Precision = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


class Predicted(Section):
    """What the planner expected of the layout when it wrote the file."""

    step_time_s: PositiveFloat | None = None
    tokens_per_s_per_device: PositiveFloat | None = None
    mfu: PositiveFloat | None = None  # fraction of the device's peak
    peak_memory_bytes: PositiveFloat | None = None  # of the fullest device


class PlanFile(Section):
    """A plan file, checked. A model's relative path is relative to the file's folder."""

    layout: str  # one line of layout notation
    model: str | dict[str, object]  # preset, path, dimensions ("hidden=...,"), or a config's keys
    cluster: str  # name in the catalogue, path of a cluster file, or a line of numbers
    gpus: PositiveInt
    gpus_per_node: PositiveInt = 8  # for the commands that start processes
    sequence_length: PositiveInt  # tokens
    global_batch: PositiveInt  # sequences per optimizer step
    precision: Precision = "bf16"  # of matrix products
    mtp: bool = False  # also train the multi-token-prediction modules
    predicted: Predicted | None = None

    def parsed_layout(self) -> Layout:
        """The layout, checked against the number of GPUs and the global batch (UserError)."""
        layout = with_table(parse(self.layout, self.gpus))
        if layout.global_batch != self.global_batch:
            raise UserError(
                f"the layout has a global batch of dp {layout.dp} x mb {layout.micro_batch} x "
                f"ga {layout.accumulation} = {layout.global_batch} sequences, but global_batch is "
                f"{self.global_batch}: change one of them"
            )
        return layout

    def read_model(self) -> ModelConfig:
        """The model's configuration (UserError where there is none)."""
        return read_model(self.model)


def save(plan: PlanFile, path: str | Path) -> None:
    """Write the file, whole or not at all. UserError where it cannot be written."""
    path = Path(path)
    values = plan.model_dump(exclude_none=True)
    if isinstance(plan.model, str) and Path(plan.model).exists():
        values["model"] = os.path.relpath(plan.model, path.parent)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
    try:
        atomic_write(path, text)
    except OSError as error:
        raise UserError(f"the plan cannot be written to {path}: {error.strerror}") from error


def refuse_unwritable(path: str | Path) -> None:
    """UserError where `save` could not write, before anybody waits for a search."""
    folder = Path(path).parent
    reason = None
    if not Path(path).name or os.path.isdir(path):
        reason = "it is a folder"
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        reason = f"the folder {folder} cannot be written"
    if reason:
        raise UserError(f"the plan cannot be written to {path}: {reason}")


def load(path: str | Path) -> PlanFile:
    """Read and check a plan file; UserError names the first thing that is wrong in it."""
    path = Path(path)
    values = read_yaml(path, "plan file")
    if not isinstance(values, dict):
        raise UserError(
            f"the plan file {path} holds no keys; fivefold plan --save {path.name} writes one"
        )
    plan = validate(PlanFile, values, str(path))
    try:
        plan.parsed_layout()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    model = plan.model
    if isinstance(model, str) and (path.parent / model).exists():
        plan = plan.model_copy(update={"model": str(path.parent / model)})
    return plan
