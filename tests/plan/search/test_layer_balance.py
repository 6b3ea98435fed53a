"""Layers a stage by what the ends of the pipeline really take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.cluster.load import load_cluster
from fivefold.interop import EXPORTERS, export
from fivefold.layout.legality import check
from fivefold.layout.notation import parse
from fivefold.model.huggingface.presets import config_from_dimensions, load_model
from fivefold.parallel.cost import ledger
from fivefold.plan import planfile
from fivefold.plan.engines import Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.explain import justify_splits
from fivefold.plan.neighbours import refit
from fivefold.plan.planfile import PlanFile
from fivefold.plan.search.constraints import Constraints
from fivefold.plan.search.layer_balance import (
    balanced,
    balanced_layers,
    ends_in_layers,
)
from fivefold.plan.search.ranking import TIE_TOLERANCE
from fivefold.plan.search.search import search
from fivefold.plan.time.stages import simulate

WIDE = config_from_dimensions("hidden=2048,layers=24,heads=16,kv_heads=8,ffn=5632,vocab=256000")
"""A head that weighs as much as thirteen layers."""


def before_and_after(job: Job, text: str) -> tuple[Estimate, Estimate]:
    layout = parse(text, job.cluster.num_devices)
    share = job.global_batch // (layout.dp * layout.micro_batch)
    layout = replace(layout, accumulation=share)
    timed = simulate(job, [layout])
    ((chosen, _),) = balanced(job, [(layout, timed[0])], job.cluster.device.memory_bytes, 1)
    return estimate(job, layout), estimate(job, chosen)


def job(model: str, gpus: int, global_batch: int, mtp: bool = False) -> Job:
    return Job(load_model(model), load_cluster("dgx-h100", gpus), 4096, global_batch, mtp=mtp)


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    wide = Job(WIDE, load_cluster("dgx-h100", 8), 4096, 64)
    even, after = before_and_after(wide, "pp4 dp2")
    layers = after.layout.layers
    assert layers is not None and sum(layers) == 24
    assert layers[-1] < min(layers[:-1])
    assert after.step_time_s < 0.9 * even.step_time_s
    assert [stage.layers for stage in after.stages] == [[count] for count in layers]
    slowest = [max(s.forward_s + s.backward_s for s in e.stages) for e in (even, after)]
    assert slowest[1] < slowest[0]


def test_no_other_single_move_of_a_layer_makes_the_step_much_shorter():
    wide = Job(WIDE, load_cluster("dgx-h100", 8), 4096, 64)
    _, after = before_and_after(wide, "pp4 dp2")
    layers = after.layout.layers
    assert layers is not None
    for here in range(4):
        for there in range(4):
            moved = list(layers)
            moved[here] -= 1
            moved[there] += 1
            if min(moved) > 0:
                other = replace(after.layout, layers=tuple(moved))
                assert estimate(wide, other).step_time_s >= after.step_time_s * (1 - TIE_TOLERANCE)


@pytest.mark.parametrize(
    ("a_job", "text"),
    [
        (job("deepseek-v3", 2048, 1024, mtp=True), "tp2 sp pp16 zero1 ep8 recompute=full"),
        (job("qwen3-235b-a22b", 256, 1024), "tp2 sp pp8 vpp3 zero1 ep8 recompute=full"),
        (job("llama-3.1-405b", 1024, 512), "tp8 sp pp16 zero1"),
        (job("llama-3.1-405b", 1024, 512), "tp8 sp pp16 vpp7 zero1"),
        (job("llama-3.1-8b", 8, 64), "tp2 sp pp4 vpp2"),
        (job("gemma-3-27b", 64, 256), "tp4 sp pp4 zero1 recompute=full:4"),
    ],
)
def test_a_list_of_layers_pays_or_is_left_out(a_job: Job, text: str):
    even, after = before_and_after(a_job, text)
    assert even.layout.layers is None
    if after.layout.layers is None:
        assert after == even
    else:
        assert after.step_time_s < even.step_time_s * (1 - TIE_TOLERANCE)
        assert sum(after.layout.layers) == a_job.config.num_layers


def test_llama_405b_keeps_the_published_split():
    """126 layers on 16 stages: one less at both ends (arXiv:2407.21783, section 3.3.2)."""
    _, after = before_and_after(job("llama-3.1-405b", 1024, 512), "tp8 sp pp16 zero1")
    assert after.layout.layers is None
    assert [sum(stage.layers) for stage in after.stages] == [7, *[8] * 14, 7]


def test_a_list_that_does_not_fit_is_left_out():
    wide = Job(WIDE, load_cluster("dgx-h100", 8), 4096, 64)
    even, after = before_and_after(wide, "pp4 dp2")
    limit = (even.peak_memory_bytes + after.peak_memory_bytes) / 2
    assert after.peak_memory_bytes > even.peak_memory_bytes
    timed = list(zip([even.layout], simulate(wide, [even.layout]), strict=True))
    ((kept, _),) = balanced(wide, timed, limit, 1)
    assert kept == even.layout


def test_the_ends_are_weighed_in_layers():
    wide = Job(WIDE, load_cluster("dgx-h100", 8), 4096, 64)
    (simulated,) = simulate(wide, [parse("pp4 dp2 ga32")])
    first, last, layer_s = ends_in_layers(simulated)
    weights = WIDE.vocab_size * WIDE.hidden_size / (4 * 2048**2 * 0.75 + 3 * 2048 * 5632)
    assert 0 < first < 1 < last
    assert last == pytest.approx(weights, rel=0.3)
    assert layer_s * 8 == pytest.approx(simulated.stages.passes_s(1).sum() * 8 / 6)


def test_chunks_of_a_rank_share_out_its_layers():
    layers = balanced_layers(46, 4, 3, 0.0, 2.0)
    assert layers == (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2)
    assert balanced_layers(46, 4, 3, 0.0, 20.0) is None  # too little left for the last rank


def test_chunks_of_one_layer_give_way_to_fewer_that_can_be_balanced():
    """16 layers in 16 chunks cannot be moved, and the head of Llama-3.2 1B weighs four of them."""
    even, after = before_and_after(job("llama-3.2-1b", 8, 64), "pp4 vpp4 dp2")
    assert after.layout.vpp < 4 and after.layout.layers is not None
    assert after.step_time_s < 0.8 * even.step_time_s


def test_a_found_list_goes_through_ledger_check_plan_file_and_exports(tmp_path):
    config = load_model("llama-3.2-1b")
    a_job = Job(config, load_cluster("dgx-h100", 8), 4096, 64)
    (best, *_) = search(a_job, Constraints(fix="pp4", top=1)).best
    layout = best.layout
    assert layout.layers is not None
    check(layout, config, 4096, 8)
    assert parse(str(layout), 8) == layout
    assert ledger(config, layout, 4096, 7, "bf16")
    plan = PlanFile(
        layout=str(layout),
        model="llama-3.2-1b",
        cluster="dgx-h100",
        gpus=8,
        sequence_length=4096,
        global_batch=64,
    )
    planfile.save(plan, tmp_path / "plan.yaml")
    assert planfile.load(tmp_path / "plan.yaml").parsed_layout() == layout
    for engine in EXPORTERS:
        assert export(plan, engine)
    (why,) = [reason for reason in justify_splits(a_job, layout, 80e9) if reason.split == "layers"]
    assert why.step_time_ratio is not None and why.step_time_ratio > 1.005
    same = refit(a_job, layout, recompute="full")
    assert same.layers == layout.layers
    assert refit(a_job, layout, pp=2).layers is None


def test_lists_of_layers_can_be_forbidden():
    a_job = Job(load_model("llama-3.2-1b"), load_cluster("dgx-h100", 8), 4096, 64)
    (best, *_) = search(a_job, Constraints(fix="pp4", forbid="layers", top=1)).best
    assert best.layout.layers is None
