"""What every exporter is given and gives back, and the shell text that they share."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.stages import split_layers
from fivefold.model.config import ModelConfig
from fivefold.plan.planfile import PlanFile


@dataclass
class Export:
    """Files by name, and a sentence for each thing that the engine has no counterpart of."""

    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Planned:
    """A plan with its model read and its layout parsed."""

    plan: PlanFile
    config: ModelConfig
    layout: Layout

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each virtual stage, in model order."""
        return self.layout.layers or split_layers(self.config.num_layers, self.layout.stages)

    @property
    def has_even_stages(self) -> bool:
        return len(set(self.layers)) == 1

    @property
    def mtp_layers(self) -> int:
        return self.config.mtp_layers if self.plan.mtp else 0

    @property
    def processes_per_node(self) -> int:
        return min(self.plan.gpus, self.plan.gpus_per_node)

    @property
    def nodes(self) -> int:
        """Machines that the plan fills; UserError where the last one would be partly idle."""
        gpus, a_node = self.plan.gpus, self.processes_per_node
        if gpus % a_node:
            raise UserError(
                f"{gpus} GPUs do not fill nodes of {a_node}: set gpus_per_node in the plan to a "
                f"number that divides {gpus}"
            )
        return gpus // a_node

    def has_rank_order(self, order: tuple[str, ...]) -> bool:
        """Does `order` place the ranks as the layout does? Axes of degree 1 do not matter."""
        return self._nesting(order) == self._nesting(self.layout.order)

    def _nesting(self, order: tuple[str, ...]) -> tuple[list[str], bool]:
        """The dense axes, innermost first, and whether ep lies inside dp (all that ep decides)."""
        dense = [axis for axis in order if axis != "ep" and getattr(self.layout, axis) > 1]
        return dense, self.layout.ep == 1 or order.index("ep") < order.index("dp")


def comment(planned: Planned, checked_against: str, notes: Iterable[str]) -> str:
    """The first lines of a script: the layout, the engine's version, what does not carry over."""
    lines = [
        f"fivefold layout: {planned.layout}",
        f"Checked against {checked_against}.",
        *(f"Note: {note}" for note in notes),
    ]
    # A line break inside a name would end the comment.
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def command(words: Iterable[list[str]], ending: str = '"$@"') -> str:
    """One shell command, a group of words per line, each quoted; `ending`, as it is, passes on the
    script's own arguments, which come last so that they count."""
    return " \\\n    ".join([*map(shlex.join, words), ending]) + "\n"


def script(
    heading: str, planned: Planned, program: str, setup: str = "", directives: str = ""
) -> str:
    """A shell script that starts `program` under torchrun, after the lines of `setup`."""
    lines = f"#!/usr/bin/env bash\n{directives}{heading}set -euo pipefail\n{setup}"
    return f"{lines}{_torchrun(planned)}{program}"


def _torchrun(planned: Planned) -> str:
    """torchrun's own words; the script's caller may set HEAD_NODE and PORT."""
    start = f"torchrun --nnodes {planned.nodes} --nproc-per-node {planned.processes_per_node}"
    if planned.nodes == 1:
        return f"{start} --standalone \\\n    "
    return (
        f"{start} --rdzv-backend c10d --rdzv-id fivefold \\\n"
        '    --rdzv-endpoint "${HEAD_NODE:?name of the first node}:${PORT:-29500}" \\\n    '
    )
