"""`fivefold train`."""

import json
import os
from dataclasses import dataclass
from typing import Annotated

import typer

from fivefold.cli.options import Overrides, RunFile, RunLayout
from fivefold.cli.output import console
from fivefold.files import is_yaml

OUTPUT = "Output"


@dataclass(frozen=True)
class TrainOptions:
    """The options as typed."""

    run_file: RunFile
    layout: RunLayout = None
    overrides: Overrides = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            help="Optimizer steps to train, e.g. 20.  [default: from the run file]",
            rich_help_panel="What to run",
        ),
    ] = None
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Resume from the newest checkpoint, or start anew.  [default: from the run file]",
            rich_help_panel="What to run",
        ),
    ] = None
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Output folder, e.g. runs/a.  [default: from the run file]",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Cluster to predict the run for: a name, a cluster file, or numbers."
            "  [default: this machine, if calibrated]",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    timeline: Annotated[
        str | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Write what every rank computed and sent, to open in https://ui.perfetto.dev.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    timeline_steps: Annotated[
        int | None,
        typer.Option(
            "--timeline-steps",
            metavar="N",
            help="Steps to record in the timeline, after the first.  [default: 3]",
            rich_help_panel=OUTPUT,
        ),
    ] = None


def train(options: TrainOptions) -> None:
    """Train the model of a run file, split as its layout says.

    Starts the local processes itself. Under torchrun it uses the processes that torchrun started.

    \b
    Examples:
      fivefold train examples/first-run.yaml
      fivefold train examples/first-run.yaml --layout "tp2 pp2" --steps 20
      fivefold train examples/dp.yaml --set optimizer.lr=3e-4 --set data.sequence_length=128
      fivefold train examples/first-run.yaml --steps 5 --timeline run.pftrace
      torchrun --nproc-per-node 8 -m fivefold train examples/first-run.yaml
    """
    from fivefold.verify.planned_run import load_planned_run

    run = load_planned_run(
        options.run_file, options.layout, _overrides(options), options.steps, options.out
    )

    from fivefold.report.timeline import check_writer, save_run
    from fivefold.verify.plan_vs_run import train_and_compare

    if run.timeline is not None:
        check_writer(run.timeline)
    report = train_and_compare(run, save_run)
    if report is not None:
        from fivefold.report.plan_vs_run_tables import plan_vs_run_report

        console().print("", *plan_vs_run_report(report), sep="\n")


def _overrides(options: TrainOptions) -> list[str]:
    """Values that replace those of the run file. Paths of options start at the current folder."""
    cluster, timeline = options.cluster, options.timeline
    if cluster is not None and is_yaml(cluster):
        cluster = os.path.abspath(cluster)
    given = {
        "checkpoint.resume": options.resume,
        "cluster": cluster,
        "timeline": None if timeline is None else os.path.abspath(timeline),
        "timeline_steps": options.timeline_steps,
    }
    replaced = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return [*(options.overrides or []), *replaced]
