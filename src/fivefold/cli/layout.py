"""`fivefold layout`."""

from typing import Annotated

import typer

from fivefold.cli.options import AsJson
from fivefold.cli.output import console, print_json
from fivefold.errors import UserError


def layout(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help='The layout line, e.g. "tp2 sp pp2 dp2 ep2".')
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            help="Number of GPUs. dp may then be left out of the layout line.",
            rich_help_panel="Cluster",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a layout line and list its groups of ranks.

    \b
    Examples:
      fivefold layout "tp4 sp pp2 dp8 ep4"
      fivefold layout "tp2 ring2 zero3" --gpus 16 --json
    """
    from fivefold.layout.legality import violations
    from fivefold.layout.notation import parse
    from fivefold.parallel.pipeline.table_file import with_table
    from fivefold.report.tables import layout_report, layout_table

    parsed = with_table(parse(text, gpus))
    for broken in violations(parsed, world_size=gpus, running=False):
        raise UserError(broken)
    if as_json:
        print_json(layout_report(parsed))
        return
    print(parsed)
    print(parsed.describe())
    print(
        f"a step: dp {parsed.dp} x mb {parsed.micro_batch} x ga {parsed.accumulation}"
        f" = {parsed.global_batch} {'sequence' if parsed.global_batch == 1 else 'sequences'}"
    )
    if parsed.world_size > 1:
        out = console()
        out.print()
        out.print(layout_table(parsed))
