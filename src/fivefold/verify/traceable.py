"""What `fivefold trace` is asked about: a model and its layout, or a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UserError
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.presets import read_model
from fivefold.parallel.pipeline.table_file import with_table
from fivefold.plan import planfile
from fivefold.plan.units import sequence_tokens

PRECISIONS = ("bf16", "fp32")
USUAL_LENGTH = 4096


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
    if Path(model).suffix in (".yaml", ".yml"):
        plan = planfile.load(model)
        if plan.mtp:
            raise UserError(f"{model} trains multi-token prediction, which cannot be run here")
        config, length, usual = plan.read_model(), plan.sequence_length, plan.precision
        split = with_table(parse(layout)) if layout is not None else plan.parsed_layout()
    elif layout is not None:
        config, length, usual = read_model(model), USUAL_LENGTH, "bf16"
        split = with_table(parse(layout))
    else:
        raise UserError('trace needs --layout, such as "tp8 sp pp16 dp128", or a plan file')
    if sequence_length is not None:
        length = sequence_tokens(sequence_length)
    precision = precision or usual
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} cannot be trained here: bf16 or fp32 can")
    return Traceable(config, split, length, precision)
