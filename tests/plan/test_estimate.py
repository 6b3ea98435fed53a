from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from fivefold.cluster.load import load_cluster
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import ModelConfig
from fivefold.model.counts import flops_per_token
from fivefold.model.huggingface.presets import config_from_dimensions, load_model
from fivefold.parallel.cost import ledger
from fivefold.plan.engines import Job
from fivefold.plan.estimate import estimate
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.time.stages import SIMULATED_ROUNDS, simulate
from fivefold.plan.time.step import estimate_time

DENSE = config_from_dimensions("hidden=4096,layers=24,heads=32,kv_heads=8,ffn=14336,vocab=128256")
MIXTURE = config_from_dimensions(
    "hidden=2048,layers=12,heads=16,kv_heads=4,ffn=6144,vocab=32000,"
    "experts=16,topk=2,moe_ffn=1408,dense_layers=1"
)
LAYOUTS = [
    (DENSE, "dp32 zero1"),
    (DENSE, "tp8 sp pp4 zero1 mb1"),
    (DENSE, "tp2 sp pp4 vpp3 dp4 zero1 recompute=full:1"),
    (DENSE, "tp2 pp2 dp4 ulysses2 zero3 recompute=selective"),
    (DENSE, "tp4 sp pp8 layers=2,3,3,3,3,3,4,3"),
    (DENSE, "pp4 dp8 schedule=gpipe recompute=full"),
    (DENSE, "pp4 dp8 schedule=zb-h1"),
    (DENSE, "pp4 vpp2 dp8 schedule=dualpipe-v"),
    (MIXTURE, "tp2 sp pp4 dp4 ep4 zero1"),
    (MIXTURE, "tp2 sp dp16 ep8 etp2 zero2"),
    (MIXTURE, "pp2 dp8 ring2 ep8 zero1"),
]


def case(config: ModelConfig, text: str, global_batch: int = 256) -> tuple[Job, Layout]:
    job = Job(config, load_cluster("dgx-h100", 32), 4096, global_batch)
    layout = parse(text, 32)
    return job, replace(layout, accumulation=global_batch // (layout.dp * layout.micro_batch))


@pytest.mark.parametrize(("config", "text"), LAYOUTS)
def test_the_parts_of_a_step_add_up(config, text: str):
    each = estimate(*case(config, text))
    assert sum(each.seconds.values()) == pytest.approx(each.step_time_s)
    for split in {row.split for row in each.ledger}:
        exposed = sum(row.exposed_s for row in each.ledger if row.split == split)
        assert each.seconds[f"exposed_{split}"] == pytest.approx(exposed)
    for row in each.ledger:
        assert 0 <= row.exposed_s <= row.time_s * (1 + 1e-9)
    # Nothing but messages beside it slows compute, and only as much as the device's constant says.
    contention = load_cluster("dgx-h100", 32).device.constants.contention
    beside = [row for row in each.ledger if (row.split, row.op) != ("pp", "send")]
    hidden = sum(row.time_s - row.exposed_s for row in beside)
    assert each.seconds["slowed"] == pytest.approx(contention * hidden, rel=1e-6, abs=1e-9)
    assert each.seconds["bubble"] >= -1e-9


@pytest.mark.parametrize(("config", "text"), LAYOUTS)
def test_the_simulated_pipeline_agrees_with_the_formula_of_the_search(config, text: str):
    job, layout = case(config, text)
    constants = job.cluster.device.constants
    by_formula = np.asarray(estimate_time(job, LayoutBatch.of([layout]), constants).step)[0]
    assert estimate(job, layout).step_time_s == pytest.approx(by_formula, rel=0.05)


def test_long_steps_are_simulated_in_part_with_the_same_result(monkeypatch):
    job, layout = case(DENSE, "tp4 sp pp4 vpp2 dp2 zero1")
    assert layout.accumulation > 2 * SIMULATED_ROUNDS * layout.pp
    in_part = simulate(job, [layout])[0].step_s
    monkeypatch.setattr("fivefold.plan.time.stages.SIMULATED_ROUNDS", 10**6)
    assert simulate(job, [layout])[0].step_s == pytest.approx(in_part, rel=1e-9)


def test_a_heavier_stage_slows_the_whole_pipeline():
    job, even = case(DENSE, "tp4 sp pp8")
    uneven = replace(even, layers=(3, 3, 3, 9, 1, 1, 1, 3))
    assert estimate(job, uneven).step_time_s > 1.2 * estimate(job, even).step_time_s
    stages = estimate(job, uneven).stages
    assert [stage.layers for stage in stages] == [[n] for n in uneven.layers or ()]
    assert stages[3].forward_s / stages[2].forward_s == pytest.approx(9 / 3, rel=0.01)


def test_rates_follow_from_the_step_time():
    job, layout = case(DENSE, "tp8 sp pp4 zero1")
    each = estimate(job, layout)
    tokens = 256 * 4096 / each.step_time_s / 32
    assert each.tokens_per_s_per_device == pytest.approx(tokens)
    causal = flops_per_token(DENSE, 4096, causal=True)
    assert each.model_flops_per_s_per_device == pytest.approx(tokens * causal)
    assert each.mfu == pytest.approx(tokens * causal / 989.4e12, rel=1e-3)
    full = flops_per_token(DENSE, 4096, causal=False)
    assert each.mfu_full_attention == pytest.approx(each.mfu * full / causal)


def test_the_ledger_is_that_of_the_runtime():
    """Its traffic is what the costs of the five splits say of one rank of that stage."""
    job, layout = case(DENSE, "tp4 sp pp2 dp4 zero1")
    job = replace(job, engine=replace(job.engine, flat_shards=False))
    each = estimate(job, layout)
    stage = each.ledger[0].stage
    rank = stage * layout.world_size // layout.pp
    expected = [t for t in ledger(DENSE, layout, 4096, rank, "bf16") if t.split != "world"]
    for split in ("tp", "pp", "dp"):
        sent = sum(row.wire_bytes for row in each.ledger if row.split == split)
        assert sent == pytest.approx(sum(t.wire_bytes for t in expected if t.split == split))


def test_the_placement_names_the_tiers_that_each_split_crosses():
    job, layout = case(DENSE, "tp8 sp pp2 dp2 zero1")
    near, far = job.cluster.tiers[0].name, job.cluster.tiers[-1].name
    placement = estimate(job, layout).placement
    assert placement["tp"] == near
    assert placement["pp"] == far
    outside = estimate(job, replace(layout, order=("dp", "pp", "tp", "cp", "ep"))).placement
    assert outside["tp"] != near


def test_the_worst_stage_has_the_peak():
    job, layout = case(DENSE, "tp2 sp pp4 dp4 zero1")
    each = estimate(job, layout)
    totals = [sum(stage.memory_bytes.values()) for stage in each.stages]
    assert each.worst_stage == totals.index(max(totals))
    assert each.peak_memory_bytes == pytest.approx(max(totals))
    assert sum(each.memory_bytes.values()) == pytest.approx(max(totals))
    searched = estimate_memory(job, LayoutBatch.of([layout])).peak_bytes
    assert each.peak_memory_bytes == pytest.approx(float(searched[0]), rel=0.01)


def test_a_layout_that_does_not_fit_has_an_estimate_and_the_verdict_no():
    job = Job(load_model("llama-3.1-70b"), load_cluster("dgx-h100", 32), 8192, 64)
    each = estimate(job, replace(parse("tp2 pp4", 32), accumulation=16))
    assert each.verdict == "no"
    assert each.peak_memory_bytes > job.cluster.device.memory_bytes


def test_an_estimate_is_plain_data():
    each = estimate(*case(MIXTURE, "tp2 sp pp4 dp4 ep4 zero1"))
    values = asdict(each) | {"layout": str(each.layout)}
    assert json.loads(json.dumps(values)) == values
