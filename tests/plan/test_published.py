"""Predictions of published measurements, pinned one by one.

The accuracy page says how well predictions agree with measurements on the whole; a rule of the
planner can change without its median noticing. Here a row of every source, model and GPU keeps the
seconds that are predicted for it. Whoever changes a rule on purpose changes the numbers here, and
sees which rows it moved and whether towards the measurement.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.measurements import MEASUREMENTS, Case, read
from benchmarks.predictions import choose, predict_steps
from fivefold.cluster.load import load_cluster
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import parse
from fivefold.model.huggingface.presets import config_from_dimensions
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.memory.states import estimate_memory
from fivefold.plan.time.stages import simulate
from fivefold.plan.time.step import estimate_time
from tests.plan import cpu

# fmt: off
STEPS = {
    "MB-074": ("dp64 zero3 mb2 ga2", 6.7117),
    "MB-077": ("dp64 zero3 mb2 ga2", 7.036),
    "MB-270": ("tp2 sp dp64 zero3", 5.1247),
    "DGXC-013": ("tp4 sp pp4 vpp5 dp2 zero1 ring2 ga64", 14.247),
    "DGXC-025": ("dp4 zero1 ring2 ga32", 12.437),
    "DGXC-035": ("tp4 sp pp8 vpp12 dp4 zero1 ga64", 8.1738),
    "DGXC-045": ("tp4 sp dp4 zero1 mb4 ga4", 2.7318),
    "DGXC-071": ("tp4 sp dp2 zero1 ep2 etp4 ga512", 25.19),
    "DGXC-077": ("tp4 sp pp8 vpp8 dp8 zero1 ep8 etp4 ring2 ga128", 18.991),
    "DGXC-314": ("tp2 sp pp4 dp16 zero1 ep32 ga64 recompute=selective layers=16,17*2,11", 14.62),
    "MPT-010": ("dp512 zero3 mb6", 1.2568),
    "MPT-013": ("dp512 zero2 mb8", 0.82942),
    "MPT-097": ("dp8 zero3 ga2 recompute=full", 31.493),
    "MPT-109": ("dp8 zero3 ga16 recompute=full", 83.052),
    "MPT-118": ("dp8 zero3 ga4 recompute=full", 26.266),
    "TITAN-001": ("dp8 zero3 mb2 recompute=selective", 2.802),
    "TITAN-011": ("tp8 sp dp32 zero3 mb16 recompute=full", 21.79),
    "TITAN-013": ("tp8 sp pp8 dp8 zero3 mb4 ga8 recompute=full", 44.296),
    "TITAN-015": ("tp8 sp pp8 dp8 zero3 ga8 recompute=full", 63.506),
    "BLOOM-001": ("tp8 pp4 dp12 zero1 ga170 recompute=full", 181.34),
    "BLOOM-004": ("tp8 pp7 dp6 zero1 ga341 recompute=full", 200.82),
    "BLOOM-021": ("tp8 pp10 dp4 zero1 ga512 recompute=full", 156.79),
    "BLOOM-025": ("tp8 pp12 dp4 zero1 ga512 recompute=full", 127.8),
    "BLOOM-037": ("tp8 mb2 ga256 recompute=full", 108.07),
    "BLOOM-040": ("tp8 pp6 dp8 zero1 mb2 ga128 recompute=full", 118.41),
    "BLOOM-045": ("tp8 pp6 dp8 zero1 mb4 ga64 recompute=full", 117.73),
    "BLOOM-115": ("tp8 pp12 dp4 zero1 mb4 ga128 recompute=full", 120.01),
    "INTERN-001": ("dp8 zero1 mb2 ga4", 3.6924),
    "SC21-011": ("dp384 zero3 mb4 recompute=full", 62.074),
    "KORTH-003": ("tp8 pp8 vpp3 ga64 recompute=full", 20.383),
    "MCMOE-002": ("pp4 vpp4 dp64 zero1 ep64 ga128 layers=4*15,1", 37.76),
    "MCMOE-003": ("pp8 vpp4 dp32 zero1 ep32 ga128 layers=2*29,1*3", 28.084),
    "MCMOE-006": ("pp4 vpp6 dp64 zero1 ep64 mb3 ga16 recompute=selective", 7.8307),
    "MCMOE-007": ("pp4 vpp12 dp64 zero1 ep32 ga128 recompute=selective", 29.357),
    "MCMOE-008": ("tp2 sp pp8 vpp4 dp16 zero1 ep32 ga128 recompute=selective", 19.193),
    "ZB-016": ("pp8 mb3 ga24 schedule=zb-h1", 2.4405),
    "MLPERF-001": ("tp4 sp pp8 vpp6 dp2 zero1 mb2 ga512", 38.4),
    "MLPERF-002": ("tp4 sp pp8 vpp6 dp8 zero1 mb2 ga128", 20.755),
    "MLPERF-006": ("tp4 sp pp8 vpp8 dp16 zero1 ring2 ga48", 8.4291),
    "MLPERF-018": ("tp4 sp pp8 vpp8 dp16 zero1 ring2 ga72", 26.819),
    "MLPERF-022": ("tp2 sp dp64 zero1", 0.39215),
    "MLPERF-036": ("dp8 zero1 mb2", 0.44997),
    "SIMUMAX-001": ("pp2 dp4 zero1 ga4", 0.89105),
    "SIMUMAX-037": ("tp2 sp zero1 ulysses4 ga4", 1.6514),
    "ZOO-001": ("tp2 sp pp8 vpp4 dp16 zero1 ep32 ga128 recompute=selective", 23.202),
    "ZOO-004": ("tp2 sp pp32 vpp3 dp4 zero1 ep8 ga512 recompute=selective", 28.05),
    "FMS-001": ("dp128 dp_replicate16 zero3 mb2", 2.018),
    "FMS-005": ("dp128 zero3 mb2 recompute=selective", 8.9831),
    "FMS-007": ("dp128 zero3 mb2 recompute=selective", 17.963),
}
"""Layout and predicted seconds per step, by the row of benchmarks/data/measurements.csv."""
# fmt: on

MEMORY = {
    "TITAN-001": 86.51,
    "BLOOM-001": 47.78,
    "INTERN-056": 70.2,
    "MCMOE-010": 225.6,
    "ZB-016": 51.15,
    "SIMUMAX-001": 80.1,
}
"""Predicted GB of a GPU, what torch cannot count included."""


@cache
def cases() -> dict[str, Case]:
    found, _ = read(MEASUREMENTS)
    return {case.id: case for case in found}


def test_the_steps_of_published_runs_are_predicted_as_before():
    rows = [cases()[name] for name in STEPS]
    layouts = choose(rows, None)
    seconds = predict_steps(rows, layouts)
    found = {
        name: (str(layout), float(f"{each:.5g}"))
        for name, layout, each in zip(STEPS, layouts, seconds, strict=True)
    }
    expected = {name: (layout, pytest.approx(s, rel=5e-4)) for name, (layout, s) in STEPS.items()}
    assert found == expected


def test_most_pinned_predictions_are_near_their_measurement():
    measured = np.array([cases()[name].step_s for name in STEPS], dtype=float)
    errors = np.abs(np.array([s for _, s in STEPS.values()]) / measured - 1)
    assert np.median(errors) < 0.1
    assert np.quantile(errors, 0.9) < 0.3


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_of_published_runs_is_predicted_as_before(name: str):
    case = cases()[name]
    (peak,) = estimate_memory(case.job, LayoutBatch.of(case.choices)).peak_bytes
    assert peak / 1e9 == pytest.approx(MEMORY[name], rel=1e-3)
    assert case.memory_bytes is not None
    assert abs(peak / case.memory_bytes - 1) < 0.15


CPU = {
    "dp1 ga4": 3.74841,
    "dp2 zero1 ga2": 1.8794,
    "dp4 zero3 ga2": 3.77268,
    "ulysses4 ga2": 1.04703,
    "ring4 ga2": 1.07104,
    "tp2 sp dp2 ga2": 1.95092,
    "pp2 dp2 ga4": 3.75491,
    "pp4 vpp1 ga8 schedule=zb-h1": 3.99519,
    "dp4 ep4 ga2": 3.80725,
    "tp2 sp pp2 dp2 ep2 ga2 recompute=full": 2.61336,
}
"""Seconds per step on the machine of `tests.plan.cpu`, by layout."""


def cpu_seconds(text: str) -> float:
    layout = parse(text)
    config = config_from_dimensions(
        "hidden=256,layers=4,heads=8,kv_heads=4,ffn=704,vocab=2048,experts=4,topk=2,moe_ffn=128"
    )
    cluster = cpu.cluster(layout.world_size)
    engine = ENGINES["fivefold"]
    job = Job(config, cluster, 2048, layout.global_batch, precision="fp32", engine=engine)
    return simulate(job, [layout])[0].step_s


@pytest.mark.parametrize("text", CPU)
def test_steps_on_shared_cores_are_predicted_as_before(text: str):
    assert cpu_seconds(text) == pytest.approx(CPU[text], rel=1e-4)


def test_the_bubble_of_late_stages_hides_their_gradients():
    """A late stage begins its last backward pass earlier, and reduces while the others compute."""
    cluster = load_cluster("rtx4090-pcie", 16)
    config = config_from_dimensions("hidden=4096,layers=16,heads=32,ffn=14336,vocab=128256")
    job = Job(config, cluster, sequence_length=4096, global_batch=16)
    layouts = LayoutBatch.of([parse("pp4 dp4 zero1 ga4")])
    ranks = estimate_time(job, layouts, cluster.device.constants).ranks

    def exposed_share(role: str) -> float:
        rows = [row for row in ranks[role].rows if row.transfer.op == "reduce_scatter"]
        return float(np.sum([row.exposed for row in rows]) / np.sum([row.seconds for row in rows]))

    assert exposed_share("last") < exposed_share("first") / 2
