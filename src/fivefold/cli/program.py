"""The program: its commands, and what its exit codes mean."""

import os
import sys
from typing import Annotated

import typer

from fivefold import __version__
from fivefold.cli.calibrate import calibrate
from fivefold.cli.check import check
from fivefold.cli.export import export
from fivefold.cli.help import GroupedCommands, command
from fivefold.cli.layout import layout
from fivefold.cli.output import note
from fivefold.cli.plan import PlanOptions, plan
from fivefold.cli.schedule import ScheduleOptions, schedule
from fivefold.cli.trace import trace
from fivefold.cli.train import TrainOptions, train
from fivefold.errors import UserError
from fivefold.malloc_env import reexec_with_malloc_settings

TRAIN_EXTRA = ("torch", "tokenizers", "safetensors")
"""What `fivefold[train]` installs and planning does not need."""

RUNS = {"train", "check", "calibrate", "--here"}
"""The words on a command line that make it run, or measure, training."""

INTERRUPTED = 130

app = typer.Typer(
    cls=GroupedCommands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="""Choose, run and prove a five-way split of large-model training.

    The five splits are data (DP, with ZeRO), pipeline (PP), tensor (TP), context (CP: ulysses,
    ring) and expert parallelism (EP). A layout is one line of text, e.g. "tp2 sp pp2 dp2 ep2".
    It means the same in every command and file.

    \b
    Examples:
      fivefold plan llama-3.1-70b --cluster dgx-h100 --gpus 256
      fivefold layout "tp4 sp pp2 dp8 ep4"
      fivefold train examples/first-run.yaml
      fivefold check examples/first-run.yaml --steps 2
      fivefold trace llama-3.1-405b --layout "tp8 sp pp16 dp128 zero1 ga16" --seq 8K
    """,
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """The options of the program itself, which come before the command."""


command(app, "Choose a layout", PlanOptions)(plan)
command(app, "Choose a layout")(export)
command(app, "Choose a layout")(calibrate)
command(app, "Run and prove a layout", TrainOptions)(train)
command(app, "Run and prove a layout")(check)
command(app, "Run and prove a layout")(trace)
command(app, "Look something up")(layout)
command(app, "Look something up", ScheduleOptions)(schedule)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success. 1: a worker failed, `check` or `trace` found a difference, or nothing fits. 2: bad
    input, explained in one sentence. 130: interrupted. With FIVEFOLD_TRACEBACK=1 the traceback of
    a failed worker is printed too.
    """
    if argv is None and RUNS & set(sys.argv):
        reexec_with_malloc_settings()
    code = 0
    try:
        app(argv, prog_name="fivefold")
    except SystemExit as done:  # typer ends every command with it, usage errors too
        code = done.code if isinstance(done.code, int) else 1
        if code == INTERRUPTED:
            note("interrupted")
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
            note(error.traceback)
        code = _fail(str(error), 1)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as in `fivefold ... | head`
        # What is left in the buffer goes nowhere. Otherwise the interpreter complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


def _fail(message: str, code: int) -> int:
    note(f"error: {message}")
    return code
