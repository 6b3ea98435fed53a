"""Reads the layout in Megatron-LM's arguments: degrees, ZeRO, batch, recomputation and stages."""

from __future__ import annotations

import re

from fivefold.errors import UserError
from fivefold.interop.megatron_arguments import Arguments
from fivefold.interop.megatron_options import (
    EXPERT_LAYOUT,
    LAYOUT,
    LONGEST_PATTERN,
    PIPELINE_BEFORE_DATA,
    SHARDING,
    read_fields,
)
from fivefold.layout.notation import ORDER, Layout
from fivefold.layout.stages import split_layers
from fivefold.model.config import ModelConfig


def read_layout(
    arguments: Arguments, config: ModelConfig, world_size: int | None, notes: list[str]
) -> Layout:
    """How the run is split. UserError where an argument is missing or does not fit the others."""
    splits = read_fields(LAYOUT, arguments)
    tp, pp = splits["tp"], splits["pp"]
    experts = read_fields(EXPERT_LAYOUT, arguments, {"expert-tensor-parallel-size": tp})
    if config.moe is None:
        if experts["ep"] > 1:
            raise UserError(f"--expert-model-parallel-size {experts['ep']} needs --num-experts")
        experts["etp"] = 1
    ulysses, ring = _read_context_split(arguments, notes)
    dp = _read_data_parallel_size(arguments, world_size, tp * pp * ulysses * ring)
    zero = _read_zero(arguments, dp * ulysses * ring)
    replicas = arguments.degree("num-distributed-optimizer-instances", 1) if zero else 1
    vpp, layers = _read_stages(arguments, config.num_layers, pp)
    recompute, recompute_layers = _read_recompute(arguments, notes)
    if recompute_layers > (max(layers) if layers else -(-config.num_layers // (pp * vpp))):
        recompute_layers = 0  # Megatron takes more than a stage has for all
    return Layout(
        **{**splits, "sp": splits["sp"] and tp > 1},  # as validate_args does
        **experts,
        vpp=vpp,
        dp=dp,
        dp_replicate=replicas,
        zero=zero,
        ulysses=ulysses,
        ring=ring,
        accumulation=_read_accumulation(arguments, splits["micro_batch"], dp, notes),
        recompute=recompute,
        recompute_layers=recompute_layers,
        order=PIPELINE_BEFORE_DATA if arguments.flag("use-tp-pp-dp-mapping") else ORDER,
        layers=layers,
    )


def _read_context_split(arguments: Arguments, notes: list[str]) -> tuple[int, int]:
    """Ulysses and ring degree. Of different kinds by layer only the first is taken."""
    cp = arguments.degree("context-parallel-size", 1)
    kind = arguments.choice(
        "cp-comm-type", ("p2p", "a2a", "allgather", "all_gather", "a2a+p2p"), "p2p"
    )
    if cp == 1:
        return 1, 1
    if kind == "a2a":
        return cp, 1
    if kind == "a2a+p2p":
        inner, outer = arguments.integers("hierarchical-context-parallel-sizes", 2)
        if inner * outer != cp:
            raise UserError(
                f"--hierarchical-context-parallel-sizes {inner} {outer} do not multiply to "
                f"--context-parallel-size {cp}"
            )
        return inner, outer
    if kind != "p2p":
        notes.append(f"--cp-comm-type {kind} is taken as a ring, which sends as many bytes")
    return 1, cp


def _read_data_parallel_size(arguments: Arguments, world_size: int | None, model_ranks: int) -> int:
    if world_size is None:
        world_size = _read_world_size(arguments)
    if world_size < 1 or world_size % model_ranks:
        raise UserError(
            f"{world_size} GPUs are not a multiple of tensor x pipeline x context parallel size = "
            f"{model_ranks}"
        )
    return world_size // model_ranks


def _read_world_size(arguments: Arguments) -> int:
    if arguments.has("world-size"):
        return arguments.degree("world-size")
    if not arguments.has("nproc-per-node"):
        raise UserError(
            "the Megatron arguments do not say how many GPUs there are: give the number, or "
            "torchrun's --nnodes and --nproc-per-node"
        )
    return arguments.degree("nnodes", 1) * arguments.degree("nproc-per-node")


def _read_zero(arguments: Arguments, ranks: int) -> int:
    """The distributed optimizer is ZeRO 1. On one rank there is nothing to shard."""
    zero = 1 if arguments.flag("use-distributed-optimizer") else 0
    strategy = arguments.choice(
        "data-parallel-sharding-strategy", tuple(SHARDING), "optim_grads_params"
    )
    if arguments.flag("use-megatron-fsdp") | arguments.flag("use-custom-fsdp"):
        zero = SHARDING[strategy]
    keeps_weights = arguments.flag("torch-fsdp2-no-reshard-after-forward")
    if arguments.flag("use-torch-fsdp2"):
        zero = 2 if keeps_weights else 3
    return zero if ranks > 1 else 0


def _read_accumulation(arguments: Arguments, micro_batch: int, dp: int, notes: list[str]) -> int:
    """Micro-batches per step. The default global batch is one micro-batch per rank."""
    unit = micro_batch * dp
    global_batch = arguments.degree("global-batch-size", unit)
    if global_batch % unit:
        raise UserError(
            f"--global-batch-size {global_batch} is not a multiple of --micro-batch-size "
            f"{micro_batch} x data parallel size {dp} = {unit}"
        )
    for ramp in ("rampup-batch-size", "step-batch-size-schedule"):
        if arguments.flag(ramp):
            notes.append(f"--{ramp} is left out: every step has --global-batch-size")
    return global_batch // unit


def _read_recompute(arguments: Arguments, notes: list[str]) -> tuple[str, int]:
    """The mode, and of "full" the layers of a virtual stage (0 for all)."""
    mode = arguments.choice("recompute-granularity", ("none", "selective", "full"), "none")
    if arguments.flag("recompute-activations"):
        mode = "selective"
    modules = arguments.word("recompute-modules", "core_attn")
    if mode == "selective" and modules != "core_attn":
        notes.append("--recompute-modules is taken as core_attn: attention is recomputed")
    method = arguments.choice("recompute-method", ("uniform", "block"), "uniform")
    num_layers = arguments.integer("recompute-num-layers", 1)
    if mode != "full":
        return mode, 0
    if method == "block":
        return mode, num_layers
    if num_layers > 1:
        notes.append(f"layers are recomputed one by one, not {num_layers} at a time")
    return mode, 0


# The pipeline's stages


def _read_stages(
    arguments: Arguments, num_layers: int, pp: int
) -> tuple[int, tuple[int, ...] | None]:
    """Chunks a rank, and the layers of each virtual stage (None where they are fivefold's own)."""
    if arguments.has("pipeline-model-parallel-layout"):
        layers = _read_pipeline_layout(arguments)
        if len(layers) % pp or sum(layers) != num_layers:
            raise UserError(
                f"--pipeline-model-parallel-layout has {len(layers)} stages with {sum(layers)} "
                f"layers, which does not fit --pipeline-model-parallel-size {pp} and "
                f"--num-layers {num_layers}"
            )
        vpp = len(layers) // pp
    else:
        on_ranks, embedding, loss = _read_uneven_ranks(arguments, num_layers, pp)
        vpp = _read_chunks(arguments, num_layers + embedding + loss, pp)
        if any(count % vpp for count in on_ranks):
            raise UserError(f"{on_ranks} layers on the pipeline's ranks do not make {vpp} chunks")
        chunks = [count // vpp for count in on_ranks] * vpp
        chunks[0] -= embedding
        chunks[-1] -= loss
        layers = tuple(chunks)
    if pp == 1:
        return 1, None
    if min(layers) > 0 and layers == split_layers(num_layers, len(layers)):
        return vpp, None
    return vpp, layers


def _read_chunks(arguments: Arguments, num_layers: int, pp: int) -> int:
    if arguments.has("num-virtual-stages-per-pipeline-rank"):
        return arguments.degree("num-virtual-stages-per-pipeline-rank")
    if not arguments.has("num-layers-per-virtual-pipeline-stage"):
        return 1
    a_chunk = arguments.degree("num-layers-per-virtual-pipeline-stage")
    if num_layers // pp % a_chunk:
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {a_chunk} does not divide the "
            f"{num_layers // pp} layers of a pipeline rank"
        )
    return num_layers // pp // a_chunk


def _read_uneven_ranks(
    arguments: Arguments, num_layers: int, pp: int
) -> tuple[list[int], int, int]:
    """Layers on each pipeline rank, and what embedding and loss count for among them
    (transformer_block.py, get_num_layers_to_build)."""
    embedding = int(arguments.flag("account-for-embedding-in-pipeline-split"))
    loss = int(arguments.flag("account-for-loss-in-pipeline-split"))
    ends = {
        rank: arguments.degree(name)
        for rank, name in (
            (0, "decoder-first-pipeline-num-layers"),
            (pp - 1, "decoder-last-pipeline-num-layers"),
        )
        if arguments.has(name)
    }
    left, ranks_left = num_layers + embedding + loss - sum(ends.values()), pp - len(ends)
    if left < 0 or (left % ranks_left if ranks_left else left):
        raise UserError(
            f"{left} layers cannot be shared out evenly to {ranks_left} pipeline ranks: "
            "--pipeline-model-parallel-layout says where each goes"
        )
    return [ends.get(rank, left // max(ranks_left, 1)) for rank in range(pp)], embedding, loss


def _read_pipeline_layout(arguments: Arguments) -> tuple[int, ...]:
    """`Et*7|(t*8|)*14t*7L`: the layers, t, of each stage (pipeline_parallel_layer_layout.py)."""
    text = arguments.word("pipeline-model-parallel-layout").replace(",", "")
    for group in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(group, _repeat, text)
    if not re.fullmatch(r"E[t|]*[tm|]*L", text):
        raise UserError(
            "--pipeline-model-parallel-layout must be written like Et*7|(t*8|)*14t*7L, "
            "with E, t, m, L and |"
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _repeat(match: re.Match[str]) -> str:
    if len(match[2]) > 6 or len(match[1]) * int(match[2]) > LONGEST_PATTERN:
        raise UserError(f"--pipeline-model-parallel-layout repeats {match[1]!r} too often")
    return match[1] * int(match[2])
