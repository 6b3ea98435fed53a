"""`fivefold schedule`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import AsJson
from fivefold.cli.output import console, print_json, write_file
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.parallel.pipeline.simulation import Simulation

SHAPE, TIMES, OUTPUT = "Shape", "Times, in any unit", "Output"


@dataclass(frozen=True)
class ScheduleOptions:
    """The options as typed."""

    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A schedule, e.g. zb-v, or a custom table: FILE.csv."),
    ] = None
    pp: Annotated[
        int | None,
        typer.Option(
            "--pp",
            metavar="N",
            min=1,
            help="Pipeline ranks.  [default: 4]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            metavar="N",
            min=1,
            help="Micro-batches per step.  [default: 8]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    vpp: Annotated[
        int | None,
        typer.Option(
            "--vpp",
            metavar="N",
            min=1,
            help="Virtual stages per rank.  [default: the fewest the schedule allows]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    forward_s: Annotated[
        float,
        typer.Option(
            "--forward-s",
            metavar="S",
            min=0,
            help="Duration of a stage's forward pass.",
            rich_help_panel=TIMES,
        ),
    ] = 1.0
    backward_s: Annotated[
        float,
        typer.Option(
            "--backward-s",
            metavar="S",
            min=0,
            help="Duration of a stage's full backward pass.",
            rich_help_panel=TIMES,
        ),
    ] = 2.0
    weight_s: Annotated[
        float | None,
        typer.Option(
            "--weight-s",
            metavar="S",
            min=0,
            help="Part of the backward pass that computes weight gradients.  [default: half]",
            rich_help_panel=TIMES,
        ),
    ] = None
    send_s: Annotated[
        float,
        typer.Option(
            "--send-s",
            metavar="S",
            min=0,
            help="Duration of a message between two ranks.",
            rich_help_panel=TIMES,
        ),
    ] = 0.0
    overlapped_s: Annotated[
        float | None,
        typer.Option(
            "--overlapped-s",
            metavar="S",
            min=0,
            help="Duration of a forward overlapped with a backward, in schedules that have such"
            " pairs (dualpipe, dualpipe-v).  [default: their sum]",
            rich_help_panel=TIMES,
        ),
    ] = None
    svg: Annotated[
        str | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Draw the simulated step as an SVG picture.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    csv: Annotated[
        str | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="Write the table of actions, to edit it or to run it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    list_names: Annotated[
        bool,
        typer.Option("--list", help="Print the names of schedules.", rich_help_panel=OUTPUT),
    ] = False
    as_json: AsJson = False


def schedule(options: ScheduleOptions) -> None:
    """Draw and time a pipeline schedule, one of the known or a custom one.

    Prints which rank waits when, and how many activations it keeps.

    A schedule is a table of actions per rank. It is proved before it is timed: every micro-batch
    passes every stage once forward and once backward, no action comes before its inputs, and no
    ranks wait for each other in a cycle. All stages take the same time here; `plan` times the
    stages of a model.

    \b
    Examples:
      fivefold schedule --list
      fivefold schedule 1f1b --pp 8 --micro-batches 16
      fivefold schedule zb-v --pp 4 --micro-batches 8 --svg zb-v.svg
      fivefold schedule dualpipe --pp 8 --micro-batches 20 --overlapped-s 2.5
      fivefold schedule zb-h1 --csv mine.csv
      fivefold schedule mine.csv --weight-s 0.8
    """
    if options.list_names:
        _print_names(options.as_json)
        return
    result = _simulate(options)
    if options.csv is not None:
        write_file(options.csv, result.schedule.text())
    if options.svg is not None:
        from fivefold.report.schedule_drawing import svg

        write_file(options.svg, svg(result))

    from fivefold.report.schedule_tables import picture, schedule_report, schedule_table

    report = schedule_report(result)
    if options.as_json:
        print_json(report)
        return
    print(picture(result.schedule))
    print(
        f"\nThe step takes {report['step_s']:g} s. Ranks are idle for "
        f"{report['bubble_fraction']:.1%} of it.\nThe unit of activations is one micro-batch on "
        "one stage."
    )
    console().print(schedule_table(report))


def _print_names(as_json: bool) -> None:
    from fivefold.report.schedule_tables import MEANINGS

    if as_json:
        print_json(MEANINGS)
    else:
        print(*(f"{name:10}  {meaning}" for name, meaning in MEANINGS.items()), sep="\n")


def _simulate(options: ScheduleOptions) -> "Simulation":
    """The schedule in time. UserError for a schedule or durations that cannot be."""
    if options.name is None:
        raise UserError("which schedule? `fivefold schedule --list` names them")

    from fivefold.parallel.pipeline.schedules import asked_for
    from fivefold.parallel.pipeline.simulation import simulate

    table = asked_for(options.name, options.pp, options.vpp, options.micro_batches)
    forward_s, backward_s, send_s = options.forward_s, options.backward_s, options.send_s
    weight_s, overlapped_s = options.weight_s, options.overlapped_s
    for seconds in (forward_s, backward_s, weight_s or 0.0, send_s, overlapped_s or 0.0):
        if not math.isfinite(seconds):
            raise UserError(f"{seconds} is no number of seconds: write one like 0.25")
    if weight_s is not None and weight_s > backward_s:
        raise UserError(
            f"--weight-s {weight_s:g} is a part of the backward, and --backward-s is {backward_s:g}"
        )
    if overlapped_s is not None and not any(table.pairs):
        raise UserError(
            f"--overlapped-s has no effect: {options.name} never overlaps a forward with a "
            "backward; dualpipe and dualpipe-v do"
        )
    return simulate(
        table, forward_s, backward_s, send_s, weight_s=weight_s, overlapped_s=overlapped_s
    )
