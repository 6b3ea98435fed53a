"""The rules a layout must keep, each a small function.

A rule returns None, or one sentence: what is wrong, the numbers, the nearest choices that work.
Rules need more or less knowledge and are grouped by it: the layout alone, the number of devices,
the model, the sequence length.
"""

from __future__ import annotations

import math

from fivefold.errors import UserError
from fivefold.layout.notation import ORDER, RECOMPUTE, SCHEDULES, Layout, world_size_error
from fivefold.layout.stages import split_layers
from fivefold.layout.words import (
    divisors,
    join_or,
    nearest_choices,
    nearest_multiples,
    product,
)
from fivefold.model.config import ModelConfig
from fivefold.parallel.pipeline import schedules


def check(
    layout: Layout,
    model: ModelConfig | None = None,
    sequence_length: int | None = None,
    world_size: int | None = None,
) -> None:
    """Raises UserError for the first rule that the layout breaks; see `violations`."""
    broken = violations(layout, model, sequence_length, world_size)
    if broken:
        raise UserError(broken[0])


def violations(
    layout: Layout,
    model: ModelConfig | None = None,
    sequence_length: int | None = None,
    world_size: int | None = None,
) -> list[str]:
    """A sentence for each rule that the layout breaks; empty for a legal layout.

    Rules about what is not given (the model, the sequence length in tokens, the number of devices)
    are left out.
    """
    broken = [rule(layout) for rule in VALUE_RULES]
    if not any(broken):  # the other rules divide by the degrees
        broken += [rule(layout) for rule in LAYOUT_RULES]
        if world_size is not None:
            broken.append(world_size_error(layout, world_size))
        if model is not None:
            broken += _tp_violations(layout, model)
            broken += [rule(layout, model) for rule in MODEL_RULES]
        if sequence_length is not None:
            broken.append(sequence_divides_evenly(layout, sequence_length))
        if model is not None and sequence_length is not None:
            broken.append(moe_tokens_divide_over_tp(layout, model, sequence_length))
    return [sentence for sentence in broken if sentence is not None]


# Each value by itself


def degrees_are_positive(layout: Layout) -> str | None:
    degrees = {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "dp": layout.dp,
        "dp_replicate": layout.dp_replicate,
        "ep": layout.ep,
        "etp": layout.etp,
        "ulysses": layout.ulysses,
        "ring": layout.ring,
        "mb": layout.micro_batch,
        "ga": layout.accumulation,
    }
    for name, degree in degrees.items():
        if degree < 1:
            return f"{name} must be 1 or more, not {degree}"
    return None


def zero_stage_exists(layout: Layout) -> str | None:
    if 0 <= layout.zero <= 3:
        return None
    return f"zero must be a ZeRO stage from 0 to 3, not {layout.zero}"


def names_are_known(layout: Layout) -> str | None:
    if layout.recompute not in RECOMPUTE:
        return f"recompute={layout.recompute} is not known: it may be {join_or(RECOMPUTE)}"
    if layout.schedule not in SCHEDULES:
        return f"schedule={layout.schedule} is not known: it may be {join_or(SCHEDULES)}"
    if sorted(layout.order) != sorted(ORDER):
        return f"order={'-'.join(layout.order)} must name each of {', '.join(ORDER)} once"
    return None


def dp_replicate_divides_dp(layout: Layout) -> str | None:
    if layout.dp < 1 or layout.dp_replicate < 1 or layout.dp % layout.dp_replicate == 0:
        return None
    return (
        f"dp_replicate {layout.dp_replicate} does not divide dp {layout.dp}: "
        f"it may be {nearest_choices(divisors(layout.dp), layout.dp_replicate)}"
    )


VALUE_RULES = (degrees_are_positive, zero_stage_exists, names_are_known, dp_replicate_divides_dp)


# The layout alone


def megatron_sp_needs_tp(layout: Layout) -> str | None:
    if not layout.sp or layout.tp > 1:
        return None
    return "sp splits activations over the tp ranks and there is only tp 1: use tp2, or no sp"


def replicas_need_zero(layout: Layout) -> str | None:
    if layout.dp_replicate == 1 or layout.zero >= 1:
        return None
    return (
        f"dp_replicate {layout.dp_replicate} needs zero1, zero2 or zero3: "
        f"with zero 0 all {layout.dp} dp ranks replicate already"
    )


def zero_needs_ranks_to_shard_over(layout: Layout) -> str | None:
    """ZeRO shards over dp_shard and cp, because weights are replicated over cp as well."""
    if layout.zero == 0 or layout.dp_shard * layout.cp > 1:
        return None
    cure = "a smaller dp_replicate" if layout.dp_replicate > 1 else "dp2 or more"
    return (
        f"zero {layout.zero} has nothing to shard over, for dp_shard {layout.dp_shard} x "
        f"cp {layout.cp} is one rank: use zero0, or {cure}"
    )


def chunks_need_a_pipeline(layout: Layout) -> str | None:
    if layout.vpp == 1 or layout.pp > 1:
        return None
    return f"vpp {layout.vpp} interleaves the chunks of a pipeline, but pp is 1: use vpp1, or pp2"


def schedule_runs(layout: Layout) -> str | None:
    try:
        schedules.check(layout.schedule, layout.pp, layout.vpp, layout.accumulation)
    except UserError as error:
        return str(error)
    return None


def layer_list_has_every_stage(layout: Layout) -> str | None:
    if layout.layers is None:
        return None
    if len(layout.layers) != layout.stages:
        return (
            f"layers= lists {len(layout.layers)} stages, but "
            f"pp {layout.pp} x vpp {layout.vpp} is {layout.stages}"
        )
    if min(layout.layers) < 1:
        stage = layout.layers.index(min(layout.layers))
        return (
            f"layers= gives stage {stage} {layout.layers[stage]} layers: "
            "every stage needs at least 1"
        )
    return None


def etp_is_one_or_tp(layout: Layout) -> str | None:
    if layout.etp in (1, layout.tp):
        return None
    choices = join_or(sorted({1, layout.tp}))
    return f"etp {layout.etp} is neither 1 nor tp {layout.tp}: it may be {choices}"


def experts_have_ranks(layout: Layout) -> str | None:
    """etp * ep * edp are the ranks of a stage; with replicas, of one replica in the stage."""
    if etp_is_one_or_tp(layout):
        return None
    ranks = layout.tp * layout.cp * layout.dp_shard
    if ranks % (layout.etp * layout.ep) == 0:
        return None
    if layout.dp_replicate == 1:
        where, dp = "of a pipeline stage", {"dp": layout.dp}
    else:
        where, dp = "of one dp_replicate copy", {"dp_shard": layout.dp_shard}
    choices = nearest_choices(divisors(ranks // layout.etp), layout.ep)
    return (
        f"EP needs DP or CP ranks to live on (with etp 1 also TP ranks), and "
        f"{product({'etp': layout.etp, 'ep': layout.ep})} does not divide the "
        f"{product({'tp': layout.tp, 'cp': layout.cp, **dp})} = {ranks} ranks {where}: "
        f"ep may be {choices}"
    )


LAYOUT_RULES = (
    megatron_sp_needs_tp,
    replicas_need_zero,
    zero_needs_ranks_to_shard_over,
    chunks_need_a_pipeline,
    schedule_runs,
    layer_list_has_every_stage,
    etp_is_one_or_tp,
    experts_have_ranks,
)


# What tp splits in the model. These return the first half of a sentence; the second is the degrees
# that all of them allow.


def heads_divide_over_tp(tp: int, model: ModelConfig) -> str | None:
    if model.num_heads % tp == 0:
        return None
    return f"tp {tp} does not divide {model.num_heads} attention heads"


def kv_heads_divide_over_tp(tp: int, model: ModelConfig) -> str | None:
    """Fewer kv heads than ranks are repeated, which needs as many ranks for each."""
    if model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0:
        return None
    return f"tp {tp} neither divides {model.num_kv_heads} kv heads nor is a multiple of them"


def mlp_divides_over_tp(tp: int, model: ModelConfig) -> str | None:
    has_dense_mlp = model.moe is None or not all(model.moe.layers)
    if not has_dense_mlp or model.intermediate_size % tp == 0:
        return None
    return f"tp {tp} does not divide the MLP width {model.intermediate_size}"


def shared_expert_divides_over_tp(tp: int, model: ModelConfig) -> str | None:
    if model.moe is None or model.moe.shared_intermediate_size % tp == 0:
        return None
    return f"tp {tp} does not divide the shared expert's width {model.moe.shared_intermediate_size}"


def vocabulary_reaches_every_tp_rank(tp: int, model: ModelConfig) -> str | None:
    """Each rank holds ceil(vocab_size / tp) rows, the last ones what is left: at least one row."""
    rows = math.ceil(model.vocab_size / tp)
    if rows * (tp - 1) < model.vocab_size:
        return None
    return f"tp {tp} with {rows} rows a rank leaves ranks without any of {model.vocab_size} tokens"


TP_RULES = (
    heads_divide_over_tp,
    kv_heads_divide_over_tp,
    mlp_divides_over_tp,
    shared_expert_divides_over_tp,
    vocabulary_reaches_every_tp_rank,
)


def allowed_tp(model: ModelConfig) -> list[int]:
    """All tensor parallel degrees that the model can be split by, ascending."""
    return [
        tp for tp in divisors(model.num_heads) if all(rule(tp, model) is None for rule in TP_RULES)
    ]


def _tp_violations(layout: Layout, model: ModelConfig) -> list[str]:
    broken = [reason for rule in TP_RULES if (reason := rule(layout.tp, model))]
    if not broken:
        return []
    choices = nearest_choices(allowed_tp(model), layout.tp)
    return [f"{reason}: tp may be {choices}" for reason in broken]


# The rest of the model


def ulysses_divides_heads(layout: Layout, model: ModelConfig) -> str | None:
    """Around attention a rank holds heads / tp / ulysses heads, and kv heads like them."""
    tp = layout.tp
    if heads_divide_over_tp(tp, model) or kv_heads_divide_over_tp(tp, model):
        return None
    heads = model.num_heads // tp
    kv_heads = max(1, model.num_kv_heads // tp)
    allowed = [
        degree for degree in divisors(heads) if kv_heads % degree == 0 or degree % kv_heads == 0
    ]
    if layout.ulysses in allowed:
        return None
    return (
        f"ulysses {layout.ulysses} cannot share out the {heads} heads and {kv_heads} kv heads of a "
        f"rank at tp {tp}: ulysses may be {nearest_choices(allowed, layout.ulysses)}"
    )


def stages_have_layers(layout: Layout, model: ModelConfig) -> str | None:
    if layout.stages > model.num_layers:
        return (
            f"pp {layout.pp} x vpp {layout.vpp} = {layout.stages} stages need a layer each and the "
            f"model has {model.num_layers}: pp x vpp may be up to {model.num_layers}"
        )
    if layout.layers is None or sum(layout.layers) == model.num_layers:
        return None
    example = Layout(layers=split_layers(model.num_layers, layout.stages))
    return (
        f"layers= adds up to {sum(layout.layers)} but the model has {model.num_layers} layers: "
        f"{example} would do"
    )


def expert_splits_need_experts(layout: Layout, model: ModelConfig) -> str | None:
    if model.moe is not None or layout.ep == layout.etp == 1:
        return None
    return (
        f"{product({'ep': layout.ep, 'etp': layout.etp})} splits experts and {model.family} is a "
        "dense model: leave it out"
    )


def ep_divides_experts(layout: Layout, model: ModelConfig) -> str | None:
    if model.moe is None or model.moe.num_experts % layout.ep == 0:
        return None
    experts = model.moe.num_experts
    return (
        f"ep {layout.ep} does not divide {experts} experts: "
        f"ep may be {nearest_choices(divisors(experts), layout.ep)}"
    )


def etp_divides_expert_width(layout: Layout, model: ModelConfig) -> str | None:
    if model.moe is None or model.moe.expert_intermediate_size % layout.etp == 0:
        return None
    return (
        f"etp {layout.etp} does not divide the expert width {model.moe.expert_intermediate_size}: "
        "use etp1, which keeps experts whole"
    )


MODEL_RULES = (
    ulysses_divides_heads,
    stages_have_layers,
    expert_splits_need_experts,
    ep_divides_experts,
    etp_divides_expert_width,
)


# The sequence length


def sequence_divides_evenly(layout: Layout, sequence_length: int) -> str | None:
    """A ring rank takes one early and one late piece, which evens out causal attention's work."""
    pieces = {
        "ulysses": layout.ulysses,
        "ring": layout.ring,
        "pieces a ring rank": 2 if layout.ring > 1 else 1,
        "tp (of sp)": layout.tp if layout.sp else 1,
    }
    unit = math.prod(pieces.values())
    if sequence_length > 0 and sequence_length % unit == 0:
        return None
    return (
        f"sequence length {sequence_length} is not a multiple of {product(pieces)} = {unit}: "
        f"the nearest is {nearest_multiples(sequence_length, unit)}"
    )


def moe_tokens_divide_over_tp(
    layout: Layout, model: ModelConfig, sequence_length: int
) -> str | None:
    """The tp ranks hold the same tokens, and each sends its share of them to the experts."""
    if model.moe is None or sequence_length % layout.cp:
        return None
    sequence = sequence_length // layout.cp
    tokens = layout.micro_batch * sequence
    if tokens % layout.tp == 0:
        return None
    unit = layout.tp // math.gcd(layout.tp, sequence)
    return (
        f"a micro-batch of mb {layout.micro_batch} x {sequence} tokens on a rank does not divide "
        f"over tp {layout.tp}, as the MoE layers need: "
        f"mb may be {nearest_multiples(layout.micro_batch, unit)}"
    )
