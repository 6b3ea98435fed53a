"""How a model and its sequences can be split."""

from __future__ import annotations

import math

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.layout.degrees import Degrees
from fivefold.layout.notation import Layout
from fivefold.layout.rule import rule
from fivefold.layout.stages import split_layers
from fivefold.model.config import ModelConfig
from fivefold.text import divisors, nearest_choices, nearest_multiples, product


def _tp_may_be(model: ModelConfig, tp: int) -> str:
    return f"tp may be {nearest_choices(allowed_tp(model), tp)}"


def allowed_tp(model: ModelConfig) -> list[int]:
    """All tensor parallel degrees that the model can be split by, ascending."""
    degrees = divisors(model.num_heads)
    return [tp for tp in degrees if all(each.holds(tp, model) for each in TP_RULES)]


@rule(lambda tp, model: model.num_heads % tp == 0)
def heads_divide_over_tp(tp: int, model: ModelConfig) -> str:
    return f"tp {tp} does not divide {model.num_heads} attention heads: {_tp_may_be(model, tp)}"


@rule(lambda tp, model: (model.num_kv_heads % tp == 0) | (tp % model.num_kv_heads == 0))
def kv_heads_divide_over_tp(tp: int, model: ModelConfig) -> str:
    """Fewer kv heads than ranks are repeated, which needs as many ranks for each."""
    return (
        f"tp {tp} neither divides {model.num_kv_heads} kv heads nor is a multiple of them: "
        f"{_tp_may_be(model, tp)}"
    )


def _has_dense_mlp(model: ModelConfig) -> bool:
    return model.moe is None or not all(model.moe.layers)


@rule(lambda tp, model: (not _has_dense_mlp(model)) | (model.intermediate_size % tp == 0))
def mlp_divides_over_tp(tp: int, model: ModelConfig) -> str:
    return (
        f"tp {tp} does not divide the MLP width {model.intermediate_size}: {_tp_may_be(model, tp)}"
    )


def _shared_width(model: ModelConfig) -> int:
    return model.moe.shared_intermediate_size if model.moe else 0


@rule(lambda tp, model: _shared_width(model) % tp == 0)
def shared_expert_divides_over_tp(tp: int, model: ModelConfig) -> str:
    return (
        f"tp {tp} does not divide the shared expert's width {_shared_width(model)}: "
        f"{_tp_may_be(model, tp)}"
    )


def _vocabulary_rows(model: ModelConfig, tp: Elementwise) -> Elementwise:
    """Rows of the vocabulary on each tp rank, ceil(vocab_size / tp); the last ones get the rest."""
    return -(-model.vocab_size // tp)


@rule(lambda tp, model: _vocabulary_rows(model, tp) * (tp - 1) < model.vocab_size)
def vocabulary_reaches_every_tp_rank(tp: int, model: ModelConfig) -> str:
    return (
        f"tp {tp} with {_vocabulary_rows(model, tp)} rows a rank leaves ranks without any of "
        f"{model.vocab_size} tokens: {_tp_may_be(model, tp)}"
    )


TP_RULES = (
    heads_divide_over_tp,
    kv_heads_divide_over_tp,
    mlp_divides_over_tp,
    shared_expert_divides_over_tp,
    vocabulary_reaches_every_tp_rank,
)


# The rest of the model


def _tp_rank_heads(tp: Elementwise, model: ModelConfig) -> tuple[Elementwise, Elementwise]:
    """Heads and kv heads of one tp rank."""
    return model.num_heads // tp, np.maximum(1, model.num_kv_heads // tp)


def _ulysses_fits(ulysses: Elementwise, tp: Elementwise, model: ModelConfig) -> Elementwise:
    heads, kv_heads = _tp_rank_heads(tp, model)
    return (heads % ulysses == 0) & ((kv_heads % ulysses == 0) | (ulysses % kv_heads == 0))


@rule(
    lambda layout, model: (
        _ulysses_fits(layout.ulysses, layout.tp, model)
        | np.logical_not(heads_divide_over_tp.holds(layout.tp, model))
        | np.logical_not(kv_heads_divide_over_tp.holds(layout.tp, model))
    )
)
def ulysses_divides_heads(layout: Layout, model: ModelConfig) -> str:
    """Around attention a rank holds heads / tp / ulysses heads, and kv heads like them."""
    heads, kv_heads = _tp_rank_heads(layout.tp, model)
    allowed = [each for each in divisors(heads) if _ulysses_fits(each, layout.tp, model)]
    return (
        f"ulysses {layout.ulysses} cannot share out the {heads} heads and {kv_heads} kv heads of a "
        f"rank at tp {layout.tp}: ulysses may be {nearest_choices(allowed, layout.ulysses)}"
    )


@rule(lambda layout, model: layout.stages <= model.num_layers)
def stages_have_layers(layout: Layout, model: ModelConfig) -> str:
    return (
        f"pp {layout.pp} x vpp {layout.vpp} = {layout.stages} stages need a layer each and the "
        f"model has {model.num_layers}: pp x vpp may be up to {model.num_layers}"
    )


def _largest_stage(layout: Degrees, model: ModelConfig) -> Elementwise:
    """Layers of the largest virtual stage."""
    return max(layout.layers) if layout.layers else -(-model.num_layers // layout.stages)


@rule(lambda layout, model: layout.recompute_layers <= _largest_stage(layout, model))
def recomputed_layers_are_there(layout: Layout, model: ModelConfig) -> str:
    most = _largest_stage(layout, model)
    return (
        f"recompute=full:{layout.recompute_layers} is more layers than the {most} of the largest "
        f"stage: it may be up to full:{most}, or full for all"
    )


@rule(
    lambda layout, model: (
        layout.layers is None
        or (sum(layout.layers) == model.num_layers) | (layout.stages > model.num_layers)
    )
)
def listed_layers_are_the_models(layout: Layout, model: ModelConfig) -> str:
    assert layout.layers is not None
    example = Layout(layers=split_layers(model.num_layers, layout.stages))
    return (
        f"layers= adds up to {sum(layout.layers)} but the model has {model.num_layers} layers: "
        f"{example} would do"
    )


@rule(lambda layout, model: model.moe is not None or (layout.ep == 1) & (layout.etp == 1))
def expert_splits_need_experts(layout: Layout, model: ModelConfig) -> str:
    return (
        f"{product({'ep': layout.ep, 'etp': layout.etp})} splits experts and {model.family} is a "
        "dense model: leave it out"
    )


@rule(lambda layout, model: model.moe is None or model.moe.num_experts % layout.ep == 0)
def ep_divides_experts(layout: Layout, model: ModelConfig) -> str:
    assert model.moe is not None
    experts = model.moe.num_experts
    return (
        f"ep {layout.ep} does not divide {experts} experts: "
        f"ep may be {nearest_choices(divisors(experts), layout.ep)}"
    )


@rule(
    lambda layout, model: model.moe is None or model.moe.expert_intermediate_size % layout.etp == 0
)
def etp_divides_expert_width(layout: Layout, model: ModelConfig) -> str:
    assert model.moe is not None
    return (
        f"etp {layout.etp} does not divide the expert width {model.moe.expert_intermediate_size}: "
        "use etp1, which keeps experts whole"
    )


MODEL_RULES = (
    ulysses_divides_heads,
    stages_have_layers,
    recomputed_layers_are_there,
    listed_layers_are_the_models,
    expert_splits_need_experts,
    ep_divides_experts,
    etp_divides_expert_width,
)


# The sequence length


def _sequence_pieces(layout: Degrees) -> dict[str, Elementwise]:
    """A ring rank takes one early and one late piece, which evens out causal attention's work."""
    return {
        "ulysses": layout.ulysses,
        "ring": layout.ring,
        "pieces a ring rank": 1 + (layout.ring > 1),
        "tp (of sp)": layout.sp_degree,
    }


@rule(
    lambda layout, sequence_length: (
        (sequence_length > 0)
        & (sequence_length % math.prod(_sequence_pieces(layout).values()) == 0)
    )
)
def sequence_divides_evenly(layout: Layout, sequence_length: int) -> str:
    pieces = _sequence_pieces(layout)
    unit = math.prod(pieces.values())
    return (
        f"sequence length {sequence_length} is not a multiple of {product(pieces)} = {unit}: "
        f"the nearest is {nearest_multiples(sequence_length, unit)}"
    )


@rule(
    lambda layout, model, sequence_length: (
        model.moe is None
        or (sequence_length % layout.cp != 0)
        | (layout.micro_batch * (sequence_length // layout.cp) % layout.tp == 0)
    )
)
def moe_tokens_divide_over_tp(layout: Layout, model: ModelConfig, sequence_length: int) -> str:
    """The tp ranks hold the same tokens, and each sends its share of them to the experts."""
    sequence = sequence_length // layout.cp
    unit = layout.tp // math.gcd(layout.tp, sequence)
    return (
        f"a micro-batch of mb {layout.micro_batch} x {sequence} tokens on a rank does not divide "
        f"over tp {layout.tp}, as the MoE layers need: "
        f"mb may be {nearest_multiples(layout.micro_batch, unit)}"
    )
