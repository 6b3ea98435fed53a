"""`fivefold check`."""

from typing import Annotated

import typer

from fivefold.cli.options import AsJson, Overrides, RunFile, RunLayout
from fivefold.cli.output import console, print_json


def check(
    run_file: RunFile,
    layout: RunLayout = None,
    overrides: Overrides = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Optimizer steps to compare.",
            rich_help_panel="What to run",
        ),
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Prove a layout: compare it with one process and with its plan.

    Runs a few steps in the layout and in one process. Compares loss, gradients and weights, and
    the bytes sent with the bytes predicted. The exit code is 0 if all agree, else 1.

    \b
    Examples:
      fivefold check examples/first-run.yaml --steps 2
      fivefold check examples/dp.yaml --layout "tp2 sp" --json
    """
    from fivefold.verify.planned_run import load_planned_run

    run = load_planned_run(run_file, layout, overrides)

    from fivefold.verify.check import check as check_run

    report = check_run(run, steps).as_dict()
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(0 if report["ok"] else 1)


def _print(report: dict) -> None:
    from fivefold.report.tables import (
        check_report_notes,
        check_report_table,
        ledger_tables,
        memory_table,
    )

    out = console()
    out.print(check_report_table(report), "")
    for table in ledger_tables(report["ledger"]):
        out.print(table, "")
    out.print(memory_table(report["memory"]), "")
    out.print(*check_report_notes(report), sep="\n")
