"""`fivefold export`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.output import note
from fivefold.errors import UserError
from fivefold.files import atomic_write


def export(
    plan_file: Annotated[
        str,
        typer.Argument(metavar="PLAN.yaml", help="A plan file written by `fivefold plan --save`."),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ENGINE",
            help="Framework or launcher: megatron, torchtitan, deepspeed, nemo, torchrun or slurm.",
            rich_help_panel="Output",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder to write the files to, e.g. job.  [default: print them]",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Convert a plan to another framework's configuration.

    Options that the framework does not support are listed on stderr.

    \b
    Examples:
      fivefold export plan.yaml --to megatron
      fivefold export plan.yaml --to slurm --out job
    """
    from fivefold.interop import export as export_plan
    from fivefold.plan import planfile

    exported = export_plan(planfile.load(plan_file), to)
    if out is None:
        for name, text in exported.files.items():
            if len(exported.files) > 1:
                print(f"# {name}")
            print(text, end="" if text.endswith("\n") else "\n")
    else:
        for path in _write(out, exported.files):
            print(path)
    for text in exported.notes:
        note(f"note: {text}")


def _write(folder: str, files: dict[str, str]) -> list[Path]:
    """Write the files and return their paths."""
    paths = [Path(folder, name) for name in files]
    try:
        os.makedirs(folder, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            atomic_write(path, text)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}") from None
    return paths
