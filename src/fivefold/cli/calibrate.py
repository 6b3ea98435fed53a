"""`fivefold calibrate`."""

from typing import Annotated

import typer

from fivefold.cli.output import console

MEASURE, OUTPUT = "What to measure", "Output"


def calibrate(
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            help="Local processes to start.  [default: one per GPU; 8 on a CPU]",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Measure fewer sizes, in a quarter of the time.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FILE.yaml",
            help="Cluster file to write, e.g. here.yaml.  [default: the file that --here reads]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Measure this machine, to make plans for it.

    Times the program's own operations and messages, which takes a minute or two, and writes a
    cluster file. Starts the local processes itself. Under torchrun it uses the processes that
    torchrun started.

    \b
    Examples:
      fivefold calibrate
      fivefold calibrate --processes 4 --out here.yaml
      fivefold plan examples/models/first-run.json --here --engine fivefold --seq 256
    """
    from fivefold.calibrate.run import calibrate as calibrate_here

    done = calibrate_here(out, processes, quick)
    if done is None:  # rank 0 prints
        return

    from fivefold.report.calibration import calibration_table

    print(done.summary)
    if done.errors:
        console().print(calibration_table(done.errors))
    print(f"wrote {done.path}; try: fivefold plan MODEL --cluster {done.path}")
