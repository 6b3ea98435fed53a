"""Reads a Megatron-LM argument line, or a script that holds one, as a model and a layout.

The options that stand for one field, and the release that meanings and defaults are from, are in
`megatron_options`; the layout is read in `megatron_layout`. The other way is `megatron`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.megatron_arguments import Arguments
from fivefold.interop.megatron_layout import read_layout
from fivefold.interop.megatron_options import (
    EXPERTS,
    LATENT,
    LLAMA3_SCALING,
    MODEL,
    read_fields,
    read_pattern,
)
from fivefold.layout.notation import Layout
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
    older = arguments.has("encoder-seq-length")
    sequence_length = arguments.degree("encoder-seq-length" if older else "seq-length")
    layout = read_layout(arguments, config, world_size, notes)
    precision = _read_precision(arguments)
    mtp = config.mtp_layers > 0
    if unread := arguments.unread():
        notes.append(f"these arguments were not read: {', '.join(unread)}")
    return MegatronRun(
        config, layout, sequence_length, layout.global_batch, precision, mtp, tuple(notes)
    )


# The model


def _read_model(arguments: Arguments, notes: list[str]) -> ModelConfig:
    if not (arguments.has("vocab-size") or arguments.has("padded-vocab-size")):
        raise UserError(
            "the Megatron arguments lack --vocab-size, and fivefold does not read the tokenizer "
            "that it would come from: add it"
        )
    ffn_hidden_size = _ffn_hidden_size(arguments.degree("hidden-size"), arguments.has("swiglu"))
    fields = read_fields(MODEL, arguments, {"ffn-hidden-size": ffn_hidden_size})
    num_layers, bias = fields["num_layers"], fields["output_bias"]
    mla = _read_mla(arguments)
    qk_norm = arguments.flag("qk-layernorm")
    if mla is not None and not qk_norm:
        notes.append(
            "without --qk-layernorm the latent vectors have no norms; fivefold counts them"
        )
    theta, scaling, learned_positions = _read_positions(arguments)
    return ModelConfig(
        family=FAMILY,
        **fields,
        num_kv_heads=_read_kv_heads(arguments, fields["num_heads"]),
        head_dim=_read_head_dim(arguments, fields["hidden_size"], fields["num_heads"], mla),
        qkv_bias=arguments.flag("add-qkv-bias") or bias,
        mlp_bias=bias,
        qk_norm=qk_norm and mla is None,
        rope_theta=theta,
        rope_scaling=scaling,
        moe=_read_moe(arguments, num_layers, fields["intermediate_size"], bias),
        mla=mla,
        windows=_read_windows(arguments, num_layers),
        learned_positions=learned_positions,
        dropout=_read_dropout(arguments),
    )


def _ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """What Megatron takes when it is not given (validate_args)."""
    return int((4 * hidden_size * 2 / 3) / 64) * 64 if swiglu else 4 * hidden_size


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
    return MLAConfig(**read_fields(LATENT, arguments))


def _read_positions(arguments: Arguments) -> tuple[float, dict[str, Any] | None, int]:
    """Rotary base and scaling, and the number of learned positions."""
    kind = arguments.word("position-embedding-type", "learned_absolute")
    if arguments.flag("use-rotary-position-embeddings"):
        kind = "rope"
    theta = arguments.number("rotary-base", 10000)
    scaling = None
    factor = arguments.number("rope-scaling-factor", 8.0)
    if arguments.flag("use-rope-scaling"):
        scaling = {**LLAMA3_SCALING, "factor": factor}
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
        windowed = read_pattern("window-attn-skip-freq", skips, num_layers)
    elif skips:
        each = arguments.degree("window-attn-skip-freq")
        windowed = [int((layer + 1) % each != 0) for layer in range(num_layers)]
    else:
        windowed = [1] * num_layers
    width = int(match[1]) + 1
    return tuple(width if has_window else 0 for has_window in windowed)


def _read_dropout(arguments: Arguments) -> bool:
    rates = [arguments.number(f"{part}-dropout", 0.1) for part in ("attention", "hidden")]
    return any(rates)


def _read_moe(
    arguments: Arguments, num_layers: int, ffn_hidden_size: int, bias: bool
) -> MoEConfig | None:
    if arguments.integer("num-experts", 0) == 0:
        return None
    return MoEConfig(
        **read_fields(EXPERTS, arguments, {"moe-ffn-hidden-size": ffn_hidden_size}),
        layers=_read_moe_layers(arguments, num_layers),
        router_bias=arguments.flag("moe-router-enable-expert-bias"),
        expert_bias=bias,
    )


def _read_moe_layers(arguments: Arguments, num_layers: int) -> tuple[bool, ...]:
    """A number N makes layers 0, N, 2N ... mixtures (gpt_layer_specs.py)."""
    text = arguments.word("moe-layer-freq", "1")
    if "[" in text:
        return tuple(map(bool, read_pattern("moe-layer-freq", text, num_layers)))
    each = arguments.degree("moe-layer-freq", 1)
    return tuple(layer % each == 0 for layer in range(num_layers))


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
