"""A run file with the layout of a plan file, which must be a plan of that very run."""

from __future__ import annotations

from fivefold.errors import UserError
from fivefold.files import is_yaml
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.plan import planfile
from fivefold.plan.planfile import PlanFile
from fivefold.train.runfile import Run, load_run


def load_planned_run(
    path: str,
    layout: str | None = None,
    overrides: list[str] | None = None,
    steps: int | None = None,
    out: str | None = None,
) -> Run:
    """`load_run`, where `layout` may be the path of a plan file. UserError, too, for a plan of
    another model, sequence length or global batch."""
    if layout is None or not is_yaml(layout):
        return load_run(path, layout, overrides, steps, out)
    plan = planfile.load(layout)
    run = load_run(path, str(plan.parsed_layout()), overrides, steps, out)
    _reject_another_job(plan, run, layout)
    return run


def _reject_another_job(plan: PlanFile, run: Run, path: str) -> None:
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
