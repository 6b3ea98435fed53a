"""`fivefold plan --from-megatron`: a request from the arguments of a Megatron-LM run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fivefold.errors import UserError
from fivefold.interop.megatron_read import read_megatron
from fivefold.plan.request import Options, PlanRequest, parse_request, refuse_empty


def read_request(options: Options, from_megatron: str | None = None) -> PlanRequest:
    """The request of `fivefold plan`. `from_megatron` is a line of Megatron-LM arguments, or a
    script that has them: it gives the model, the layout, and what the options leave out.
    UserError for what cannot be read."""
    if from_megatron is None:
        return parse_request(options)
    refuse_empty("--from-megatron", from_megatron)
    given = {"MODEL": options.model, "--dims": options.dims, "--layout": options.layout}
    for option, value in given.items():
        if value is not None:
            raise UserError(
                f"--from-megatron and {option} both describe the model or the layout: give only one"
            )
    run = read_megatron(_arguments(from_megatron), options.gpus)
    batch = None if options.global_batch_tokens else run.global_batch
    read = replace(
        options,
        layout=str(run.layout),
        gpus=options.gpus or run.layout.world_size,
        sequence_length=options.sequence_length or run.sequence_length,
        global_batch=options.global_batch or batch,
        precision=options.precision or run.precision,
        mtp=options.mtp or run.mtp,
    )
    return parse_request(read, run.config, run.notes)


def _arguments(text: str) -> str:
    """The arguments themselves, or the text of the script that has them."""
    if not os.path.isfile(text):
        if "--" not in text:
            raise UserError(f"--from-megatron {text}: there is no such file, and no arguments")
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the script {text} cannot be read: {error}") from None
