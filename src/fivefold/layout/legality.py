"""The rules a layout must keep, each stated once: a condition and a sentence.

The condition is elementwise, so that it holds for one `Layout`, or says which of a `LayoutBatch`
keep it. The sentence is about one layout that does not: what is wrong, the numbers, the nearest
choices that work. Rules need more or less knowledge and are grouped by it: the layout alone,
whether it will be run, the number of devices, the model, the sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.layout.actions import is_table_file, read_table
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import (
    FIELDS,
    ORDER,
    PLANNED_SCHEDULES,
    RECOMPUTE,
    SCHEDULES,
    Degrees,
    Layout,
    world_size_error,
)
from fivefold.layout.stages import split_layers
from fivefold.model.config import ModelConfig
from fivefold.text import (
    divisors,
    join_or,
    nearest_choices,
    nearest_multiples,
    product,
)


@dataclass(frozen=True)
class Rule:
    """`holds` says elementwise whether a layout keeps the rule, given what the rule is about;
    `sentence` says, given the same, how one layout breaks it."""

    holds: Callable[..., Any]
    sentence: Callable[..., str]


def rule(holds: Callable[..., Any]) -> Callable[[Callable[..., str]], Rule]:
    """Makes a function that gives the sentence the rule whose condition is `holds`."""
    return lambda sentence: Rule(holds, sentence)


def broken(rules: Iterable[Rule], *subject: Any) -> Iterator[str]:
    """The sentences of the rules that one layout breaks."""
    return (each.sentence(*subject) for each in rules if not each.holds(*subject))


def check(
    layout: Layout,
    model: ModelConfig | None = None,
    sequence_length: int | None = None,
    world_size: int | None = None,
) -> None:
    """Raises UserError for the first rule that a layout to be run breaks; see `violations`."""
    sentences = violations(layout, model, sequence_length, world_size)
    if sentences:
        raise UserError(sentences[0])


def violations(
    layout: Layout,
    model: ModelConfig | None = None,
    sequence_length: int | None = None,
    world_size: int | None = None,
    running: bool = True,
) -> list[str]:
    """A sentence for each rule that the layout breaks; empty for a legal layout.

    Rules about what is not given (the model, the sequence length in tokens, the number of devices)
    are left out, and so is for a plan, not `running`, that there must be a program for it.
    """
    values = list(broken(VALUE_RULES, layout))
    if values:  # the other rules divide by the degrees
        return values
    groups = _groups(layout, model, sequence_length, world_size, running)
    return [sentence for rules, subject in groups for sentence in broken(rules, *subject)]


def legal(
    layouts: LayoutBatch,
    model: ModelConfig | None = None,
    sequence_length: int | None = None,
    world_size: int | None = None,
    running: bool = False,
) -> NDArray[np.bool_]:
    """Which of many layouts break no rule [n]: those for which `violations` is empty."""
    result = np.ones(len(layouts), bool)
    for each in VALUE_RULES:
        result &= each.holds(layouts)
    if not result.all():  # the other rules divide by the degrees
        result[result] = legal(layouts.take(result), model, sequence_length, world_size, running)
        return result
    for rules, subject in _groups(layouts, model, sequence_length, world_size, running):
        for each in rules:
            result &= each.holds(*subject)
    return result


def _groups(
    layout: Degrees,
    model: ModelConfig | None,
    sequence_length: int | None,
    world_size: int | None,
    running: bool,
) -> Iterator[tuple[tuple[Rule, ...], tuple[Any, ...]]]:
    """The rules that what is known allows to ask for, each group with what it is about."""
    if running:
        yield RUN_RULES, (layout,)
    yield LAYOUT_RULES, (layout,)
    if world_size is not None:
        yield (ranks_are_the_devices,), (layout, world_size)
    if model is not None:
        yield TP_RULES, (layout.tp, model)
        yield MODEL_RULES, (layout, model)
    if sequence_length is not None:
        yield (sequence_divides_evenly,), (layout, sequence_length)
    if model is not None and sequence_length is not None:
        yield (moe_tokens_divide_over_tp,), (layout, model, sequence_length)


# Each value by itself

COUNTED = ("tp", "pp", "vpp", "dp", "dp_replicate", "ep", "etp", "ulysses", "ring", "mb", "ga")
"""The tokens whose value is 1 or more."""


def _degrees(layout: Degrees) -> dict[str, Any]:
    return {name: getattr(layout, FIELDS.get(name, name)) for name in COUNTED}


@rule(lambda layout: np.all([degree >= 1 for degree in _degrees(layout).values()], axis=0))
def degrees_are_positive(layout: Layout) -> str:
    name, degree = next(item for item in _degrees(layout).items() if item[1] < 1)
    return f"{name} must be 1 or more, not {degree}"


@rule(lambda layout: (layout.zero >= 0) & (layout.zero <= 3))
def zero_stage_exists(layout: Layout) -> str:
    return f"zero must be a ZeRO stage from 0 to 3, not {layout.zero}"


@rule(lambda layout: _is_one_of(layout.recompute, RECOMPUTE))
def recompute_mode_is_known(layout: Layout) -> str:
    return f"recompute={layout.recompute} is not known: it may be {join_or(RECOMPUTE)}"


@rule(
    lambda layout: _is_one_of(layout.schedule, (*SCHEDULES, *PLANNED_SCHEDULES)) | _has_file(layout)
)
def schedule_is_known(layout: Layout) -> str:
    known = (*SCHEDULES, *PLANNED_SCHEDULES, "a file, table.csv")
    return f"schedule={layout.schedule} is not known: it may be {join_or(known)}"


@rule(lambda layout: sorted(layout.order) == sorted(ORDER))
def order_names_each_axis(layout: Layout) -> str:
    return f"order={'-'.join(layout.order)} must name each of {', '.join(ORDER)} once"


@rule(lambda layout: (layout.dp < 1) | (layout.dp % np.maximum(1, layout.dp_replicate) == 0))
def dp_replicate_divides_dp(layout: Layout) -> str:
    return (
        f"dp_replicate {layout.dp_replicate} does not divide dp {layout.dp}: "
        f"it may be {nearest_choices(divisors(layout.dp), layout.dp_replicate)}"
    )


def _is_one_of(value: Any, names: tuple[str, ...]) -> Any:
    return np.any([value == name for name in names], axis=0)


def _has_file(layout: Degrees) -> bool:
    """Is the schedule a table in a file? Of many layouts none is: those are planned."""
    return isinstance(layout.schedule, str) and is_table_file(layout.schedule)


VALUE_RULES = (
    degrees_are_positive,
    zero_stage_exists,
    recompute_mode_is_known,
    schedule_is_known,
    order_names_each_axis,
    dp_replicate_divides_dp,
)


# A layout that will be run


@rule(lambda layout: np.logical_not(layout.is_bidirectional))
def stages_have_one_copy(layout: Layout) -> str:
    return (
        f"schedule={layout.schedule} can be planned, not run: it keeps two copies of the stages; "
        "the nearest that runs has one, schedule=dualpipe-v with vpp2"
    )


RUN_RULES = (stages_have_one_copy,)


# The layout alone


@rule(lambda layout: np.logical_not(layout.sp) | (layout.tp > 1))
def megatron_sp_needs_tp(layout: Layout) -> str:
    return "sp splits activations over the tp ranks and there is only tp 1: use tp2, or no sp"


@rule(lambda layout: (layout.dp_replicate == 1) | (layout.zero >= 1))
def replicas_need_zero(layout: Layout) -> str:
    return (
        f"dp_replicate {layout.dp_replicate} needs zero1, zero2 or zero3: "
        f"with zero 0 all {layout.dp} dp ranks replicate already"
    )


@rule(lambda layout: (layout.zero == 0) | (layout.dp_shard * layout.cp > 1))
def zero_needs_ranks_to_shard_over(layout: Layout) -> str:
    """ZeRO shards over dp_shard and cp, because weights are replicated over cp as well."""
    cure = "a smaller dp_replicate" if layout.dp_replicate > 1 else "dp2 or more"
    return (
        f"zero {layout.zero} has nothing to shard over, for dp_shard {layout.dp_shard} x "
        f"cp {layout.cp} is one rank: use zero0, or {cure}"
    )


@rule(
    lambda layout: (
        (layout.recompute_layers == 0)
        | ((layout.recompute_layers > 0) & (layout.recompute == "full"))
    )
)
def recomputed_layers_are_recomputed_in_full(layout: Layout) -> str:
    return (
        f"recompute={layout.recompute} takes no number of layers, and there is "
        f"{layout.recompute_layers}: write recompute=full:4 for the first 4 of each stage"
    )


@rule(lambda layout: (layout.vpp == 1) | (layout.pp > 1))
def chunks_need_a_pipeline(layout: Layout) -> str:
    return f"vpp {layout.vpp} interleaves the chunks of a pipeline, but pp is 1: use vpp1, or pp2"


@rule(lambda layout: layout.layers is None or len(layout.layers) == layout.stages)
def layer_list_has_every_stage(layout: Layout) -> str:
    assert layout.layers is not None
    return (
        f"layers= lists {len(layout.layers)} stages, but "
        f"pp {layout.pp} x vpp {layout.vpp} is {layout.stages}"
    )


@rule(lambda layout: layout.layers is None or min(layout.layers, default=1) >= 1)
def listed_stages_have_layers(layout: Layout) -> str:
    assert layout.layers is not None
    stage = layout.layers.index(min(layout.layers))
    return (
        f"layers= gives stage {stage} {layout.layers[stage]} layers: every stage needs at least 1"
    )


@rule(lambda layout: (layout.etp == 1) | (layout.etp == layout.tp))
def etp_is_one_or_tp(layout: Layout) -> str:
    choices = join_or(sorted({1, layout.tp}))
    return f"etp {layout.etp} is neither 1 nor tp {layout.tp}: it may be {choices}"


def _expert_ranks(layout: Degrees) -> Any:
    """What etp * ep * edp shares out: a stage; with replicas, one replica in the stage."""
    return layout.tp * layout.cp * layout.dp_shard


@rule(
    lambda layout: (
        (_expert_ranks(layout) % (layout.etp * layout.ep) == 0)
        | np.logical_not(etp_is_one_or_tp.holds(layout))
    )
)
def experts_have_ranks(layout: Layout) -> str:
    ranks = _expert_ranks(layout)
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


# What each schedule can run


@rule(lambda layout: (layout.schedule != "gpipe") | (layout.vpp == 1))
def gpipe_has_one_chunk(layout: Layout) -> str:
    return (
        f"schedule gpipe runs one chunk a rank but vpp is {layout.vpp}: use vpp1, or "
        "schedule=1f1b, which interleaves the chunks, or schedule=bfs, gpipe with chunks"
    )


@rule(lambda layout: (layout.schedule != "bfs") | (layout.vpp > 1))
def breadth_first_has_chunks(layout: Layout) -> str:
    return (
        f"schedule=bfs runs one chunk of a rank after the other but vpp is {layout.vpp}: use vpp2, "
        "or schedule=gpipe, which is bfs with one chunk"
    )


@rule(
    lambda layout: (
        (layout.vpp == 1) | (layout.schedule != "1f1b") | (layout.accumulation % layout.pp == 0)
    )
)
def interleaving_fills_the_ranks(layout: Layout) -> str:
    pp, micro_batches = layout.pp, layout.accumulation
    below = max(pp, micro_batches // pp * pp)
    return (
        f"interleaved 1F1B (vpp{layout.vpp}) needs a number of micro-batches that is a multiple of "
        f"pp {pp}, not {micro_batches}: the nearest that work are {below} and {below + pp}"
    )


def _has_fixed_chunks(layout: Degrees) -> Any:
    """Is the schedule one for a certain number of chunks, and for a pipeline only?"""
    return (layout.schedule == "zb-h1") | layout.is_bidirectional | _is_v(layout)


def _is_v(layout: Degrees) -> Any:
    return _is_one_of(layout.schedule, ("zb-v", "dualpipe-v"))


@rule(lambda layout: (layout.pp > 1) | np.logical_not(_has_fixed_chunks(layout)))
def schedule_has_a_pipeline(layout: Layout) -> str:
    return f"schedule={layout.schedule} orders the work of a pipeline, but pp is 1: use pp2 or 1f1b"


@rule(lambda layout: np.logical_not(_has_fixed_chunks(layout)) | (layout.vpp == 1 + _is_v(layout)))
def schedule_has_its_chunks(layout: Layout) -> str:
    chunks = 1 + layout.is_v_shaped
    return f"schedule={layout.schedule} is for vpp {chunks}, not vpp {layout.vpp}: use vpp{chunks}"


@rule(
    lambda layout: (
        np.logical_not(layout.is_bidirectional | (layout.schedule == "dualpipe-v"))
        | (layout.accumulation >= 2 * layout.pp)
    )
)
def dualpipe_is_filled(layout: Layout) -> str:
    return (
        f"schedule={layout.schedule} needs 2 x pp {layout.pp} = {2 * layout.pp} micro-batches or "
        f"more, not {layout.accumulation}: use ga{2 * layout.pp}"
    )


@rule(
    lambda layout: (
        np.logical_not(layout.is_bidirectional)
        | ((layout.pp % 2 == 0) & (layout.accumulation % 2 == 0))
    )
)
def dualpipe_halves_ranks_and_micro_batches(layout: Layout) -> str:
    return (
        f"schedule=dualpipe halves the ranks and the micro-batches, and pp {layout.pp} or "
        f"ga {layout.accumulation} is odd: use pp{layout.pp + layout.pp % 2} "
        f"ga{layout.accumulation + layout.accumulation % 2}, or dualpipe-v"
    )


def _file_degrees(layout: Layout) -> dict[str, int]:
    file = read_table(layout.schedule)
    return {"pp": file.pp, "vpp": file.vpp, "ga": file.micro_batches}


@rule(
    lambda layout: (
        not _has_file(layout)
        or _file_degrees(layout) == {"pp": layout.pp, "vpp": layout.vpp, "ga": layout.accumulation}
    )
)
def table_is_for_the_layout(layout: Layout) -> str:
    wanted = " ".join(f"{name}{value}" for name, value in _file_degrees(layout).items())
    return (
        f"{layout.schedule} is a table for {wanted}, not for pp{layout.pp} vpp{layout.vpp} "
        f"ga{layout.accumulation}: change the layout, or the global batch, from which ga follows"
    )


SCHEDULE_RULES = (
    gpipe_has_one_chunk,
    breadth_first_has_chunks,
    interleaving_fills_the_ranks,
    schedule_has_a_pipeline,
    schedule_has_its_chunks,
    dualpipe_is_filled,
    dualpipe_halves_ranks_and_micro_batches,
    table_is_for_the_layout,
)

LAYOUT_RULES = (
    megatron_sp_needs_tp,
    replicas_need_zero,
    zero_needs_ranks_to_shard_over,
    recomputed_layers_are_recomputed_in_full,
    chunks_need_a_pipeline,
    *SCHEDULE_RULES,
    layer_list_has_every_stage,
    listed_stages_have_layers,
    etp_is_one_or_tp,
    experts_have_ranks,
)


# The number of devices


@rule(lambda layout, world_size: layout.world_size == world_size)
def ranks_are_the_devices(layout: Layout, world_size: int) -> str:
    return world_size_error(layout, world_size) or ""


# What tp splits in the model


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


def _vocabulary_rows(model: ModelConfig, tp: Any) -> Any:
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


def _tp_rank_heads(tp: Any, model: ModelConfig) -> tuple[Any, Any]:
    """Heads and kv heads of one tp rank."""
    return model.num_heads // tp, np.maximum(1, model.num_kv_heads // tp)


def _ulysses_fits(ulysses: Any, tp: Any, model: ModelConfig) -> Any:
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


def _largest_stage(layout: Degrees, model: ModelConfig) -> Any:
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


def _sequence_pieces(layout: Degrees) -> dict[str, Any]:
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
