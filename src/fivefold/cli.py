"""The command line. A command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fivefold import __version__
from fivefold.errors import UserError

TRAIN_EXTRA = ("torch", "tokenizers", "safetensors")
"""What `fivefold[train]` brings, and the planner half does without."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="""Run and prove a five-way split of large-model training.

    The splits are data (DP, ZeRO), pipeline (PP), tensor (TP), sequence (SP: megatron, ulysses,
    ring) and expert parallelism (EP). A layout is one line of text, such as
    "tp2 sp pp2 dp2 ep2", and means the same in every command and file.

    \b
    Examples:
      fivefold layout "tp4 sp pp2 dp8 ep4"
      fivefold train examples/first-run.yaml
      fivefold check examples/first-run.yaml --steps 2
    """,
)

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run file.")]
LayoutOption = Annotated[
    str | None,
    typer.Option("--layout", metavar="TEXT", help='Replaces the layout, such as "tp2 dp2".'),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replaces a value of the run file, such as optimizer.lr=1e-3, as if it stood there;"
        " may be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """The options of fivefold itself, which come before the command."""


@app.command()
def train(
    run_file: RunFile,
    layout: LayoutOption = None,
    overrides: SetOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Replaces the number of steps.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Replaces the folder that is written to."),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--no-resume", help="Go on from the newest checkpoint, or do not."),
    ] = None,
) -> None:
    """Train the model of a run file, split as its layout says.

    Starts the local processes itself; under torchrun it joins those that torchrun started.

    \b
    Examples:
      fivefold train examples/first-run.yaml
      fivefold train examples/first-run.yaml --layout "tp2 pp2" --steps 20
      fivefold train examples/dp.yaml --set optimizer.lr=3e-4 --set data.sequence_length=128
      torchrun --nproc-per-node 8 -m fivefold train examples/first-run.yaml
    """
    from fivefold.train.runfile import load_run

    if resume is not None:
        overrides = [*(overrides or []), f"checkpoint.resume={str(resume).lower()}"]
    run = load_run(run_file, layout, overrides, steps, out)

    from fivefold.train.loop import train as train_run

    train_run(run)


@app.command()
def check(
    run_file: RunFile,
    layout: LayoutOption = None,
    overrides: SetOption = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps that are compared.")
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """Prove a layout: compare it with one process and with its plan.

    Runs a few steps in the layout and in one process and compares loss, gradients and weights;
    and every byte that was sent with what arithmetic predicts. The exit code is 0 when all
    agree and 1 when anything does not.

    \b
    Examples:
      fivefold check examples/first-run.yaml --steps 2
      fivefold check examples/dp.yaml --layout "tp2 sp" --json
    """
    from fivefold.train.runfile import load_run

    run = load_run(run_file, layout, overrides)

    from fivefold.train.check import check as check_run

    report = check_run(run, steps).as_dict()
    if as_json:
        _print_json(report)
    else:
        from rich.console import Console

        from fivefold.report.tables import (
            check_report_notes,
            check_report_table,
            ledger_tables,
            memory_table,
        )

        console = Console(highlight=False)
        console.print(check_report_table(report), "")
        for table in ledger_tables(report["ledger"]):
            console.print(table, "")
        console.print(memory_table(report["memory"]), "")
        console.print(*check_report_notes(report), sep="\n")
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def layout(
    text: Annotated[str, typer.Argument(metavar="TEXT", help='Such as "tp2 sp pp2 dp2 ep2".')],
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="Devices; dp may then be left out of the text."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a layout line means, and which ranks it groups.

    \b
    Examples:
      fivefold layout "tp4 sp pp2 dp8 ep4"
      fivefold layout "tp2 ring2 zero3" --gpus 16 --json
    """
    from fivefold.layout.legality import check as check_layout
    from fivefold.layout.notation import parse
    from fivefold.layout.ranks import groups
    from fivefold.report.tables import AXES, LARGEST_LISTED, degrees, layout_table

    layout = parse(text, gpus)
    check_layout(layout, world_size=gpus)
    if as_json:
        listed = layout.world_size <= LARGEST_LISTED
        _print_json(
            {
                "layout": str(layout),
                "meaning": layout.describe(),
                "world_size": layout.world_size,
                "global_batch": layout.global_batch,
                "degrees": degrees(layout),
                "groups": {axis: groups(layout, axis).tolist() for axis in AXES if listed},
            }
        )
        return
    from rich.console import Console

    console = Console()
    print(layout)
    print(layout.describe())
    print(
        f"a step: dp {layout.dp} x mb {layout.micro_batch} x ga {layout.accumulation}"
        f" = {layout.global_batch} sequences"
    )
    if layout.world_size > 1:
        console.print()
        console.print(layout_table(layout))


def _print_json(data: dict) -> None:
    import json

    print(json.dumps(data, indent=2))


INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    0: done; 1: a worker failed, or `check` found a difference; 2: bad input, told in one
    sentence; 130: interrupted. With FIVEFOLD_TRACEBACK=1 a failed worker's traceback is shown.
    """
    code = 0
    try:
        app(argv, prog_name="fivefold")
    except SystemExit as done:  # typer ends every command with it, usage errors too
        code = done.code if isinstance(done.code, int) else 1
        if code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
    except UserError as error:
        code = _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in TRAIN_EXTRA:
            raise
        code = _fail(f"training needs {error.name}: pip install 'fivefold[train]'", 2)
    except Exception as error:
        from fivefold.train.failures import WorkerFailure

        if not isinstance(error, WorkerFailure):
            raise
        if os.environ.get("FIVEFOLD_TRACEBACK") == "1":
            print(error.traceback, file=sys.stderr)
        code = _fail(str(error), 1)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as in `fivefold ... | head`
        # What is left in the buffer goes nowhere, or the interpreter would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
