from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.legality import check, legal
from fivefold.layout.notation import Layout, parse
from fivefold.model.huggingface.presets import config_from_dimensions, load_model
from fivefold.plan.engines import Job
from fivefold.plan.memory.states import FITS, estimate_memory
from fivefold.plan.search import search as searching
from fivefold.plan.search.candidates import every_layout
from fivefold.plan.search.constraints import Choices, Constraints
from fivefold.plan.search.least_memory import least_memory, smallest_gpus
from fivefold.plan.search.lower_bound import Bound
from fivefold.plan.search.ranking import DISTINCT, TIE_TOLERANCE, in_order, intricacy
from fivefold.plan.search.search import SPARES, count_fitting, search
from fivefold.plan.time.stages import simulate
from fivefold.plan.time.step import estimate_time

DENSE = config_from_dimensions("hidden=4096,layers=16,heads=32,kv_heads=8,ffn=14336,vocab=128256")
MIXTURE = config_from_dimensions(
    "hidden=2048,layers=8,heads=16,kv_heads=4,ffn=6144,vocab=32000,"
    "experts=16,topk=2,moe_ffn=1408,dense_layers=1"
)


def job(config=DENSE, gpus=16, cluster="dgx-h100", sequence_length=4096, global_batch=32) -> Job:
    return Job(config, load_cluster(cluster, gpus), sequence_length, global_batch)


def all_candidates(a_job: Job, constraints: Constraints) -> list[tuple[Layout, float]]:
    """Every candidate that fits, with its step time: no bound, no order of search."""
    choices = Choices.read(constraints.fix, constraints.forbid)
    constants = a_job.cluster.device.constants
    limit = FITS * a_job.cluster.device.memory_bytes
    found = []
    for layouts in every_layout(a_job, choices, constraints.planned_schedules):
        if not len(layouts):
            continue
        fits = estimate_memory(a_job, layouts).peak_bytes <= limit
        steps = np.asarray(estimate_time(a_job, layouts, constants).step)
        found += [(layouts[int(i)], float(steps[i])) for i in np.flatnonzero(fits)]
    return found


def best_of_all(a_job: Job, constraints: Constraints) -> list[float]:
    """Step times of the best layouts, different in their degrees, after simulation; of those with
    the same degrees the simplest that is near the best."""
    alike: dict[tuple[int, ...], list[tuple[Layout, float]]] = {}
    for layout, step in all_candidates(a_job, constraints):
        alike.setdefault(tuple(getattr(layout, name) for name in DISTINCT), []).append(
            (layout, step)
        )
    lowest = {key: min(step for _, step in found) for key, found in alike.items()}
    first = sorted(lowest, key=lambda key: lowest[key])[: constraints.top + SPARES]
    chosen = [
        min(
            (layout for layout, step in alike[key] if step <= lowest[key] * (1 + TIE_TOLERANCE)),
            key=lambda layout: intricacy(a_job, layout),
        )
        for key in first
    ]
    return sorted(each.step_s for each in simulate(a_job, chosen))[: constraints.top]


@pytest.mark.parametrize(
    "a_job",
    [job(), job(MIXTURE, gpus=8, global_batch=16), job(gpus=8, cluster="mi300x", global_batch=24)],
)
def test_the_search_finds_what_trying_all_layouts_finds(a_job: Job, monkeypatch):
    monkeypatch.setattr(searching, "SHAPES_AT_ONCE", 64)  # so that bounds cut off something
    monkeypatch.setattr(searching, "TIMED_AT_ONCE", 256)
    constraints = Constraints(top=4, forbid="layers")
    found = search(a_job, constraints)
    times = sorted(each.step_time_s for each in found.best)
    assert times == pytest.approx(best_of_all(a_job, constraints))
    assert found.best[0].step_time_s <= times[0] * (1 + TIE_TOLERANCE)
    assert found.skipped > 0  # it did not look at all of them


def test_many_layouts_at_once_and_one_by_one_are_the_same():
    a_job, constants = job(gpus=4, global_batch=4), job().cluster.device.constants
    constraints = Constraints(fix="zero1 ulysses1 mb1 recompute=full", top=1)
    by_one = {}
    for layouts in every_layout(a_job, Choices.read(constraints.fix)):
        for index in range(len(layouts)):
            one = LayoutBatch.of([layouts[index]])
            if estimate_memory(a_job, one).peak_bytes <= FITS * a_job.cluster.device.memory_bytes:
                by_one[layouts[index]] = float(
                    np.asarray(estimate_time(a_job, one, constants).step)[0]
                )
    best = min(by_one, key=lambda layout: by_one[layout])
    (found,) = search(a_job, constraints).best
    assert len(by_one) > 5
    assert by_one[found.layout] == pytest.approx(by_one[best])


@pytest.mark.parametrize("config", [DENSE, MIXTURE])
def test_no_step_is_shorter_than_its_bound(config):
    a_job = job(config, gpus=32, global_batch=64)
    constants = a_job.cluster.device.constants
    generator = np.random.default_rng(0)
    for layouts in every_layout(a_job, Choices.read()):
        if not len(layouts):
            continue
        some = layouts.take(generator.integers(0, len(layouts), 400))
        bound = Bound(a_job, constants, some).of(some)
        steps = np.asarray(estimate_time(a_job, some, constants).step)
        assert (bound <= steps * (1 + 1e-9)).all()
        assert np.median(bound / steps) > 0.5  # and it is worth something


def test_results_do_not_depend_on_the_size_of_the_chunks(monkeypatch):
    a_job = job(MIXTURE, gpus=8, global_batch=16)
    whole = search(a_job)
    monkeypatch.setattr(searching, "SHAPES_AT_ONCE", 37)
    monkeypatch.setattr(searching, "TIMED_AT_ONCE", 101)
    parts = search(a_job)
    assert parts.best == whole.best
    assert (parts.counted, parts.legal) == (whole.counted, whole.legal)


def test_all_candidates_are_legal_and_as_many_as_counted():
    a_job = job(MIXTURE, gpus=16, global_batch=48)
    parts = every_layout(a_job, Choices.read(), planned_schedules=True)
    for layouts in parts:
        assert legal(layouts, a_job.config, a_job.sequence_length, 16).all()
        assert (layouts.global_batch == a_job.global_batch).all()
    assert search(a_job, Constraints(planned_schedules=True)).legal == sum(map(len, parts))
    texts = [str(layouts[i]) for layouts in parts for i in range(0, len(layouts), 97)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("config", [DENSE, MIXTURE])
def test_the_layouts_that_fit_are_counted(config):
    a_job = job(config, gpus=8, global_batch=16)
    constraints = Constraints(max_memory_bytes=24e9)
    fits = [
        int((estimate_memory(a_job, layouts).peak_bytes <= 24e9).sum())
        for layouts in every_layout(a_job, Choices.read())
        if len(layouts)
    ]
    legal_ones, fitting = count_fitting(a_job, constraints)
    assert fitting == sum(fits)
    assert 0 < fitting < legal_ones


def test_what_is_fixed_and_forbidden_holds():
    fixed = search(job(), Constraints(fix="tp4 zero1 recompute=full", forbid="pp")).best
    assert fixed
    for each in fixed:
        layout = each.layout
        assert (layout.tp, layout.zero, layout.recompute, layout.pp) == (4, 1, "full", 1)
    for each in search(job(), Constraints(fix="recompute=full:2", forbid="sp vpp2")).best:
        layout = each.layout
        assert (layout.recompute, layout.recompute_layers) == ("full", 2)
        assert not layout.sp and layout.vpp != 2
    for each in search(job(), Constraints(forbid="tp zero3 dp16 recompute")).best:
        layout = each.layout
        assert layout.tp == 1 and layout.zero != 3 and layout.dp != 16
        assert layout.recompute == "none"


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (Constraints(fix="pp4", forbid="pp"), "pp is forbidden, but pp4 is fixed"),
        (Constraints(fix="tp8", forbid="tp8"), "tp8 is forbidden, but tp8 is fixed"),
        (
            Constraints(fix="recompute=full:2", forbid="recompute=full"),
            "recompute=full is forbidden",
        ),
        (Constraints(forbid="schedule=1f1b"), "leave out some"),
        (Constraints(fix="tp3"), "tp 3 does not divide 32 attention heads"),
        (Constraints(fix="tp8 tp4"), "tp is stated twice"),
        (Constraints(fix="ep4"), "dense"),
        (Constraints(fix="pp32"), "16"),
        (Constraints(objective="speed"), "time, memory, cost"),
        (Constraints(top=0), "1 layout or more"),
    ],
)
def test_constraints_that_cannot_be_met_are_refused_in_one_sentence(
    constraints: Constraints, says: str
):
    with pytest.raises(UserError) as refused:
        search(job(), constraints)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_fixed_value_beyond_what_a_search_would_try_is_taken():
    (found,) = search(job(gpus=64, global_batch=64), Constraints(fix="tp32 mb1", top=1)).best
    assert found.layout.tp == 32


def test_accumulation_follows_from_the_global_batch():
    """Field case 46: the global batch is the invariant."""
    for fix, accumulation in (("tp4 dp1 mb2", 4), ("tp2 dp2 mb2", 2), ("tp1 dp4 mb2", 1)):
        (best, *_) = search(job(gpus=4, global_batch=8), Constraints(fix=fix)).best
        assert best.layout.accumulation == accumulation
        assert best.layout.global_batch == 8


def test_a_batch_that_does_not_divide_leaves_devices_out_and_says_so():
    """Field case 46: a batch of 37 on 4 devices."""
    found = search(job(gpus=6, global_batch=35))
    assert {each.layout.global_batch for each in found.best} == {35}
    seven = config_from_dimensions("hidden=4096,layers=5,heads=32,ffn=11008,vocab=32000")
    found = search(job(seven, gpus=14, sequence_length=1024, global_batch=3))
    assert found.notes and "14 devices" in found.notes[0]
    assert all(each.layout.world_size < 14 for each in found.best)


def test_tensor_parallelism_over_two_nodes_is_not_proposed_first():
    """Field case 53."""
    two_nodes = job(load_model("llama-3.1-70b"), sequence_length=8192)
    found = search(two_nodes, Constraints(top=1))
    assert (found.best or found.closest)[0].layout.tp <= 8


def test_layouts_that_fit_llama_2_70b_on_32_devices_are_listed():
    """Field case 49."""
    found = search(job(load_model("llama-2-70b"), gpus=32, global_batch=64))
    assert found.best and found.fit > 0
    for each in found.best:
        assert each.verdict == "fits"
    fixed = search(
        job(load_model("llama-2-70b"), gpus=32, global_batch=64), Constraints(fix="tp8 pp1 zero1")
    )
    assert fixed.best == [] and fixed.closest
    assert all(each.verdict == "no" for each in fixed.closest)


def test_qwen3_235b_on_64_devices_does_not_fit_as_published():
    """Field case 52: tp2 pp2 ep32 needs 77 GB for its states alone."""
    a_job = job(load_model("qwen3-235b-a22b"), gpus=64, global_batch=256)
    found = search(a_job, Constraints(fix="tp2 pp2 ep32 zero1"))
    assert found.best == [] and found.closest[0].verdict == "no"
    assert smallest_gpus(a_job, Constraints(), Constraints().limit_bytes(a_job)) in range(64, 257)


def test_the_smallest_number_of_devices_fits_and_half_of_it_does_not():
    a_job = job(load_model("llama-3.1-70b"), gpus=8, global_batch=1024)
    fewest = smallest_gpus(a_job, Constraints(), Constraints().limit_bytes(a_job))
    assert fewest is not None and fewest % 8 == 0 and fewest >= 16
    enough = replace(a_job, cluster=a_job.cluster.with_devices(fewest))
    assert search(enough).fit > 0
    half = replace(a_job, cluster=a_job.cluster.with_devices(fewest // 16 * 8))
    assert search(half, Constraints(headroom=1 - FITS)).best == []


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "sequence_length", "global_batch"),
    [
        ("llama-3.1-405b", "dgx-h100", 1024, 8192, 512),
        ("llama-3.1-70b", "dgx-h100", 16, 8192, 128),
        ("llama-3.1-8b", "rtx4090-pcie", 16, 4096, 128),
        ("mixtral-8x7b", "dgx-h100", 64, 4096, 256),
        ("qwen3-235b-a22b", "dgx-h100", 256, 4096, 1024),
        ("deepseek-v3", "gb200-nvl72", 288, 4096, 1152),
        ("gpt2", "dgx-h100", 8, 1024, 512),
    ],
)
def test_what_is_found_can_be_run(model, cluster, gpus, sequence_length, global_batch):
    a_job = job(load_model(model), gpus, cluster, sequence_length, global_batch)
    found = search(a_job, Constraints(top=8)).best
    assert found
    for each in found:
        check(each.layout, a_job.config, sequence_length, gpus)
        assert each.layout.global_batch == global_batch


def test_sequences_are_not_split_to_be_put_together_again():
    """Two sequences over two context-parallel ranks are one on each, with more traffic."""
    for layouts in every_layout(job(), Choices.read()):
        assert (np.gcd(layouts.cp, layouts.micro_batch) == 1).all()
    (best, *_) = search(job(), Constraints(fix="ring2 mb2")).best
    assert (best.layout.ring, best.layout.micro_batch) == (2, 2)


def test_the_simplest_layout_near_the_best_comes_first():
    """ZeRO 1 or more chunks would save less than half a per cent, so neither is chosen."""
    a_job = job(gpus=16, cluster="dgx-a100", global_batch=128)
    constraints = Constraints(top=3, fix="tp2 pp4", forbid="layers")
    candidates = all_candidates(a_job, constraints)
    seen_faster = []
    for each in search(a_job, constraints).best:
        chosen = each.layout
        alike = [
            (layout, step)
            for layout, step in candidates
            if all(getattr(layout, name) == getattr(chosen, name) for name in DISTINCT)
        ]
        (step,) = [step for layout, step in alike if layout == chosen]
        assert step <= min(step for _, step in alike) * (1 + TIE_TOLERANCE)
        faster = [layout for layout, other in alike if other < step]
        assert all(intricacy(a_job, chosen) < intricacy(a_job, layout) for layout in faster)
        seen_faster += faster
    assert len(seen_faster) >= 3


def test_of_layouts_with_other_degrees_the_simplest_near_the_best_takes_the_first_place():
    layouts = [parse(text) for text in ("tp2 pp2 dp4", "dp16 zero1", "tp2 dp8 zero1")]
    near, far = 1 + 0.9 * TIE_TOLERANCE, 1 + 1.1 * TIE_TOLERANCE
    assert in_order(job(), ["a", "b", "c"], layouts, [1.0, near, far]) == ["b", "a", "c"]
    assert in_order(job(), ["a", "b", "c"], layouts, [1.0, far, near]) == ["c", "a", "b"]
    assert in_order(job(), ["a", "b", "c"], layouts, [1.0, far, 2 * far]) == ["a", "b", "c"]


def test_equal_answers_whatever_the_time_of_day():
    a_job = job(MIXTURE, gpus=32, global_batch=64)
    first, second = search(a_job), search(a_job)
    assert first.best == second.best


def test_objectives():
    a_job = job(gpus=32, global_batch=64)
    fastest, leanest, cheapest = (
        search(a_job, Constraints(top=1, objective=name)).best[0]
        for name in ("time", "memory", "cost")
    )
    assert fastest.step_time_s < leanest.step_time_s
    assert leanest.peak_memory_bytes < fastest.peak_memory_bytes
    least = least_memory(a_job, Constraints())
    assert least is not None and least[0] == pytest.approx(leanest.peak_memory_bytes)
    cost, fast_cost = (e.step_time_s * e.layout.world_size for e in (cheapest, fastest))
    assert cost < fast_cost
    assert cheapest.layout.world_size < 32


def test_memory_constraints_bound_what_is_found():
    (best, *_) = search(job(), Constraints(max_memory_bytes=30e9)).best
    assert best.peak_memory_bytes <= 30e9
    (roomy, *_) = search(job()).best
    assert roomy.step_time_s <= best.step_time_s
