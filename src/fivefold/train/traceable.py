"""What `fivefold trace` is asked about: a model and its layout, or a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UserError
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import ModelConfig
from fivefold.model.presets import read_model
from fivefold.plan import planfile
from fivefold.plan.question import sequence_tokens

PRECISIONS = ("bf16", "fp32")
USUAL_LENGTH = "4096"


@dataclass(frozen=True)
class Traceable:
    config: ModelConfig
    layout: Layout
    sequence_length: int
    precision: str


def read(
    model: str, layout: str | None, sequence_length: str | None, precision: str | None
) -> Traceable:
    """The options as typed; what a plan file says, they may replace. UserError for a wrong one."""
    plan = planfile.load(model) if Path(model).suffix in (".yaml", ".yml") else None
    if layout is None and plan is None:
        raise UserError('trace needs --layout, such as "tp8 sp pp16 dp128", or a plan file')
    usual = USUAL_LENGTH if plan is None else str(plan.sequence_length)
    length = sequence_tokens(sequence_length or usual)
    precision = precision or ("bf16" if plan is None else plan.precision)
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} cannot be trained here: bf16 or fp32 can")
    if plan is not None and plan.mtp:
        raise UserError("the plan trains multi-token-prediction modules, which cannot be run here")
    return Traceable(
        config=read_model(model) if plan is None else plan.read_model(),
        layout=parse(layout) if layout is not None or plan is None else plan.parsed_layout(),
        sequence_length=length,
        precision=precision,
    )
