"""What the closed loop draws and says; that a run ends with its plan is for tests/train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import closed_loop
from benchmarks.closed_loop import (
    Result,
    best_planned,
    drawn,
    rank_correlation,
    regrets,
    sentences,
    summary,
)
from fivefold.layout.legality import check
from fivefold.model.huggingface.load import load_config
from fivefold.plan.search.search import search
from tests.plan import cpu

RESULT = Result(
    model="dense",
    layout="dp2",
    favourite=False,
    predicted_s=1.0,
    measured_s=1.0,
    predicted_bytes=90.0,
    measured_bytes=100.0,
    ledger_differences=0,
    seconds=[],
    imbalance=None,
)


def test_layouts_that_are_drawn_can_be_run_and_are_not_twice_the_same(tmp_path: Path) -> None:
    layouts = list(drawn(cpu.write(tmp_path), 40, seed=0))
    assert len({(model, str(layout)) for model, layout in layouts}) == 40
    for model, layout in layouts:
        check(layout, load_config(closed_loop.MODELS[model]), closed_loop.SEQUENCE_LENGTH)
        assert layout.global_batch == closed_loop.GLOBAL_BATCH and layout.world_size <= 8
    used = " ".join(str(layout) for _, layout in layouts)
    for split in ("tp", "sp", "pp", "dp", "zero", "ep", "ulysses", "ring", "recompute", "schedule"):
        assert split in used, split


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    cluster = cpu.write(tmp_path)
    assert list(drawn(cluster, 5, seed=3)) == list(drawn(cluster, 5, seed=3))
    assert list(drawn(cluster, 5, seed=3)) != list(drawn(cluster, 5, seed=4))


def test_ranks_correlate_as_spearman_says() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_following_the_plan_costs_what_its_favourite_is_slower_than_the_best_of_as_many() -> None:
    results = [
        replace(RESULT, favourite=True, measured_s=1.1),
        replace(RESULT, layout="tp2", measured_s=1.0),
        replace(RESULT, layout="tp4", measured_s=0.5),  # of more processes
        replace(RESULT, model="MoE", favourite=True, measured_s=2.0),
    ]
    found = regrets(results)
    assert found == {
        "dense, 2 processes": pytest.approx(0.1),
        "MoE, 2 processes": pytest.approx(0.0),
    }


def test_the_summary_has_the_errors_of_time_memory_and_ledgers() -> None:
    results = [
        replace(RESULT, predicted_s=1.1),
        replace(RESULT, layout="tp2", predicted_s=1.8, measured_s=2.0, ledger_differences=2),
        replace(RESULT, layout="pp2", predicted_s=3.0, measured_s=3.0),
    ]
    found = summary(results)
    assert found["median_abs_error"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.0)
    assert found["memory_median_abs_error"] == pytest.approx(0.1)
    assert found["ledger_differences"] == 2
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["imbalance"] == {}


def test_the_summary_has_how_uneven_experts_were_by_their_ranks() -> None:
    results = [
        replace(RESULT, layout="dp2 ep2", imbalance=1.2),
        replace(RESULT, layout="dp2 ep2 mb2", imbalance=1.4),
        replace(RESULT, layout="dp4 ep4", imbalance=2.0),
        RESULT,
    ]
    assert summary(results)["imbalance"] == {"ep2": pytest.approx(1.3), "ep4": 2.0}
    assert "over the mean: ep2 1.30, ep4 2.00." in " ".join(sentences(summary(results)))


def test_the_planner_is_told_how_uneven_experts_are(tmp_path: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        closed_loop, "search", lambda job, wishes: asked.append(job) or search(job, wishes)
    )
    assert list(best_planned(cpu.write(tmp_path), 1.5))
    told = {(job.config.moe is not None, job.imbalance) for job in asked}
    assert told == {(True, 1.5), (False, 1.0)}
