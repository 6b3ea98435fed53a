"""The lines that a run prints first: the model, how it is split, the device and the data."""

from __future__ import annotations

import torch

from fivefold.model.counts import count_parameters
from fivefold.model.parameters import local_tensor
from fivefold.parallel import comm
from fivefold.train.launch import BACKENDS
from fivefold.train.prepare import Prepared
from fivefold.train.trainer import Trainer


def header(prepared: Prepared, trainer: Trainer) -> str:
    """What is trained, on what and how. All ranks call this."""
    run, layout, data = prepared.run, prepared.layout, prepared.samples.token_file
    parameters = [p for stage in trainer.stages.values() for p in stage.parameters()]
    own = sum(local_tensor(p).numel() for p in parameters)
    most, least = _largest(trainer, own), -_largest(trainer, -own)
    counts = count_parameters(prepared.config)
    active = f", {counts.active:,} active per token" if counts.active < counts.total else ""
    length = run.data.sequence_length
    lines = {
        "model": f"{prepared.config.family}, {counts.total:,} parameters{active}",
        "layout": f"{layout}: {layout.describe()}",
        "rank": f"{most:,} parameters" if most == least else f"{least:,} to {most:,} parameters",
        "device": f"{_device(prepared)}, {BACKENDS[prepared.device]}, {run.precision}",
        "step": f"{run.global_batch * length:,} tokens: "
        f"{run.global_batch:,} sequences of {length:,}",
        "data": f"{data.tokens:,} tokens in {data.documents:,} documents, "
        f"tokenizer {data.tokenizer_spec}",
    }
    return "\n".join(f"{name:8}{text}" for name, text in lines.items())


def _device(prepared: Prepared) -> str:
    if prepared.device == "cuda":
        return torch.cuda.get_device_name()
    return "cpu" + (" (no CUDA device is visible)" if prepared.run.device == "auto" else "")


def _largest(trainer: Trainer, value: int) -> int:
    """The largest of the ranks' values."""
    values = torch.tensor(value, device=trainer.device)
    return int(comm.start_all_reduce(values, trainer.axes.world, op="max").wait())
