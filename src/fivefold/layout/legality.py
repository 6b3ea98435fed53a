"""The rules a layout must keep, each stated once: a condition and a sentence.

Rules need more or less knowledge and are grouped by it: the layout alone, whether it will be run,
the number of devices, the model, the sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fivefold.arrays import Elementwise
from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.degrees import ORDER, PLANNED_SCHEDULES, RECOMPUTE, SCHEDULES, Degrees
from fivefold.layout.model_rules import (
    MODEL_RULES,
    TP_RULES,
    moe_tokens_divide_over_tp,
    sequence_divides_evenly,
)
from fivefold.layout.notation import FIELDS, Layout, world_size_error
from fivefold.layout.rule import Rule, broken, is_one_of, rule
from fivefold.layout.schedule_rules import SCHEDULE_RULES, has_file
from fivefold.model.config import ModelConfig
from fivefold.text import divisors, join_or, nearest_choices, product


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
) -> Iterator[tuple[tuple[Rule, ...], tuple[object, ...]]]:
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


def _degrees(layout: Degrees) -> dict[str, Elementwise]:
    return {name: getattr(layout, FIELDS.get(name, name)) for name in COUNTED}


@rule(lambda layout: np.all([degree >= 1 for degree in _degrees(layout).values()], axis=0))
def degrees_are_positive(layout: Layout) -> str:
    name, degree = next(item for item in _degrees(layout).items() if item[1] < 1)
    return f"{name} must be 1 or more, not {degree}"


@rule(lambda layout: (layout.zero >= 0) & (layout.zero <= 3))
def zero_stage_exists(layout: Layout) -> str:
    return f"zero must be a ZeRO stage from 0 to 3, not {layout.zero}"


@rule(lambda layout: is_one_of(layout.recompute, RECOMPUTE))
def recompute_mode_is_known(layout: Layout) -> str:
    return f"recompute={layout.recompute} is not known: it may be {join_or(RECOMPUTE)}"


@rule(
    lambda layout: is_one_of(layout.schedule, (*SCHEDULES, *PLANNED_SCHEDULES)) | has_file(layout)
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


def _expert_ranks(layout: Degrees) -> Elementwise:
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
        f"EP uses the ranks of DP and CP (with etp 1 those of TP too), and "
        f"{product({'etp': layout.etp, 'ep': layout.ep})} does not divide the "
        f"{product({'tp': layout.tp, 'cp': layout.cp, **dp})} = {ranks} ranks {where}: "
        f"ep may be {choices}"
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
