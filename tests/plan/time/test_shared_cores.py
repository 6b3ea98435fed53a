"""Ranks that are processes on the cores of one CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import parse
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.simulation import simulate as simulate_alone
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.search.constraints import Constraints
from fivefold.plan.search.search import search
from fivefold.plan.time.operations import layer_operations
from fivefold.plan.time.shared_cores import simulate as simulate_shared
from fivefold.plan.time.stages import simulate
from fivefold.plan.time.step import estimate_time
from tests.parallel.dry import TINY
from tests.plan.cpu import cluster

BIG = TINY | {"hidden_size": 240, "intermediate_size": 480, "head_dim": 20, "num_hidden_layers": 4}

MIXTURE = BIG | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}


def job(processes: int, global_batch: int = 8, **changes) -> Job:
    return Job(
        load_config(BIG),
        cluster(processes, **changes),
        sequence_length=128,
        global_batch=global_batch,
        precision="fp32",
        engine=ENGINES["fivefold"],
    )


def step_s(text: str, cores: int = 2, **changes) -> float:
    layout = parse(text)
    (found,) = simulate(
        job(layout.world_size, layout.global_batch, cores=cores, **changes), [layout]
    )
    return found.step_s


# One pipeline on shared cores


def passes(schedule, forward: float, backward: float) -> dict[str, list[float]]:
    """Of each kind of action; a split backward's halves take as long as each other."""
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return {kind: [each] * schedule.stages for kind, each in seconds.items()}


def test_a_pipeline_with_a_core_for_each_process_runs_as_on_devices():
    schedule = build("1f1b", 4, 1, 8)
    shared = simulate_shared(schedule, passes(schedule, 1, 2), passes(schedule, 0, 0), 0.1, 2, 8)
    assert shared.seconds == pytest.approx(simulate_alone(schedule, 1, 2, 0.1).step_s)
    assert shared.slowdowns == pytest.approx([1.0] * 4)


def test_on_one_core_a_pipeline_takes_all_the_work_there_is():
    schedule = build("1f1b", 4, 1, 8)
    shared = simulate_shared(schedule, passes(schedule, 1, 2), passes(schedule, 0, 0), 0.0, 1, 1)
    assert shared.seconds == pytest.approx(4 * 8 * 3)


def test_bubbles_cost_less_where_other_ranks_want_the_core():
    """Two cores for four ranks: more than the work, less than with half of a core for each."""
    schedule = build("1f1b", 4, 1, 8)
    shared = simulate_shared(schedule, passes(schedule, 1, 2), passes(schedule, 0, 0), 0.0, 1, 2)
    assert 4 * 8 * 3 / 2 <= shared.seconds < 2 * simulate_alone(schedule, 1, 2).step_s
    assert all(1.0 < slowdown < 2.0 for slowdown in shared.slowdowns)


def test_a_wait_leaves_the_core_to_others():
    """Two ranks on one core: while one waits for messages the other works."""
    schedule = build("1f1b", 2, 1, 8)
    work, waits = passes(schedule, 1, 1), passes(schedule, 1, 1)
    shared = simulate_shared(schedule, work, waits, 0.0, 1, 1)
    one_after_the_other = 2 * 8 * 2 * 2
    assert 2 * 8 * 2 <= shared.seconds < 0.8 * one_after_the_other


@pytest.mark.parametrize(
    "name, vpp", [("gpipe", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]
)
def test_work_is_never_done_faster_than_the_cores_can(name, vpp):
    schedule = build(name, 4, vpp, 8)
    shared = simulate_shared(schedule, passes(schedule, 1, 2), passes(schedule, 0.1, 0.2), 0, 2, 3)
    work = 2 * 8 * 3 * schedule.stages
    assert work / 3 <= shared.seconds < 2 * work / 3


def test_a_step_so_long_that_rounding_hides_the_rest_of_an_action_ends():
    schedule = build("1f1b", 2, 1, 64)
    work = {"F": [1370.0, 1507.0], "B": [2740.0, 3151.0]}
    waits = {"F": [0.0, 0.001], "B": [0.0, 0.003]}
    shared = simulate_shared(schedule, work, waits, 1e-4, 3, 2)
    all_work = 64 * 3 * sum(work["F"] + work["B"])
    assert all_work / 2 <= shared.seconds < 1.1 * all_work / 2


# Whole layouts


def test_two_processes_on_two_cores_halve_the_work_and_on_one_core_they_do_not():
    alone, two = step_s("mb2 ga4"), step_s("dp2 mb2 ga2")
    assert 0.5 * alone < two < 0.65 * alone
    assert step_s("dp2 mb2 ga2", cores=1) > alone


def test_more_processes_than_cores_gain_nothing():
    assert step_s("dp8 mb1 ga1") > step_s("dp2 mb1 ga4")


def test_messages_cost_their_part_of_the_core_and_their_wait():
    cheap, dear = step_s("tp2 mb2 ga4"), step_s("tp2 mb2 ga4", busy_s=12e-4)
    messages = 4 * (4 * 2 * 2 + 1 + 1 + 2)  # micro-batches; layers, embedding, head and loss
    assert dear - cheap == pytest.approx(messages * 1e-3, rel=0.1)
    assert step_s("tp2 mb2 ga4", wait_s=13e-4) > cheap + 4 * 4 * 2 * 1e-3


def test_an_estimate_says_where_the_step_goes():
    layout = parse("dp2 tp2 pp2 mb1 ga4")
    found = estimate(job(8), layout)
    assert sum(found.seconds.values()) == pytest.approx(found.step_time_s)
    assert found.seconds["exposed_tp"] > 0
    assert all(value >= -1e-12 for value in found.seconds.values()), found.seconds


def test_compute_takes_as_much_longer_as_the_cores_are_shared():
    one, eight = estimate(job(1), parse("mb1 ga8")), estimate(job(8), parse("dp8 mb1 ga1"))
    assert eight.seconds["compute"] == pytest.approx(one.seconds["compute"] / 2, rel=1e-3)


def test_a_search_finds_the_same_best_layout_as_looking_at_each():
    asked = job(4)
    best = search(asked, Constraints(top=5)).best
    again = simulate(asked, [each.layout for each in best])
    assert np.argmin([each.step_s for each in again]) == 0
    assert best[0].step_time_s == pytest.approx(again[0].step_s)


@pytest.mark.parametrize("text", ["ga64", "dp2 ga64", "pp4 ga64", "pp2 vpp2 dp2 ga64"])
def test_a_long_step_goes_on_at_the_pace_of_its_first_rounds(text):
    layout = parse(text)
    asked = job(layout.world_size, layout.global_batch)
    [found] = simulate(asked, [layout])
    stages = found.stages
    rows = stages.forward_s, stages.backward_s, stages.weight_s
    table = build(layout.schedule, layout.pp, layout.vpp, layout.accumulation)
    waits = {kind: [0.0] * layout.stages for kind in "FBIW"}
    roles = [stages.time.ranks[stages.role_of(stage % layout.pp)] for stage in range(layout.stages)]
    for stage, role in enumerate(roles):
        waits["F"][stage] = float(np.ravel(role.waits.forward)[0]) / layout.vpp
        waits["B"][stage] = float(np.ravel(role.waits.backward)[0]) / layout.vpp
    send = float(np.ravel(stages.time.ranks["middle"].send)[0])
    whole = simulate_shared(
        table, {"F": rows[0], "B": rows[1]}, waits, send, layout.world_size / layout.pp, 2
    )
    assert found.pipeline_s == pytest.approx(whole.seconds, rel=0.02)


def test_a_table_of_ones_own_is_planned_with_all_its_micro_batches():
    path = str(Path(__file__).resolve().parents[3] / "examples" / "own-schedule.csv")
    layout = replace(parse("pp2 ga8"), schedule=path)
    own, usual = (simulate(job(2), [each])[0].step_s for each in (layout, parse("pp2 ga8")))
    assert 0.5 * usual < own < 2 * usual


# Experts with more tokens than others


def uneven(cores: int, imbalance: float) -> Estimate:
    layout = parse("dp4 ep4 mb2")
    config = load_config(MIXTURE)
    machine = cluster(4, cores=cores)
    return estimate(
        Job(config, machine, 128, 8, "fp32", ENGINES["fivefold"], imbalance=imbalance), layout
    )


def test_ranks_with_cores_of_their_own_wait_for_the_busiest_experts() -> None:
    even, busy = uneven(4, 1.0), uneven(4, 2.0)
    assert busy.step_time_s > 1.02 * even.step_time_s
    assert busy.seconds["compute"] == pytest.approx(even.seconds["compute"])
    longer = busy.step_time_s - even.step_time_s
    assert busy.seconds["exposed_ep"] - even.seconds["exposed_ep"] == pytest.approx(longer)
    assert sum(busy.seconds.values()) == pytest.approx(busy.step_time_s)


def test_on_shared_cores_those_who_wait_leave_theirs_to_the_busiest() -> None:
    assert uneven(2, 2.0).step_time_s == pytest.approx(uneven(2, 1.0).step_time_s)
    assert uneven(2, 3.0).step_time_s > uneven(2, 1.0).step_time_s


def test_with_all_experts_on_each_rank_there_is_no_busiest_one() -> None:
    even, uneven = (
        flops_of(Job(load_config(MIXTURE), cluster(4), 128, 8, "fp32", imbalance=imbalance))
        for imbalance in (1.0, 3.0)
    )
    assert uneven == even


def flops_of(job: Job) -> list[float]:
    """Floating-point operations of the products of a layer with experts, on ranks that have all."""
    operations = layer_operations(
        job, LayoutBatch.of([parse("dp4 mb2")]), job.config.layer_kinds[0]
    )
    return [float(np.sum(product.flops)) for product in operations.products]


def test_the_step_by_formula_waits_for_them_as_the_simulated_one() -> None:
    for cores in (2, 4):
        machine = cluster(4, cores=cores)
        uneven_job = Job(
            load_config(MIXTURE), machine, 128, 8, "fp32", ENGINES["fivefold"], imbalance=3.0
        )
        layouts = LayoutBatch.of([parse("dp4 ep4 mb2")])
        time = estimate_time(uneven_job, layouts, machine.device.constants)
        assert time.step[0] == pytest.approx(uneven(cores, 3.0).step_time_s, rel=1e-6)
