"""From points of a CPU to what the planner reads of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.calibrate import steps
from fivefold.calibrate.cores import block_work, fit_cpu, message_records, pass_errors
from fivefold.calibrate.points import Point
from fivefold.cluster.cluster import Cluster
from fivefold.cluster.cpu import Cause, ProcessOverhead
from fivefold.cluster.load import cluster_of
from fivefold.model.huggingface.load import load_config
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import estimate
from tests.plan.cpu import machine

WITHOUT_CPU = cluster_of({**machine(), "cpu": None}, "here", "here", 8)
SHAPES = [
    {"sequence": s, "batch": b, "hidden": h, "width": w, "heads": 4, "kv_heads": 2}
    for s, b, h, w in [(64, 1, 64, 128), (256, 2, 64, 256), (256, 1, 256, 704), (1024, 1, 128, 512)]
]


def truth(**changes: Any) -> Cluster:
    return cluster_of(machine(**changes), "cpu", "cpu", 8)


def block_points(cluster: Cluster) -> list[Point]:
    """Layers, dense and of experts, and heads, of a machine as the planner takes it to be."""
    points = []
    for shape in SHAPES:
        sizes = {**shape, "head_dim": shape["hidden"] // 4, "vocabulary": 1024}
        mixture = {**sizes, "experts": 8, "experts_per_token": 2}
        for what, of in (("layer", sizes), ("layer", mixture), ("head", sizes)):
            for part in ("forward", "backward"):
                work = block_work(Point(what, of, 0, 0), cluster)
                seconds = float(getattr(steps.cpu_of(cluster), part).seconds(work))
                points.append(Point(what, {"part": part, **of}, seconds, seconds))
    return points


def other_points() -> list[Point]:
    return [
        Point("memory", {"op": "copy", "bytes": 2**16}, 1e-6, 1e-6),
        Point("memory", {"op": "copy", "bytes": 2**20}, 2e-5, 2e-5),
        Point("optimizer", {"op": "norm", "tensors": 1, "elements": 100}, 1e-6, 1e-6),
        Point("optimizer", {"op": "norm", "tensors": 2, "elements": 1000}, 2e-6, 2e-6),
        Point("optimizer", {"op": "update", "tensors": 2, "elements": 1000}, 4e-6, 4e-6),
    ]


def message(op: str, size: int, groups: int, size_bytes: int, wall_s: float, cpu_s: float) -> Point:
    sizes = {"op": op, "size": size, "groups": groups, "stride": 1, "bytes": size_bytes}
    return Point("message", sizes, wall_s, cpu_s)


def test_layers_of_a_machine_like_the_planners_are_explained_to_the_last_digits():
    cluster = truth()
    cpu = fit_cpu(WITHOUT_CPU, 2, [*block_points(cluster), *other_points()])
    errors = pass_errors(block_points(cluster), replace(WITHOUT_CPU, cpu=cpu))
    assert {part: len(of) for part, of in errors.items()} == {"forward": 12, "backward": 12}
    assert all(of.max() < 2e-3 for of in errors.values())


def test_errors_are_relative_and_of_the_pass_that_is_off():
    cluster = truth()
    points = [
        replace(point, cpu_s=point.cpu_s * (1.25 if point.sizes["part"] == "backward" else 1))
        for point in block_points(cluster)
    ]
    errors = pass_errors([*points, *other_points()], cluster)
    assert errors["forward"] == pytest.approx(0.0)
    assert errors["backward"] == pytest.approx(0.2)


def test_copies_count_at_the_usual_size_and_the_optimizer_in_the_largest_case():
    cpu = fit_cpu(WITHOUT_CPU, 2, [*block_points(truth()), *other_points()])
    assert cpu.copy_byte == pytest.approx(2e-5 / 2**21, rel=1e-3)
    assert cpu.optimizer_element == pytest.approx(1e-9 + 2e-9)


def test_of_messages_those_count_that_all_processes_sent_at_once():
    points = [
        message("all_reduce", 2, 1, 1000, 9.0, 9.0),  # a pair alone
        message("all_reduce", 2, 4, 1000, 5e-3, 1e-3),
        message("all_reduce", 8, 1, 1000, 3e-3, 1e-3),
        message("barrier", 8, 1, 0, 1.0, 1.0),
    ]
    records = message_records(points, cores=2)
    assert [(each.ranks, each.busy_s) for each in records] == [(2, 1e-3), (8, 1e-3)]
    # 8 processes have 2 cores: of 5 ms, 4 are turns on a core; 3 ms are less than turns alone.
    assert [each.wait_s for each in records] == pytest.approx([1e-3, 0.0])


def test_a_call_costs_by_how_much_a_step_with_such_messages_is_longer_than_planned():
    cluster = truth()
    points = []
    for model, text in steps.cases(2):
        planned = steps.planned(cluster, model, text)
        extra = 1e-4 * planned.calls.get("tp", 0.0)
        busy_s = planned.busy_s + extra
        sizes = {"model": model, "layout": text}
        points.append(Point("step", sizes, busy_s + planned.wait_s + 2 * extra, busy_s))
        points.append(Point("outside", sizes, 5e-3, 5e-3))
    found = steps.call_seconds(points, cluster)
    assert found["tp"].busy_s == pytest.approx(1e-4, rel=1e-3)
    assert found["tp"].wait_s == pytest.approx(2e-4, rel=1e-3)
    for kind in ("zero", "ulysses", "ring", "ep"):
        assert found[kind].busy_s == pytest.approx(0.0, abs=1e-9)


def test_once_a_step_is_what_lies_outside_of_passes_but_for_the_optimizers_elements():
    cluster = truth()
    elements = sum(
        np.prod(shape)
        for shape in [(1024, 192), (192, 1024), (192,)]
        + 2 * [(192, 192), (192, 192), (192, 64), (192, 64), *3 * [(192, 512)], (192,), (192,)]
    )
    outside = Point("outside", {"model": "dense", "layout": steps.ALONE}, 5e-3, 5e-3)
    assert steps.step_s([outside], cluster) == pytest.approx(5e-3 - 2e-9 * elements)


def test_what_a_process_holds_beside_its_tensors_is_what_it_grew_by_less_what_they_take():
    cluster = truth()
    overhead: dict[Cause, ProcessOverhead] = {
        "alone": ProcessOverhead(bytes=5e7, share=0.2),
        "messages": ProcessOverhead(bytes=6e7, share=0.1),
        "zero": ProcessOverhead(bytes=0.0, share=5.0),
        "recompute": ProcessOverhead(bytes=0.0, share=20.0),
    }
    holding = steps.with_cpu(cluster, overhead=overhead)
    points = []
    for model, text in steps.cases(8):
        made = estimate(job(holding, model, text), steps.layout_of(text))
        for smaller in (0, 10_000_000):  # the larger process counts
            grown = round(made.peak_memory_bytes) - smaller
            points.append(Point("growth", {"model": model, "layout": text, "bytes": grown}, 1, 1))
    found = steps.process_overhead(points, cluster)
    assert list(found) == list(overhead)
    for cause, expected in overhead.items():
        assert found[cause].bytes == pytest.approx(expected.bytes, rel=1e-3)
        assert found[cause].share == pytest.approx(expected.share, rel=1e-2)


def test_one_run_that_took_less_than_planned_does_not_undo_the_others():
    cluster = truth()
    points = []
    for model, text in steps.cases(8):
        planned = estimate(job(cluster, model, text), steps.layout_of(text)).peak_memory_bytes
        more = -1_000_000 if text == "pp2 mb2 recompute=full" else 50_000_000
        points.append(
            Point("growth", {"model": model, "layout": text, "bytes": round(planned + more)}, 1, 1)
        )
    found = steps.process_overhead(points, cluster)
    assert found["messages"].bytes == pytest.approx(50_000_000, rel=0.05)
    assert found["recompute"].share == 0.0  # less, on the whole, than without


def test_with_the_slowdowns_that_are_found_steps_are_planned_as_long_as_they_took():
    cluster, slowdown = truth(), {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5}
    slowed = steps.with_cpu(cluster, slowdown=slowdown)
    points = []
    for text in steps.AMONG_OTHERS:
        took_s = estimate(job(slowed, "larger", text), steps.layout_of(text)).step_time_s
        points.append(Point("larger_step", {"model": "larger", "layout": text}, took_s, took_s))
    assert steps.slowdowns(points, cluster) == pytest.approx(slowdown, rel=1e-2)


def job(cluster: Cluster, model: str, text: str) -> Job:
    return Job(
        load_config(steps.MODELS[model]),
        cluster.with_devices(steps.layout_of(text).world_size),
        steps.SEQUENCE_LENGTH,
        steps.GLOBAL_BATCH,
        "fp32",
        ENGINES["fivefold"],
    )
