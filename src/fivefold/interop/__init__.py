"""A plan in the words of other training programs.

Each engine has a module that says which of its releases the options were checked against. What
an engine has no counterpart of is said in a note, never dropped.
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
