"""Weights, gradients and optimizer state take what the plan's formula says."""

from __future__ import annotations

import pytest

from fivefold.layout.notation import parse
from fivefold.parallel.data.memory import StateBytes, after_step, before_last_backward
from fivefold.parallel.workload import rank_work
from fivefold.verify.state_memory import measure
from tests.parallel.dry import (
    SEQUENCE_LENGTH,
    dry_trainer,
    fake_world,
    tiny_dense,
    tiny_mixture,
)

LAYOUTS = [
    "dp2 ga2",
    "tp2 ga2",
    "dp2 zero1 ga2",
    "dp2 zero2 ga2",
    "dp2 zero3 ga2",
    "dp3 zero1 ga1",
    "dp4 dp_replicate2 zero3 ga2",
    "dp2 tp2 sp zero1 ga2 pp2",
    "dp2 tp2 zero3 ga2 recompute=full",
    "dp2 ulysses2 zero2 recompute=full pp2 vpp2 ga4",
]


def total(parts: list[StateBytes]) -> StateBytes:
    result = StateBytes(0, 0, 0)
    for part in parts:
        result += part
    return result


def assert_close(measured: StateBytes, planned: StateBytes) -> None:
    for kind in ("weights", "gradients", "optimizer"):
        m, p = getattr(measured, kind), getattr(planned, kind)
        assert abs(m - p) <= 0.01 * max(p, 1), f"{kind}: measured {m:,}, planned {p:,}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_state_memory_is_within_a_percent_of_the_plan(
    text: str, model: str, precision: str
) -> None:
    layout = parse(text)
    config = tiny_dense() if model == "dense" else tiny_mixture()
    for rank in (0, layout.world_size - 1):
        works = rank_work(config, layout, SEQUENCE_LENGTH, rank, precision)
        seen: list[StateBytes] = []
        with fake_world(rank, layout.world_size):
            trainer = dry_trainer(config, layout, rank, precision)
            last = trainer.pipeline.steps[-1].action

            def look(action, trainer=trainer, last=last, seen=seen) -> None:
                if action == last and trainer.pipeline.schedule.vpp == 1:
                    seen.append(measure(trainer))

            trainer.pipeline.before = look
            for step in range(2):
                trainer.step(step, lr=1e-3)
            assert_close(measure(trainer), total([after_step(w) for w in works]))
        if seen:
            assert_close(seen[-1], total([before_last_backward(w) for w in works]))


def test_experts_that_are_elsewhere_take_no_memory() -> None:
    layout = parse("dp2 ep2 tp2 ga2")
    config = tiny_mixture()
    with fake_world(0, layout.world_size):
        trainer = dry_trainer(config, layout, 0, "fp32")
        trainer.step(0, lr=1e-3)
        works = rank_work(config, layout, SEQUENCE_LENGTH, 0, "fp32")
        assert_close(measure(trainer), total([after_step(w) for w in works]))
