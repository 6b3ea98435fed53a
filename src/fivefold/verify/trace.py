"""The training program of one rank of any world, with shapes alone.

A trace runs `Trainer` for one optimizer step on tensors of the meta device, in a process group that
does nothing, under a `MemoryTracker`. It reports what the rank would send and allocate on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.layout.legality import check
from fivefold.layout.notation import Layout
from fivefold.layout.ranks import coordinates, groups
from fivefold.ledger import Ledger
from fivefold.model.config import ModelConfig, require_trainable
from fivefold.parallel.comm import Recorder
from fivefold.parallel.cost import ledger
from fivefold.parallel.pipeline.schedules import Action
from fivefold.parallel.workload import rank_work
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.memory.states import stage_memory
from fivefold.train.data.samples import Batch
from fivefold.train.runfile import Optimizer
from fivefold.train.trainer import StepResult, Trainer
from fivefold.verify.ledgers import Row, ledger_rows
from fivefold.verify.memory_tracker import MemoryTracker
from fivefold.verify.state_memory import holdings

META = torch.device("meta")
LEARNING_RATE = 1e-3  # no shape depends on it

VERSION = 1
"""Of the report's keys."""

PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "backward (inputs)",
    "W": "backward (weights)",
}

AGREES = 0.03
"""The largest difference of the peak from the plan's, as a fraction of it."""


@dataclass(frozen=True)
class Traced:
    """One rank's step."""

    rank: int
    ledger: Ledger
    peak: dict[str, int]  # bytes by kind, see `memory_tracker.KINDS`
    moment: str  # of the peak


def trace_report(
    config: ModelConfig, layout: Layout, sequence_length: int, precision: str, rank: int | None
) -> Row:
    """One rank, or one for each part of the pipeline, traced and compared with the plan: plain
    data. Raises UserError for what cannot be run."""
    require_trainable(config)
    check(layout, config, sequence_length)
    _reject_odd_rows(config, layout, precision)
    if rank is not None and not 0 <= rank < layout.world_size:
        raise UserError(f"--rank {rank} is not one of the {layout.world_size:,} ranks from 0 on")
    if rank is None:
        parts = parts_in_pipeline(config, layout, sequence_length, precision)
    else:
        parts = {rank: [coordinates(layout, rank)["pp"]]}
    planned = stage_memory(_job(config, layout, sequence_length, precision), layout)
    ranks = []
    for each, pp_ranks in parts.items():
        traced = trace(config, layout, sequence_length, precision, each)
        predicted = ledger(config, layout, sequence_length, each, precision)
        memory = _memory_rows(planned[pp_ranks[0]], traced.peak)
        ranks.append(
            {
                "rank": each,
                "pp_ranks": pp_ranks,
                "ledger": ledger_rows(predicted, traced.ledger),
                "ledger_agrees": predicted == traced.ledger,
                "memory": memory,
                "memory_agrees": memory[-1]["agrees"],
                "moment": traced.moment,
            }
        )
    return {
        "version": VERSION,
        "layout": str(layout),
        "world_size": layout.world_size,
        "global_batch": layout.global_batch,
        "sequence_length": sequence_length,
        "precision": precision,
        "ranks": ranks,
        "ok": all(each["ledger_agrees"] and each["memory_agrees"] for each in ranks),
    }


def parts_in_pipeline(
    config: ModelConfig, layout: Layout, sequence_length: int, precision: str
) -> dict[int, list[int]]:
    """The pipeline ranks that hold the same layers, by the first rank of the first of them, which
    has the most micro-batches in flight."""
    parts: dict[str, list[int]] = {}
    pipeline = groups(layout, "pp")[0].tolist() if layout.pp > 1 else [0]
    for pp_rank, rank in enumerate(pipeline):
        works = rank_work(config, layout, sequence_length, rank, precision)
        held = [
            (
                [(kind, int(count)) for kind, count in work.layers],
                [int(count) for count in work.recomputed],
                bool(work.first),
                bool(work.last),
            )
            for work in works
        ]
        parts.setdefault(repr(held), []).append(pp_rank)
    return {pipeline[pp_ranks[0]]: pp_ranks for pp_ranks in parts.values()}


def _job(config: ModelConfig, layout: Layout, sequence_length: int, precision: str) -> Job:
    """What is planned. The memory of tensors does not depend on the cluster."""
    cluster = load_cluster("dgx-h100", -(-layout.world_size // 8) * 8)
    batch = layout.global_batch
    return Job(config, cluster, sequence_length, batch, precision, ENGINES["fivefold"])


def _memory_rows(planned: dict[str, float], peak: dict[str, int]) -> list[Row]:
    """Predicted and measured bytes, by kind and the total. (The plan reports logits apart, and
    calls temporary memory buffers.)"""
    predicted = {
        "weights": planned["weights"],
        "gradients": planned["gradients"],
        "optimizer": planned["optimizer"],
        "activations": planned["activations"] + planned["logits"],
        "temporary": planned["buffers"],
    }
    predicted["all"] = sum(predicted.values())
    measured = {**peak, "all": sum(peak.values())}
    return [
        {
            "kind": kind,
            "predicted_bytes": size,
            "measured_bytes": measured[kind],
            "agrees": abs(size - measured[kind]) <= AGREES * measured["all"],
        }
        for kind, size in predicted.items()
    ]


def _reject_odd_rows(config: ModelConfig, layout: Layout, precision: str) -> None:
    """A GPU's grouped matrix product reads rows of 16 bytes."""
    if config.moe is None or precision != "bf16":
        return
    width = config.moe.expert_intermediate_size // layout.etp
    for what, size in (("hidden_size", config.hidden_size), ("an expert's width here", width)):
        if size % 8:
            raise UserError(
                f"{what} is {size}, but a GPU multiplies experts in bf16 only if rows are a "
                f"multiple of 16 bytes: use {size // 8 * 8 or 8} or {-(-size // 8) * 8}"
            )


class Shapes:
    """Samples without text: every token is 0 and has a label."""

    isolate_documents = False

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length

    def ids_for(self, step: int, dp_rank: int, dp: int, micro_batch: int, accumulation: int):
        return np.zeros((accumulation, micro_batch), np.int64)

    def read(self, ids) -> Batch:
        zeros = np.zeros((len(ids), self.sequence_length), np.int64)
        return Batch(zeros, zeros, zeros, zeros)


class ShapeTrainer(Trainer):
    """A trainer on the meta device. Its sums have no values, so a step is taken to succeed."""

    def __init__(
        self, config: ModelConfig, layout: Layout, sequence_length: int, precision: str, rank: int
    ) -> None:
        super().__init__(
            config,
            layout,
            Shapes(sequence_length),  # pyright: ignore[reportArgumentType]
            Optimizer(lr=LEARNING_RATE),
            precision,
            seed=0,
            rank=rank,
            recorder=Recorder(dry=True),
            device=META,
        )

    def _result(self, totals: Tensor) -> StepResult:
        return StepResult(0.0, 0.0, 0.0, tokens=1, skipped=False)


def trace(
    config: ModelConfig, layout: Layout, sequence_length: int, precision: str, rank: int
) -> Traced:
    """One optimizer step of `rank`. The layout must be legal, and no process group may exist."""
    with fake_world(rank, layout.world_size), fsdp_without_values():
        trainer = ShapeTrainer(config, layout, sequence_length, precision, rank)
        tracker = MemoryTracker("meta")
        track_step(trainer, tracker)
        doing, operation = tracker.peak_doing
        return Traced(rank, trainer.ledger, tracker.peak_by_kind(), f"{doing}, in {operation}")


def track_step(trainer: Trainer, tracker: MemoryTracker) -> None:
    """One step of a trainer, with all that it allocates."""
    for stage in trainer.stages.values():
        for name, _ in stage.named_parameters():
            trainer.optimizer.state(name)  # a step but the first finds its moments there
    trainer.optimizer.update_copies()
    progress = _Progress(trainer, tracker)
    progress.settle()
    trainer.pipeline.before = progress.begin
    with tracker, progress.layers():
        sums, parameters = trainer.gradients(0)
        progress.settle()
        progress.end()
        trainer.finish_step(sums, parameters, lr=LEARNING_RATE)


class _Progress:
    """Tells a tracker what the step is doing, and between two actions of what kind memory is."""

    def __init__(self, trainer: Trainer, tracker: MemoryTracker) -> None:
        self.trainer, self.tracker = trainer, tracker
        self.action = "reading the batch"
        tracker.doing = self.action

    def begin(self, action: Action) -> None:
        self.settle()
        self.action = (
            f"{PASSES[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}"
        )
        self.tracker.doing = self.action

    def end(self) -> None:
        self.action = self.tracker.doing = "optimizer step"

    def settle(self) -> None:
        """What a pass leaves allocated and is no state are activations."""
        for kind, tensors in holdings(self.trainer).items():
            self.tracker.name(kind, tensors)
        self.tracker.name_rest("activations")

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Follow which layer is at work, also in the backward pass."""

        def enter(name: str) -> None:
            self.tracker.doing = f"{self.action}, {name}"

        def watch(module: nn.Module, name: str) -> None:
            def after(module, inputs, output) -> None:
                out = output[0] if isinstance(output, tuple) else output
                if out.grad_fn is not None:
                    out.grad_fn.register_prehook(lambda grads: enter(name))

            handles.callback(
                module.register_forward_pre_hook(lambda module, inputs: enter(name)).remove
            )
            handles.callback(module.register_forward_hook(after).remove)

        with ExitStack() as handles:
            for stage in self.trainer.stages.values():
                for index, layer in stage.layers.items():
                    watch(layer, f"layer {index}")
                if stage.last:
                    watch(stage.model.norm, "the head")
            yield


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A default process group of any size in which this process is `rank`, alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # It keeps meshes, and takes one of the same shape for them, whose rank may be another.
        # (These are private names of torch 2.13.)
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


@contextmanager
def fsdp_without_values(wanted: bool = True) -> Iterator[None]:
    """Lets FSDP2 shard and gather parameters on the meta device. It rejects them, to keep anybody
    from training without values by mistake, and asks the device of the mesh for buffers and
    streams; a CPU's streams do nothing. (These are private names of torch 2.13.)"""
    changes = (
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: META),
        (torch, "meta", torch.cpu),  # where it looks for the streams of meta
    )
    with ExitStack() as patches:
        for owner, name, value in changes if wanted else ():
            patches.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
