"""The options of Megatron-LM that stand for one field, in one table for both ways.

`write_fields` turns fields into options and `read_fields` options into fields. What an option means
and what it is when left out is from Megatron-LM core 0.20.0, commit
d98e8a64ddf34856e74b24714e3bedb2f5a39553 (2026-08-22): megatron/training/arguments.py, and for the
options that are made from fields megatron/core/transformer/transformer_config.py,
megatron/core/model_parallel_config.py and megatron/training/config/. Options that stand for several
fields, or for a part of one, are written in `megatron` and read in `megatron_read` and
`megatron_layout`; what both need is here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.megatron_arguments import Arguments

CHECKED_AGAINST = (
    "Megatron-LM core 0.20.0, commit d98e8a64ddf34856e74b24714e3bedb2f5a39553 (2026-08-22)"
)

Value = bool | int | float | str | list[int]
Options = dict[str, Value]
"""Options by name. True is a flag that stands alone; a list is several words."""


@dataclass(frozen=True)
class Option:
    """One option and the field it stands for.

    `kind` is "size" (1 or more), "maybe" (the same, or None where it is left out), "count" (0 or
    more, written if not 0), "number", "flag" (the field is True when it is there), "no" (the field
    is False when it is there) or "choice".
    """

    name: str  # --NAME
    field: str
    nemo: str  # the key of NeMo Megatron-Bridge, "" if its value does not carry over
    kind: str = "size"
    default: int | float | str | None = None  # None: it must be given
    older: str = ""  # an older name, which counts if it is there
    choices: Mapping[str, str | bool] | None = None  # the field's value by Megatron's word


MODEL = (
    Option("num-layers", "num_layers", "model.num_layers", older="encoder-num-layers"),
    Option("hidden-size", "hidden_size", "model.hidden_size"),
    Option("ffn-hidden-size", "intermediate_size", "model.ffn_hidden_size"),
    Option("num-attention-heads", "num_heads", "model.num_attention_heads"),
    Option("vocab-size", "vocab_size", "tokenizer.vocab_size", older="padded-vocab-size"),
    Option(
        "normalization", "norm_kind", "model.normalization", "choice", "LayerNorm",
        choices={"LayerNorm": "layer", "RMSNorm": "rms"},
    ),
    Option("norm-epsilon", "rms_norm_eps", "model.layernorm_epsilon", "number", 1e-5),
    Option("swiglu", "gated_mlp", "", "flag", older="quick-geglu"),
    Option("untie-embeddings-and-output-weights", "tied_embeddings", "", "no"),
    Option("disable-bias-linear", "output_bias", "", "no"),
    Option(
        "softmax-type", "attention_sinks", "model.softmax_type", "choice", "vanilla",
        choices={"vanilla": False, "off-by-one": False, "learnable": True},
    ),
    Option("mtp-num-layers", "mtp_layers", "model.mtp_num_layers", "count", 0),
)  # fmt: skip
"""Fields of `ModelConfig`."""

LATENT = (
    Option("q-lora-rank", "q_lora_rank", "model.q_lora_rank", "maybe"),
    Option("kv-lora-rank", "kv_lora_rank", "model.kv_lora_rank", default=32),
    Option("qk-head-dim", "qk_nope_head_dim", "model.qk_head_dim", default=128),
    Option("qk-pos-emb-head-dim", "qk_rope_head_dim", "model.qk_pos_emb_head_dim", default=64),
    Option("v-head-dim", "v_head_dim", "model.v_head_dim", default=128),
)
"""Fields of `MLAConfig`."""

_SHARED = "moe-shared-expert-intermediate-size"
EXPERTS = (
    Option("num-experts", "num_experts", "model.num_moe_experts"),
    Option("moe-router-topk", "experts_per_token", "model.moe_router_topk", default=2),
    Option("moe-ffn-hidden-size", "expert_intermediate_size", "model.moe_ffn_hidden_size"),
    Option("moe-aux-loss-coeff", "aux_loss_coef", "model.moe_aux_loss_coeff", "number", 0.0),
    Option(_SHARED, "shared_intermediate_size", f"model.{_SHARED.replace('-', '_')}", "count", 0),
    Option("moe-shared-expert-gate", "shared_gate", "model.moe_shared_expert_gate", "flag"),
    Option("moe-router-pre-softmax", "norm_topk_prob", "model.moe_router_pre_softmax", "no"),
)
"""Fields of `MoEConfig`. By default Megatron takes the softmax over the chosen experts."""

LAYOUT = (
    Option(
        "tensor-model-parallel-size", "tp", "model.tensor_model_parallel_size", default=1
    ),
    Option(
        "pipeline-model-parallel-size", "pp", "model.pipeline_model_parallel_size", default=1
    ),
    Option("sequence-parallel", "sp", "model.sequence_parallel", "flag"),
    Option("micro-batch-size", "micro_batch", "train.micro_batch_size"),
)  # fmt: skip
"""Fields of `Layout`."""

EXPERT_LAYOUT = (
    Option("expert-model-parallel-size", "ep", "model.expert_model_parallel_size", default=1),
    Option("expert-tensor-parallel-size", "etp", "model.expert_tensor_parallel_size"),
)
"""Fields of the `Layout` of a mixture. Megatron's default of etp is tp."""

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage by --data-parallel-sharding-strategy of Megatron-FSDP."""

PIPELINE_BEFORE_DATA = ("tp", "cp", "ep", "pp", "dp")
"""The rank order of --use-tp-pp-dp-mapping (megatron/training/initialize.py); without it, the order
is fivefold's own default."""

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What --use-rope-scaling fixes besides the factor (rotary_pos_embedding.py, _apply_scaling)."""


def write_fields(table: Iterable[Option], source: object) -> Options:
    """The options that say what the fields of `source` are."""
    options: Options = {}
    for option in table:
        value = word = getattr(source, option.field)
        if option.choices is not None:
            word = next(word for word, of in option.choices.items() if of == value)
        elif option.kind == "no":
            value = word = not value
        if value or option.kind in ("size", "number"):
            options[f"--{option.name}"] = word
    return options


def read_fields(
    table: Iterable[Option], arguments: Arguments, defaults: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The fields that the arguments state; `defaults` are by name of the option.

    UserError for an option that is missing or cannot be read.
    """
    return {option.field: _read(option, arguments, defaults or {}) for option in table}


def _read(option: Option, arguments: Arguments, defaults: Mapping[str, int]) -> object:
    name, kind = option.name, option.kind
    if kind in ("flag", "no"):
        found = arguments.flag(name) | (option.older != "" and arguments.flag(option.older))
        return found == (kind == "flag")
    if option.older and arguments.has(option.older):
        name = option.older
    default = defaults.get(option.name, option.default)
    if option.choices is not None:
        return option.choices[arguments.choice(name, tuple(option.choices), str(default))]
    if kind == "number":
        assert default is not None
        return arguments.number(name, float(default))
    if kind == "maybe" and not arguments.has(name):
        return None
    default = None if default is None else int(default)
    return arguments.integer(name, default) if kind == "count" else arguments.degree(name, default)


# Lists with a number for each layer

LONGEST_PATTERN = 10_000
"""No list of layers is longer, so that a slip of the keyboard cannot fill the memory."""


def pattern(layers: Iterable[int]) -> str:
    """`([0]*3+[1]*58)`: a list that Megatron reads, one number per layer."""
    runs = ((value, len(list(run))) for value, run in groupby(layers))
    return "(" + "+".join(f"[{value}]*{length}" for value, length in runs) + ")"


def read_pattern(name: str, text: str, num_layers: int) -> list[int]:
    """The numbers of a list for all layers; UserError if there are more or fewer."""
    values = parse_pattern(text)
    if len(values) != num_layers:
        raise UserError(
            f"--{name} must name each of {num_layers} layers, like ([0]*1+[1]*{num_layers - 1}), "
            f"not {text[:60]!r}"
        )
    return values


def parse_pattern(text: str) -> list[int]:
    """`([0]*3+[1]*58)`: one number per layer, as sums and multiples of Python lists.

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
