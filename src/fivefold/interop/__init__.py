"""Converts a plan to the configuration of another framework, and Megatron-LM's arguments to a plan.

Each framework has a module that names the release that its options were checked against. Options
that a framework does not support are listed in notes, never dropped.
"""

from __future__ import annotations

from fivefold.errors import UserError
from fivefold.interop import deepspeed, launch, megatron, nemo, torchtitan
from fivefold.interop.planned import Export, Planned
from fivefold.plan.planfile import PlanFile
from fivefold.text import join_or

EXPORTERS = {
    "megatron": megatron.export,
    "torchtitan": torchtitan.export,
    "deepspeed": deepspeed.export,
    "nemo": nemo.export,
    "torchrun": launch.export_torchrun,
    "slurm": launch.export_slurm,
}


def export(plan: PlanFile, to: str) -> Export:
    """The files that engine `to` takes for a plan; see EXPORTERS for the names.

    UserError for an engine that is not known and for a plan that contradicts itself.
    """
    if to not in EXPORTERS:
        raise UserError(f"there is no export to {to!r}: it may be {join_or(EXPORTERS)}")
    return EXPORTERS[to](Planned(plan, plan.read_model(), plan.parsed_layout()))


__all__ = ["EXPORTERS", "Export", "export"]
