"""The command line. A command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold import __version__
from fivefold.errors import UserError
from fivefold.files import atomic_write, is_yaml
from fivefold.malloc_env import reexec_with_malloc_settings

if TYPE_CHECKING:
    from fivefold.plan.request import PlanRequest

TRAIN_EXTRA = ("torch", "tokenizers", "safetensors")
"""What `fivefold[train]` brings, and the planner half does without."""

RUNS = {"train", "check", "calibrate", "--here"}
"""The words on a command line that have it run, or measure, training."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="""Choose, run and prove a five-way split of large-model training.

    The splits are data (DP, ZeRO), pipeline (PP), tensor (TP), sequence (SP: megatron, ulysses,
    ring) and expert parallelism (EP). A layout is one line of text, such as
    "tp2 sp pp2 dp2 ep2", and means the same in every command and file.

    \b
    Examples:
      fivefold plan llama-3.1-70b --cluster dgx-h100 --gpus 256
      fivefold layout "tp4 sp pp2 dp8 ep4"
      fivefold train examples/first-run.yaml
      fivefold check examples/first-run.yaml --steps 2
      fivefold trace llama-3.1-405b --layout "tp8 sp pp16 dp128 zero1 ga16" --seq 8K
    """,
)

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run file.")]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="TEXT",
        help='Replaces the layout: "tp2 dp2", or a plan file that `fivefold plan --save` wrote.',
    ),
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


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A name, such as llama-3.1-70b, or a config.json or its folder."
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help='A name, such as dgx-h100, a file, or numbers: "h100:8x450GB/s,50GB/s".',
    ),
]
GpusOption = Annotated[int | None, typer.Option("--gpus", metavar="N", help="Devices.")]
SequenceOption = Annotated[
    str | None, typer.Option("--seq", metavar="N", help="Tokens of a sequence, such as 8K; 4096.")
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch", metavar="N", help="Sequences of a step; about 4M tokens of them."
    ),
]
BatchTokensOption = Annotated[
    str | None,
    typer.Option("--global-batch-tokens", metavar="N", help="The same in tokens, such as 16M."),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option("--precision", metavar="NAME", help="Of the products: bf16, fp8, ..; bf16."),
]
OnlyLayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar="TEXT", help="Look at this layout only.")
]
FixOption = Annotated[
    str | None, typer.Option("--fix", metavar="TEXT", help='What must be so: "tp8 zero1".')
]
ForbidOption = Annotated[
    str | None, typer.Option("--forbid", metavar="TEXT", help='What must not be: "pp zero3".')
]
TopOption = Annotated[
    int, typer.Option("--top", metavar="N", min=1, max=100, help="Layouts shown.")
]
ObjectiveOption = Annotated[
    str, typer.Option("--objective", metavar="NAME", help="time, memory or cost.")
]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Of the whole training, such as 15T."),
]
MaxMemoryOption = Annotated[
    str | None, typer.Option("--max-memory", metavar="SIZE", help="Of a device, such as 70GB.")
]
HeadroomOption = Annotated[
    str | None,
    typer.Option("--headroom", metavar="SHARE", help="Of the memory, left free; such as 5%."),
]
MeasuredOption = Annotated[
    list[str] | None,
    typer.Option(
        "--measured",
        metavar="LAYOUT=TIME",
        help='A step of yours, "tp8 pp4=9.31s", that sharpens the rest; may be repeated.',
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Runs it: megatron, nemo, fsdp, deepspeed, deepseek, fivefold.",
    ),
]
MtpOption = Annotated[
    bool, typer.Option("--mtp", help="Train the multi-token-prediction modules too.")
]
OffloadOption = Annotated[
    bool, typer.Option("--offload", help="Keep the optimizer's state in host memory.")
]
ImbalanceOption = Annotated[
    float,
    typer.Option(
        "--imbalance", metavar="X", help="Tokens of the busiest expert rank over the mean."
    ),
]
MegatronOption = Annotated[
    str | None,
    typer.Option(
        "--from-megatron",
        metavar="ARGS",
        help="Read model and layout from Megatron arguments, or a script that has them.",
    ),
]
DimsOption = Annotated[
    str | None,
    typer.Option(
        "--dims",
        metavar="TEXT",
        help='A model without a file: "hidden=4096,layers=32,heads=32,vocab=128256,ffn=14336".',
    ),
]
SaveOption = Annotated[
    str | None,
    typer.Option("--save", metavar="FILE", help="Write the first layout as a plan file."),
]
HereOption = Annotated[
    bool,
    typer.Option(
        "--here", help="On this machine, as `fivefold calibrate` measures it (once) and keeps it."
    ),
]
TimelineOption = Annotated[
    str | None,
    typer.Option(
        "--timeline",
        metavar="FILE",
        help="Write the first layout's step, for https://ui.perfetto.dev.",
    ),
]
ListOption = Annotated[
    bool, typer.Option("--list", help="Name the models and clusters that are known.")
]


@app.command()
def plan(
    model: ModelArgument = None,
    cluster: ClusterOption = None,
    here: HereOption = False,
    gpus: GpusOption = None,
    sequence_length: SequenceOption = None,
    global_batch: BatchOption = None,
    global_batch_tokens: BatchTokensOption = None,
    precision: PrecisionOption = None,
    layout: OnlyLayoutOption = None,
    fix: FixOption = None,
    forbid: ForbidOption = None,
    top: TopOption = 5,
    objective: ObjectiveOption = "time",
    tokens: TokensOption = None,
    max_memory: MaxMemoryOption = None,
    headroom: HeadroomOption = None,
    measured: MeasuredOption = None,
    engine: EngineOption = None,
    mtp: MtpOption = False,
    offload: OffloadOption = False,
    imbalance: ImbalanceOption = 1.0,
    from_megatron: MegatronOption = None,
    dims: DimsOption = None,
    save: SaveOption = None,
    timeline: TimelineOption = None,
    list_names: ListOption = False,
    as_json: JsonOption = False,
) -> None:
    """Choose the layout: search all of them, and say what the best cost and why.

    When nothing fits, it says what would. The exit code is 0 for a layout that fits, else 1.

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
    if list_names:
        _print_names(as_json)
        return
    if here:
        cluster = _here(cluster)
    from fivefold.plan.request import Options, ask, sequence_tokens

    question = ask(
        Options(
            model=model,
            dims=dims,
            cluster=cluster,
            gpus=gpus,
            sequence_length=None if sequence_length is None else sequence_tokens(sequence_length),
            global_batch=global_batch,
            global_batch_tokens=global_batch_tokens,
            precision=precision,
            engine=engine,
            mtp=mtp,
            offload=offload,
            imbalance=imbalance,
            layout=layout,
            from_megatron=from_megatron,
            fix=fix,
            forbid=forbid,
            top=top,
            objective=objective,
            tokens=tokens,
            max_memory=max_memory,
            headroom=headroom,
            measured=tuple(measured or ()),
        )
    )
    _show(question, as_json, save, timeline)


def _here(cluster: str | None) -> str:
    """The cluster file of this machine, which is measured if that has not been done before."""
    from fivefold.cluster.host import here_path

    if cluster is not None:
        raise UserError(f"--here names this machine and --cluster {cluster} one too: give one")
    path = here_path()
    if not path.is_file():
        from fivefold.calibrate.run import calibrate as calibrate_here

        calibrate_here(None, None, quick=False)
        print(f"measured this machine: wrote {path}", file=sys.stderr)
    return str(path)


def _show(question: PlanRequest, as_json: bool, save: str | None, timeline: str | None) -> None:
    """Answers, prints, saves, and ends with the exit code."""
    from fivefold.plan.result import answer, plan_file, refuse_unsavable

    if timeline is not None:
        from fivefold.report.timeline import check_writer

        check_writer(timeline)
    if save is not None:
        refuse_unsavable(question, save)
    result = answer(question)
    fits = bool(result["layouts"]) and result["layouts"][0]["verdict"] != "no"
    if save is not None and result["layouts"] and not fits:
        result["notes"].append(f"the layout that {save} keeps does not fit")
    if as_json:
        _print_json(result)
    else:
        from rich.console import Console

        from fivefold.report.plan_tables import WIDTH, plan_report

        # A pipe has no width of its own.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        console.print(*plan_report(result), sep="\n")
    if save is not None:
        from fivefold.plan import planfile

        planfile.save(plan_file(question, result), save)
    if timeline is not None and result["layouts"]:
        _save_timeline(question, result["layouts"][0]["layout"], timeline)
    raise typer.Exit(0 if fits else 1)


def _save_timeline(question: PlanRequest, layout: str, path: str) -> None:
    from fivefold.layout.notation import parse
    from fivefold.plan.result import job_of
    from fivefold.plan.timeline import planned_step
    from fivefold.report.timeline import of_plan, save

    parsed = parse(layout)
    save(of_plan(planned_step(job_of(question, parsed), parsed)), path)


def _print_names(as_json: bool) -> None:
    from fivefold.cluster.cluster import catalogue_names
    from fivefold.model.huggingface.presets import preset_names

    known = {"models": preset_names(), "clusters": catalogue_names()}
    if as_json:
        _print_json(known)
        return
    for what, names in known.items():
        print(f"{what}:", *names, sep="\n  ")


@app.command()
def export(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN.yaml", help="The plan file.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ENGINE",
            help="megatron, torchtitan, deepspeed, nemo, torchrun or slurm.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Write files there; else they are printed."),
    ] = None,
) -> None:
    """Say a plan in the words of another training program.

    What that program has no counterpart of is said on stderr.

    \b
    Examples:
      fivefold export plan.yaml --to megatron
      fivefold export plan.yaml --to slurm --out job
    """
    from fivefold.interop import export as export_plan
    from fivefold.plan import planfile

    plan = planfile.load(plan_file)
    exported = export_plan(plan, to)
    if out is None:
        for name, text in exported.files.items():
            if len(exported.files) > 1:
                print(f"# {name}")
            print(text, end="" if text.endswith("\n") else "\n")
    else:
        for path in _write(out, exported.files):
            print(path)
    for note in exported.notes:
        print(f"note: {note}", file=sys.stderr)


def _write(folder: str, files: dict[str, str]) -> list[Path]:
    """Writes the files; their paths."""
    paths = [Path(folder, name) for name in files]
    try:
        os.makedirs(folder, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            atomic_write(path, text)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}") from None
    return paths


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
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Predict the run for this cluster: a name, a file, or numbers.",
        ),
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Write what all ranks did and sent, for https://ui.perfetto.dev.",
        ),
    ] = None,
    timeline_steps: Annotated[
        int | None, typer.Option("--timeline-steps", metavar="N", help="Steps in it; 3.")
    ] = None,
) -> None:
    """Train the model of a run file, split as its layout says.

    Starts the local processes itself; under torchrun it joins those that torchrun started.

    \b
    Examples:
      fivefold train examples/first-run.yaml
      fivefold train examples/first-run.yaml --layout "tp2 pp2" --steps 20
      fivefold train examples/dp.yaml --set optimizer.lr=3e-4 --set data.sequence_length=128
      fivefold train examples/first-run.yaml --steps 5 --timeline run.pftrace
      torchrun --nproc-per-node 8 -m fivefold train examples/first-run.yaml
    """
    from fivefold.train.runfile import load_run

    if cluster is not None and is_yaml(cluster):
        cluster = os.path.abspath(cluster)
    options = {
        "checkpoint.resume": resume,
        "cluster": cluster,
        "timeline": None if timeline is None else os.path.abspath(timeline),
        "timeline_steps": timeline_steps,
    }
    overrides = list(overrides or [])
    overrides += [f"{key}={json.dumps(x)}" for key, x in options.items() if x is not None]
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

    from fivefold.verify.check import check as check_run

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
def calibrate(
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE.yaml", help="Writes there; else into the cache."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", help="Started here: a GPU each; on a CPU, 8."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes, in a quarter of the time.")
    ] = False,
) -> None:
    """Measure this machine, for plans that are made for it.

    Times the program's own operations and messages, in a minute or two, and writes a cluster file.
    Starts the local processes itself; under torchrun it joins those that torchrun started.

    \b
    Examples:
      fivefold calibrate
      fivefold calibrate --processes 4 --out here.yaml
      fivefold plan examples/models/first-run.json --here --engine fivefold --seq 256
    """
    from fivefold.calibrate.run import calibrate as calibrate_here

    done = calibrate_here(out, processes, quick)
    if done is None:  # rank 0 tells
        return
    from rich.console import Console

    from fivefold.report.calibration import calibration_table

    print(done.summary)
    if done.errors:
        Console(highlight=False).print(calibration_table(done.errors))
    print(f"wrote {done.path}; try: fivefold plan MODEL --cluster {done.path}")


@app.command()
def trace(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name, such as llama-3.1-70b, a config.json or its folder, or a plan file.",
        ),
    ],
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="TEXT", help='Such as "tp8 sp pp16 dp128".')
    ] = None,
    sequence_length: SequenceOption = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="bf16 or fp32; bf16.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="N", help="This rank; else one for each different stage."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the training program of one rank of any world, with shapes alone, and compare.

    Nothing is computed, sent or allocated: what comes out are the messages and the peak memory of
    a step, beside what the plan says. The exit code is 0 when they agree, else 1.

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
        _print_json(report)
    else:
        from rich.console import Console

        from fivefold.report.tables import ledger_tables, trace_memory_table, trace_notes

        console = Console(highlight=False)
        rows = [
            {"pp_rank": each["pp_ranks"][0], **row}
            for each in report["ranks"]
            for row in each["ledger"]
        ]
        for table in ledger_tables(rows):
            console.print(table, "")
        console.print(trace_memory_table(report["ranks"]), "")
        console.print(*trace_notes(report), sep="\n")
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
    from fivefold.layout.legality import violations
    from fivefold.layout.notation import parse
    from fivefold.layout.ranks import groups
    from fivefold.report.tables import AXES, LARGEST_LISTED, degrees, layout_table

    layout = parse(text, gpus)
    for broken in violations(layout, world_size=gpus, running=False):
        raise UserError(broken)
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


@app.command()
def schedule(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Such as zb-v, or a table of your own: FILE.csv."),
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", min=1, help="Pipeline ranks; 4.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", metavar="N", min=1, help="Of a step; 8.")
    ] = None,
    vpp: Annotated[
        int | None,
        typer.Option("--vpp", metavar="N", min=1, help="Stages a rank; as few as it can be."),
    ] = None,
    forward_s: Annotated[
        float, typer.Option("--forward-s", metavar="S", min=0, help="Of a stage's forward.")
    ] = 1.0,
    backward_s: Annotated[
        float, typer.Option("--backward-s", metavar="S", min=0, help="Of its whole backward.")
    ] = 2.0,
    weight_s: Annotated[
        float | None,
        typer.Option("--weight-s", metavar="S", min=0, help="Of that, for the weights; half."),
    ] = None,
    send_s: Annotated[
        float, typer.Option("--send-s", metavar="S", min=0, help="A message between two ranks.")
    ] = 0.0,
    overlapped_s: Annotated[
        float | None,
        typer.Option(
            "--overlapped-s",
            metavar="S",
            min=0,
            help="A forward and a backward side by side, where the schedule has such pairs.",
        ),
    ] = None,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Draw it, in simulated time.")
    ] = None,
    csv: Annotated[
        str | None,
        typer.Option("--csv", metavar="FILE", help="Write the table, to change or to run."),
    ] = None,
    list_names: Annotated[
        bool, typer.Option("--list", help="Name the schedules that are known.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw and time a pipeline schedule: who waits when, and what each rank keeps.

    A schedule is a table of actions for each rank. It is proved before it is timed: every
    micro-batch passes every stage once each way, nothing comes before what it needs, and no ranks
    wait for each other in a ring. Stages are equal here; `plan` times those of a model.

    \b
    Examples:
      fivefold schedule --list
      fivefold schedule 1f1b --pp 8 --micro-batches 16
      fivefold schedule zb-v --pp 4 --micro-batches 8 --svg zb-v.svg
      fivefold schedule dualpipe --pp 8 --micro-batches 20 --overlapped-s 2.5
      fivefold schedule zb-h1 --csv mine.csv
      fivefold schedule mine.csv --weight-s 0.8
    """
    from fivefold.report.schedule_tables import (
        MEANINGS,
        picture,
        schedule_report,
        schedule_table,
    )

    if list_names:
        if as_json:
            _print_json(MEANINGS)
        else:
            print(*(f"{name:10}  {meaning}" for name, meaning in MEANINGS.items()), sep="\n")
        return
    if name is None:
        raise UserError("which schedule? `fivefold schedule --list` names them")

    import math

    from fivefold.parallel.pipeline.schedules import asked_for
    from fivefold.parallel.pipeline.simulation import simulate
    from fivefold.report.schedule_drawing import svg as draw_svg

    table = asked_for(name, pp, vpp, micro_batches)
    for seconds in (forward_s, backward_s, weight_s or 0.0, send_s, overlapped_s or 0.0):
        if not math.isfinite(seconds):
            raise UserError(f"{seconds} is no number of seconds: write one like 0.25")
    if weight_s is not None and weight_s > backward_s:
        raise UserError(
            f"--weight-s {weight_s:g} is a part of the backward, and --backward-s is {backward_s:g}"
        )
    if overlapped_s is not None and not any(table.pairs):
        raise UserError(
            f"{name} has no forward beside a backward, so that --overlapped-s says nothing: "
            "dualpipe and dualpipe-v have some"
        )
    result = simulate(
        table, forward_s, backward_s, send_s, weight_s=weight_s, overlapped_s=overlapped_s
    )
    report = schedule_report(result)
    if csv is not None:
        _write_file(csv, table.text())
    if svg is not None:
        _write_file(svg, draw_svg(result))
    if as_json:
        _print_json(report)
        return
    from rich.console import Console

    print(picture(table))
    print(
        f"\nstep {report['step_s']:g} s, idle {report['bubble_fraction']:.1%} of it; activations "
        "in those of one micro-batch on one stage"
    )
    Console(highlight=False).print(schedule_table(report))


def _write_file(path: str, text: str) -> None:
    try:
        atomic_write(Path(path), text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _print_json(data: dict) -> None:
    import json

    print(json.dumps(data, indent=2))


INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    0: done; 1: a worker failed, or `check` found a difference; 2: bad input, told in one
    sentence; 130: interrupted. With FIVEFOLD_TRACEBACK=1 a failed worker's traceback is shown.
    """
    if argv is None and RUNS & set(sys.argv):
        reexec_with_malloc_settings()
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
