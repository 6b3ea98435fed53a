"""`fivefold plan`."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import AsJson, SequenceLength
from fivefold.cli.output import console, note, print_json
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.layout.notation import Layout
    from fivefold.plan.request import PlanRequest

MODEL, MACHINE = "Model", "Cluster"
BATCH, SEARCH = "Batch and precision", "What to search"
LIMITS, OUTPUT = "Memory and engine", "Output"


@dataclass(frozen=True)
class PlanOptions:
    """The options as typed. Those of `fivefold.plan.request.Options` have its names."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A preset, e.g. llama-3.1-70b, a config.json, or its folder."
        ),
    ] = None
    dims: Annotated[
        str | None,
        typer.Option(
            "--dims",
            metavar="TEXT",
            help="Dimensions of a model without a file, e.g."
            ' "hidden=4096,layers=32,heads=32,vocab=128256,ffn=14336".',
            rich_help_panel=MODEL,
        ),
    ] = None
    from_megatron: Annotated[
        str | None,
        typer.Option(
            "--from-megatron",
            metavar="ARGS",
            help="Megatron-LM arguments, or a script that has them: read model and layout from it.",
            rich_help_panel=MODEL,
        ),
    ] = None
    mtp: Annotated[
        bool,
        typer.Option(
            "--mtp", help="Train the multi-token-prediction modules too.", rich_help_panel=MODEL
        ),
    ] = False
    imbalance: Annotated[
        float,
        typer.Option(
            "--imbalance",
            metavar="X",
            help="Expert imbalance: tokens of the busiest EP rank / mean, e.g. 1.2.",
            rich_help_panel=MODEL,
        ),
    ] = 1.0
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="A name, e.g. dgx-h100, a cluster file, or numbers:"
            ' "h100:8x450GB/s,50GB/s" (GPU, then size and bandwidth of each tier).',
            rich_help_panel=MACHINE,
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", metavar="N", help="Number of GPUs, e.g. 1024.", rich_help_panel=MACHINE
        ),
    ] = None
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Plan for this machine. `fivefold calibrate` measures it the first time.",
            rich_help_panel=MACHINE,
        ),
    ] = False
    sequence_length: SequenceLength = None
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="N",
            help="Sequences per step, e.g. 512.  [default: as many as make about 4M tokens]",
            rich_help_panel=BATCH,
        ),
    ] = None
    global_batch_tokens: Annotated[
        str | None,
        typer.Option(
            "--global-batch-tokens",
            metavar="N",
            help="Tokens per step, e.g. 16M, instead of --global-batch.",
            rich_help_panel=BATCH,
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="NAME",
            help="Matmul precision: bf16, fp16, fp32, fp8, mxfp8 or nvfp4."
            "  [default: bf16; fp32 on a CPU]",
            rich_help_panel=BATCH,
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Tokens of the whole training, e.g. 15T: also print GPU-hours.",
            rich_help_panel=BATCH,
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="TEXT",
            help='Evaluate this layout and compare it with the best, e.g. "tp8 sp pp4 dp4".',
            rich_help_panel=SEARCH,
        ),
    ] = None
    fix: Annotated[
        str | None,
        typer.Option(
            "--fix",
            metavar="TEXT",
            help='Search only layouts that have these settings, e.g. "tp8 zero1".',
            rich_help_panel=SEARCH,
        ),
    ] = None
    forbid: Annotated[
        str | None,
        typer.Option(
            "--forbid",
            metavar="TEXT",
            help='Search only layouts without these settings, e.g. "pp zero3".',
            rich_help_panel=SEARCH,
        ),
    ] = None
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="What to minimize: time (of a step), memory (per GPU) or cost (GPU-hours).",
            rich_help_panel=SEARCH,
        ),
    ] = "time"
    measured: Annotated[
        list[str] | None,
        typer.Option(
            "--measured",
            metavar="LAYOUT=TIME",
            help='A measured step time, e.g. "tp8 pp4=9.31s", used to calibrate the other'
            " predictions. Repeatable.",
            rich_help_panel=SEARCH,
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="Training framework to model: megatron, nemo, fsdp, deepspeed, deepseek or"
            " fivefold.  [default: megatron; fivefold on a CPU]",
            rich_help_panel=LIMITS,
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="Memory of a GPU that may be used, e.g. 70GB.  [default: all of it]",
            rich_help_panel=LIMITS,
        ),
    ] = None
    headroom: Annotated[
        str | None,
        typer.Option(
            "--headroom",
            metavar="SHARE",
            help="Fraction of that memory to leave free, e.g. 5%.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Keep the optimizer state in host memory.",
            rich_help_panel=LIMITS,
        ),
    ] = False
    top: Annotated[
        int,
        typer.Option(
            "--top",
            metavar="N",
            min=1,
            max=100,
            help="Number of layouts to print.",
            rich_help_panel=OUTPUT,
        ),
    ] = 5
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also print every message, where the step goes, neighbouring layouts and what"
            " would change the result.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the first layout as a plan file, e.g. plan.yaml.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    timeline: Annotated[
        str | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Write the simulated step of the first layout, to open in"
            " https://ui.perfetto.dev.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    list_names: Annotated[
        bool,
        typer.Option(
            "--list", help="Print the names of models and clusters.", rich_help_panel=OUTPUT
        ),
    ] = False
    as_json: AsJson = False


def plan(options: PlanOptions) -> None:
    """Choose a layout: search all of them, and explain the fastest that fit.

    If nothing fits, the command prints what would. The exit code is 0 if a layout fits, else 1.

    \b
    Examples:
      fivefold plan --list
      fivefold plan llama-3.1-405b --cluster dgx-h100 --gpus 1024 --seq 8192
      fivefold plan deepseek-v3 --cluster hgx-h800 --gpus 2048 --fix "pp16 ep64" --mtp
      fivefold plan my/config.json --cluster "h100:8x450GB/s,50GB/s" --gpus 64
      fivefold plan llama-2-70b --cluster dgx-a100 --layout "tp8 sp pp4 dp4 zero1"
      fivefold plan mixtral-8x7b --cluster dgx-h100 --gpus 64 --save plan.yaml
      fivefold plan examples/models/first-run.json --here --engine fivefold --seq 256
    """
    if options.list_names:
        _print_names(options.as_json)
        return
    from fivefold.interop.megatron_plan import read_request
    from fivefold.plan.request import Options
    from fivefold.plan.units import sequence_tokens

    given = {field.name: getattr(options, field.name) for field in fields(Options)}
    if options.here:
        given["cluster"] = _here(options.cluster)
    if options.sequence_length is not None:
        given["sequence_length"] = sequence_tokens(options.sequence_length)
    given["measured"] = tuple(options.measured or ())
    _show(read_request(Options(**given), options.from_megatron), options)


def _here(cluster: str | None) -> str:
    """The cluster file of this machine, measured first if there is none."""
    from fivefold.cluster.host import here_path

    if cluster is not None:
        raise UserError(f"--here names this machine and --cluster {cluster} one too: give one")
    path = here_path()
    if not path.is_file():
        from fivefold.calibrate.run import calibrate

        calibrate(None, None, quick=False)
        note(f"measured this machine: wrote {path}")
    return str(path)


def _show(request: "PlanRequest", options: PlanOptions) -> None:
    """Search, print, save, and end with the exit code."""
    from fivefold.plan.result import make_plan, refuse_unsavable
    from fivefold.plan.result_json import to_json

    save, timeline = options.save, options.timeline
    if timeline is not None:
        from fivefold.report.timeline import check_writer

        check_writer(timeline)
    if save is not None:
        refuse_unsavable(request, save)
    result = make_plan(request)
    if save is not None and result.layouts and not result.fits:
        result.notes.append(f"the layout that {save} keeps does not fit")
    if options.as_json:
        print_json(to_json(result))
    else:
        _print(to_json(result), options.details)
    if save is not None:
        from fivefold.plan import planfile

        planfile.save(result.plan_file(), save)
    if timeline is not None and result.layouts:
        _save_timeline(request, result.layouts[0].estimate.layout, timeline)
    raise typer.Exit(0 if result.fits else 1)


def _print(result: dict, details: bool) -> None:
    from fivefold.report.plan_report import plan_report

    console().print(*plan_report(result, details), sep="\n")


def _save_timeline(request: "PlanRequest", layout: "Layout", path: str) -> None:
    from fivefold.plan.timeline import planned_step
    from fivefold.report.timeline import of_plan, save

    save(of_plan(planned_step(request.job_of(layout), layout)), path)


def _print_names(as_json: bool) -> None:
    from fivefold.cluster.load import catalogue_names
    from fivefold.model.huggingface.presets import preset_names

    known = {"models": preset_names(), "clusters": catalogue_names()}
    if as_json:
        print_json(known)
        return
    for what, names in known.items():
        print(f"{what}:", *names, sep="\n  ")
