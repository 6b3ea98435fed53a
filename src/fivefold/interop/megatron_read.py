"""Reads a Megatron-LM argument line, or a script that holds one, as a model and a layout.

What an argument means and what it is when left out is from Megatron-LM core 0.20.0, commit
d98e8a64ddf34856e74b24714e3bedb2f5a39553 (2026-08-22): megatron/training/arguments.py, and for the
arguments that are made from fields megatron/core/transformer/transformer_config.py,
megatron/core/model_parallel_config.py and megatron/training/config/. A default is taken from there
or not at all. The other way is `plan/export/megatron.py`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.megatron_arguments import Arguments
from fivefold.layout.notation import ORDER, Layout
from fivefold.layout.stages import split_layers
from fivefold.model.config import MLAConfig, ModelConfig, MoEConfig

FAMILY = "megatron"
"""`ModelConfig.family` of a model that was read from arguments."""

OTHER_MODELS = (
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "heterogeneous-layers-config-path",
    "heterogeneous-layers-config-encoded-json",
    "experimental-attention-variant",
    "linear-attention-freq",
    "attention-output-gate",
    "moe-latent-size",
    "enable-mhc-connections",
)
"""Arguments that make another model than a `ModelConfig` can describe."""

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage by --data-parallel-sharding-strategy."""


@dataclass(frozen=True)
class MegatronRun:
    """What a line of arguments trains and how; `notes` says what was not taken over."""

    config: ModelConfig
    layout: Layout
    sequence_length: int  # tokens
    global_batch: int  # sequences
    precision: str  # fp32, fp16, bf16, fp8, mxfp8 or nvfp4
    mtp: bool  # the multi-token-prediction modules are trained too
    notes: tuple[str, ...]


def read_megatron(text: str, world_size: int | None = None) -> MegatronRun:
    """The run that a Megatron-LM argument line describes.

    The line may be a whole script: lines may be continued, NAME=VALUE are put in for $NAME, and
    words that are no arguments are passed over. `world_size` (GPUs) may be left out where the line
    has torchrun's --nnodes and --nproc-per-node. UserError names an argument that is
    missing or cannot be read.
    """
    arguments = Arguments(text)
    for name in OTHER_MODELS:
        if arguments.has(name):
            raise UserError(f"--{name} makes a model that fivefold cannot describe")
    notes: list[str] = []
    config = _read_model(arguments, notes)
    sequence_length = _first_given(arguments, "seq-length", "encoder-seq-length")
    layout = _read_layout(arguments, config, world_size, notes)
    precision = _read_precision(arguments)
    mtp = config.mtp_layers > 0
    if unread := arguments.unread():
        notes.append(f"these arguments were not read: {', '.join(unread)}")
    return MegatronRun(
        config, layout, sequence_length, layout.global_batch, precision, mtp, tuple(notes)
    )


# The model


def _read_model(arguments: Arguments, notes: list[str]) -> ModelConfig:
    num_layers = _first_given(arguments, "num-layers", "encoder-num-layers")
    hidden_size = arguments.degree("hidden-size")
    num_heads = arguments.degree("num-attention-heads")
    gated = arguments.flag("swiglu") | arguments.flag("quick-geglu")
    ffn_hidden_size = arguments.degree(
        "ffn-hidden-size", _ffn_hidden_size(hidden_size, arguments.has("swiglu"))
    )
    bias = not arguments.flag("disable-bias-linear")
    mla = _read_mla(arguments)
    qk_norm = arguments.flag("qk-layernorm")
    if mla is not None and not qk_norm:
        notes.append(
            "without --qk-layernorm the latent vectors have no norms; fivefold counts them"
        )
    theta, scaling, learned_positions = _read_positions(arguments)
    moe = _read_moe(arguments, num_layers, ffn_hidden_size, bias)
    return ModelConfig(
        family=FAMILY,
        vocab_size=_read_vocab_size(arguments),
        hidden_size=hidden_size,
        intermediate_size=ffn_hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_read_kv_heads(arguments, num_heads),
        head_dim=_read_head_dim(arguments, hidden_size, num_heads, mla),
        tied_embeddings=not arguments.flag("untie-embeddings-and-output-weights"),
        qkv_bias=arguments.flag("add-qkv-bias") or bias,
        output_bias=bias,
        mlp_bias=bias,
        qk_norm=qk_norm and mla is None,
        rms_norm_eps=arguments.number("norm-epsilon", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        moe=moe,
        mla=mla,
        windows=_read_windows(arguments, num_layers),
        gated_mlp=gated,
        norm_kind=_read_norm(arguments),
        learned_positions=learned_positions,
        attention_sinks=_read_softmax(arguments) == "learnable",
        mtp_layers=arguments.integer("mtp-num-layers", 0),
        dropout=_read_dropout(arguments),
    )


def _ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """What Megatron takes when it is not given (validate_args)."""
    return int((4 * hidden_size * 2 / 3) / 64) * 64 if swiglu else 4 * hidden_size


def _read_vocab_size(arguments: Arguments) -> int:
    if arguments.has("padded-vocab-size"):
        return arguments.degree("padded-vocab-size")
    if not arguments.has("vocab-size"):
        raise UserError(
            "the Megatron arguments lack --vocab-size, and fivefold does not read the tokenizer "
            "that it would come from: add it"
        )
    return arguments.degree("vocab-size")


def _read_kv_heads(arguments: Arguments, num_heads: int) -> int:
    """--num-query-groups counts only with --group-query-attention, and is 1 by default."""
    groups = arguments.degree("num-query-groups", 1)
    return groups if arguments.flag("group-query-attention") else num_heads


def _read_head_dim(
    arguments: Arguments, hidden_size: int, num_heads: int, mla: MLAConfig | None
) -> int:
    if mla is not None:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if not arguments.has("kv-channels") and hidden_size % num_heads:
        raise UserError(
            f"--hidden-size {hidden_size} is not a multiple of --num-attention-heads {num_heads} "
            "and there is no --kv-channels: add it"
        )
    return arguments.degree("kv-channels", hidden_size // num_heads)


def _read_mla(arguments: Arguments) -> MLAConfig | None:
    if not arguments.flag("multi-latent-attention"):
        return None
    q_lora_rank = arguments.degree("q-lora-rank") if arguments.has("q-lora-rank") else None
    return MLAConfig(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=arguments.degree("kv-lora-rank", 32),
        qk_nope_head_dim=arguments.degree("qk-head-dim", 128),
        qk_rope_head_dim=arguments.degree("qk-pos-emb-head-dim", 64),
        v_head_dim=arguments.degree("v-head-dim", 128),
    )


def _read_positions(arguments: Arguments) -> tuple[float, dict[str, Any] | None, int]:
    """Rotary base and scaling, and the number of learned positions."""
    kind = arguments.word("position-embedding-type", "learned_absolute")
    if arguments.flag("use-rotary-position-embeddings"):
        kind = "rope"
    theta = arguments.number("rotary-base", 10000)
    scaling = None
    factor = arguments.number("rope-scaling-factor", 8.0)
    if arguments.flag("use-rope-scaling"):
        # The other numbers are fixed in rotary_pos_embedding.py, _apply_scaling.
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    longest = arguments.degree("max-position-embeddings")
    has_none = arguments.flag("no-position-embedding")
    return theta, scaling, longest if kind == "learned_absolute" and not has_none else 0


def _read_windows(arguments: Arguments, num_layers: int) -> tuple[int, ...] | None:
    """--window-size is the keys to the left and right; a skip of N leaves out each Nth layer."""
    if not arguments.has("window-size"):
        return None
    size = arguments.word("window-size")
    match = re.fullmatch(r"\(?\s*([0-9]+)\s*,\s*(-1|0)\s*\)?", size)
    if match is None:
        raise UserError(f"--window-size must be written like 127,0 and not {size!r}")
    skips = arguments.word("window-attn-skip-freq", "")
    if "[" in skips:
        windowed = _read_pattern("window-attn-skip-freq", skips, num_layers)
    elif skips:
        each = arguments.degree("window-attn-skip-freq")
        windowed = [int((layer + 1) % each != 0) for layer in range(num_layers)]
    else:
        windowed = [1] * num_layers
    width = int(match[1]) + 1
    return tuple(width if has_window else 0 for has_window in windowed)


def _read_norm(arguments: Arguments) -> str:
    kind = arguments.choice("normalization", ("LayerNorm", "RMSNorm"), "LayerNorm")
    return "rms" if kind == "RMSNorm" else "layer"


def _read_softmax(arguments: Arguments) -> str:
    return arguments.choice("softmax-type", ("vanilla", "off-by-one", "learnable"), "vanilla")


def _read_dropout(arguments: Arguments) -> bool:
    rates = [arguments.number(f"{part}-dropout", 0.1) for part in ("attention", "hidden")]
    return any(rates)


def _read_moe(
    arguments: Arguments, num_layers: int, ffn_hidden_size: int, bias: bool
) -> MoEConfig | None:
    num_experts = arguments.integer("num-experts", 0)
    if num_experts == 0:
        return None
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=arguments.degree("moe-router-topk", 2),
        expert_intermediate_size=arguments.degree("moe-ffn-hidden-size", ffn_hidden_size),
        shared_intermediate_size=arguments.integer("moe-shared-expert-intermediate-size", 0),
        shared_gate=arguments.flag("moe-shared-expert-gate"),
        norm_topk_prob=not arguments.flag("moe-router-pre-softmax"),
        aux_loss_coef=arguments.number("moe-aux-loss-coeff", 0.0),
        layers=_read_moe_layers(arguments, num_layers),
        router_bias=arguments.flag("moe-router-enable-expert-bias"),
        expert_bias=bias,
    )


def _read_moe_layers(arguments: Arguments, num_layers: int) -> tuple[bool, ...]:
    """A number N makes layers 0, N, 2N ... mixtures (gpt_layer_specs.py)."""
    text = arguments.word("moe-layer-freq", "1")
    if "[" in text:
        return tuple(map(bool, _read_pattern("moe-layer-freq", text, num_layers)))
    each = arguments.degree("moe-layer-freq", 1)
    return tuple(layer % each == 0 for layer in range(num_layers))


def _read_pattern(name: str, text: str, num_layers: int) -> list[int]:
    values = parse_pattern(text)
    if len(values) != num_layers:
        raise UserError(
            f"--{name} must name each of {num_layers} layers, like ([0]*1+[1]*{num_layers - 1}), "
            f"not {text[:60]!r}"
        )
    return values


LONGEST_PATTERN = 10_000
"""No list of layers is longer, so that a slip of the keyboard cannot fill the memory."""


def parse_pattern(text: str) -> list[int]:
    """`([0]*3+[1]*58)`: one number a layer, as sums and multiples of Python lists.

    Empty for a text that is no such list.
    """
    if len(text) > LONGEST_PATTERN:
        return []
    try:
        values = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return values if isinstance(values, list) else []


def _evaluate(node: ast.expr) -> list[int] | int:
    match node:
        case ast.Constant(value=int(value)):
            return int(value)
        case ast.List(elts=elements):
            values = [_evaluate(element) for element in elements]
            return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            return _combine(_evaluate(left), operator, _evaluate(right))
    raise ValueError


def _combine(left: list[int] | int, operator: ast.operator, right: list[int] | int) -> list[int]:
    match left, operator, right:
        case list(), ast.Add(), list() if len(left) + len(right) <= LONGEST_PATTERN:
            return left + right
        case list(), ast.Mult(), int() if len(left) * right <= LONGEST_PATTERN:
            return left * right
        case int(), ast.Mult(), list():
            return _combine(right, operator, left)
    raise ValueError


# The layout


def _read_layout(
    arguments: Arguments, config: ModelConfig, world_size: int | None, notes: list[str]
) -> Layout:
    tp = arguments.degree("tensor-model-parallel-size", 1)
    pp = arguments.degree("pipeline-model-parallel-size", 1)
    ulysses, ring = _read_sequence_split(arguments, notes)
    dp = _read_data_parallel_size(arguments, world_size, tp * pp * ulysses * ring)
    zero = _read_zero(arguments, dp * ulysses * ring)
    replicas = arguments.degree("num-distributed-optimizer-instances", 1) if zero else 1
    vpp, layers = _read_stages(arguments, config.num_layers, pp)
    recompute, recompute_layers = _read_recompute(arguments, notes)
    if recompute_layers > (max(layers) if layers else -(-config.num_layers // (pp * vpp))):
        recompute_layers = 0  # Megatron takes more than a stage has for all
    ep = arguments.degree("expert-model-parallel-size", 1)
    etp = arguments.degree("expert-tensor-parallel-size", tp)
    if config.moe is None:
        if ep > 1:
            raise UserError(f"--expert-model-parallel-size {ep} needs --num-experts")
        etp = 1
    micro_batch, accumulation = _read_batch(arguments, dp, notes)
    return Layout(
        tp=tp,
        sp=arguments.flag("sequence-parallel") and tp > 1,  # as validate_args does
        pp=pp,
        vpp=vpp,
        dp=dp,
        dp_replicate=replicas,
        zero=zero,
        ep=ep,
        etp=etp,
        ulysses=ulysses,
        ring=ring,
        micro_batch=micro_batch,
        accumulation=accumulation,
        recompute=recompute,
        recompute_layers=recompute_layers,
        order=_read_order(arguments),
        layers=layers,
    )


def _read_order(arguments: Arguments) -> tuple[str, ...]:
    return ("tp", "cp", "ep", "pp", "dp") if arguments.flag("use-tp-pp-dp-mapping") else ORDER


def _read_sequence_split(arguments: Arguments, notes: list[str]) -> tuple[int, int]:
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


def _read_batch(arguments: Arguments, dp: int, notes: list[str]) -> tuple[int, int]:
    """Micro-batch and accumulation. The default global batch is one micro-batch a rank."""
    micro_batch = arguments.degree("micro-batch-size")
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
    return micro_batch, global_batch // unit


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


# The rest


def _first_given(arguments: Arguments, name: str, other: str) -> int:
    """Of an argument that has an older name, whichever is there."""
    return arguments.degree(other if arguments.has(other) else name)


def _read_precision(arguments: Arguments) -> str:
    fp8 = arguments.flag("fp8-format")
    recipe = arguments.word("fp8-recipe", "delayed")
    fp4 = arguments.flag("fp4-format")
    fp16, bf16 = arguments.flag("fp16"), arguments.flag("bf16")
    if fp4:
        return "nvfp4"
    if fp8:
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    if bf16:
        return "bf16"
    return "fp16" if fp16 else "fp32"
