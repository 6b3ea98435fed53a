"""Options that several commands share, declared once."""

from typing import Annotated

import typer

RunFile = Annotated[
    str, typer.Argument(metavar="RUN.yaml", help="The run file, e.g. examples/first-run.yaml.")
]
RunLayout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="TEXT",
        help='Layout to run instead of the run file\'s, e.g. "tp2 dp2", or a plan file written by'
        " `fivefold plan --save`.",
        rich_help_panel="What to run",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the run file and the value to use instead, e.g. optimizer.lr=1e-3."
        " Repeatable.",
        rich_help_panel="What to run",
    ),
]
SequenceLength = Annotated[
    str | None,
    typer.Option(
        "--seq",
        metavar="N",
        help="Sequence length in tokens, e.g. 8K (8,192)."
        "  [default: 4096, or the model's maximum if that is smaller]",
        rich_help_panel="Batch and precision",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel="Output"),
]
