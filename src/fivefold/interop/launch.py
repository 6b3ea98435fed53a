"""A plan as commands that train it with fivefold itself, under torchrun or Slurm."""

from __future__ import annotations

from fivefold import __version__
from fivefold.interop.planned import Export, Planned, command, comment, script

CHECKED_AGAINST = f"fivefold {__version__} and torchrun of PyTorch 2.13"

PRECISIONS = ("fp32", "bf16")
"""What fivefold trains in."""


def export_torchrun(planned: Planned) -> Export:
    """A script that starts `fivefold train` with torchrun on a node."""
    notes = _notes(planned)
    usage = "Run on every node: ./torchrun.sh RUN.yaml, with HEAD_NODE set where there are several."
    heading = f"{comment(planned, CHECKED_AGAINST, notes)}# {usage}\n"
    return Export({"torchrun.sh": script(heading, planned, _train(planned))}, notes)


def export_slurm(planned: Planned) -> Export:
    """A batch job that starts `fivefold train` on all nodes."""
    notes = _notes(planned)
    directives = {
        "job-name": "fivefold",
        "nodes": planned.nodes,
        "ntasks-per-node": 1,  # torchrun, which starts a process for each GPU
        "gpus-per-node": planned.processes_per_node,
        "exclusive": None,
    }
    head = "".join(
        f"#SBATCH --{name}\n" if value is None else f"#SBATCH --{name}={value}\n"
        for name, value in directives.items()
    )
    node = (
        'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport HEAD_NODE\n'
    )
    # sbatch reads its directives only before the first command.
    usage = "# Submit with: sbatch slurm.sh RUN.yaml\n"
    heading = f"{comment(planned, CHECKED_AGAINST, notes)}{usage}"
    text = script(heading, planned, _train(planned), f"{node}srun ", head)
    return Export({"slurm.sh": text}, notes)


def _train(planned: Planned) -> str:
    """The words after torchrun's own; $1 is the run file, with data, optimizer and steps."""
    plan = planned.plan
    settings: dict[str, int | str] = {
        "data.sequence_length": plan.sequence_length,
        "global_batch": plan.global_batch,
    }
    if plan.precision in PRECISIONS:
        settings["precision"] = plan.precision
    words = [["--layout", str(planned.layout)]]
    words += [["--set", f"{key}={value}"] for key, value in settings.items()]
    return '-m fivefold train "${1:?the run file}" \\\n    ' + command(words, '"${@:2}"')


def _notes(planned: Planned) -> list[str]:
    plan, layout = planned.plan, planned.layout
    candidates = {
        f"fivefold trains in {' or '.join(PRECISIONS)}, not in {plan.precision}: the run file's "
        "precision is kept": plan.precision not in PRECISIONS,
        f"fivefold does not run schedule={layout.schedule}": layout.is_bidirectional,
        "fivefold does not train multi-token prediction yet": planned.mtp_layers > 0,
        f"fivefold cannot train this model yet ({', '.join(planned.config.untrainable)})": bool(
            planned.config.untrainable
        ),
    }
    notes = [note for note, applies in candidates.items() if applies]
    notes.append(
        "model, data, optimizer and steps are the run file's, and its model must be the plan's"
    )
    return notes
