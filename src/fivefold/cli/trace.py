"""`fivefold trace`."""

from typing import Annotated

import typer

from fivefold.cli.options import AsJson, SequenceLength
from fivefold.cli.output import console, print_json


def trace(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset, e.g. llama-3.1-70b, a config.json, its folder, or a plan file.",
        ),
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="TEXT",
            help='The layout, e.g. "tp8 sp pp16 dp128". A plan file has its own.',
            rich_help_panel="What to trace",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="N",
            help="Global rank to trace.  [default: one rank of each different stage]",
            rich_help_panel="What to trace",
        ),
    ] = None,
    sequence_length: SequenceLength = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="NAME",
            help="Matmul precision: bf16 or fp32.  [default: bf16]",
            rich_help_panel="Batch and precision",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one rank of any world with shapes alone; compare with the plan.

    Runs the training program without computing, communicating or allocating. Reports the messages
    and the peak memory of a step, compared with the plan. The exit code is 0 if they agree, else 1.

    \b
    Examples:
      fivefold trace llama-3.1-405b --layout "tp8 sp pp16 dp128 zero1 ga16" --seq 8K
      fivefold trace llama-3.1-70b --layout "dp512 zero3 ga2" --seq 8K --rank 511 --json
      fivefold trace plan.yaml
    """
    from fivefold.verify.traceable import read

    what = read(model, layout, sequence_length, precision)

    from fivefold.verify.trace import trace_report

    report = trace_report(what.config, what.layout, what.sequence_length, what.precision, rank)
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(0 if report["ok"] else 1)


def _print(report: dict) -> None:
    from fivefold.report.tables import ledger_tables, trace_memory_table, trace_notes

    out = console()
    rows = [
        {"pp_rank": each["pp_ranks"][0], **row}
        for each in report["ranks"]
        for row in each["ledger"]
    ]
    for table in ledger_tables(rows):
        out.print(table, "")
    out.print(trace_memory_table(report["ranks"]), "")
    out.print(*trace_notes(report), sep="\n")
