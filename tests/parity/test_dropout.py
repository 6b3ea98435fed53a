"""With dropout every layout still computes what one process computes (field case 28)."""

from __future__ import annotations

import pytest

from fivefold.model.dropout import Dropout
from fivefold.train.trainer import Trainer
from fivefold.verify.parity import compare
from tests.parity.harness import (
    assert_within_limits,
    layout_for,
    random_samples,
    run,
    tiny,
)

SAMPLES = random_samples(128)
MODELS = {
    "dense": tiny("llama", num_hidden_layers=2),
    "mixture": tiny("qwen3_moe", num_hidden_layers=2),
}


def drop_much(trainer: Trainer) -> None:
    for stage in trainer.stages.values():
        for layer in stage.layers.values():
            layer.dropout = Dropout(0.3, seed=0)


@pytest.fixture(scope="module")
def references() -> dict:
    return {
        config: run(config, layout_for("mb2", config, SAMPLES), SAMPLES, 2, drop_much)
        for config in MODELS.values()
    }


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("dense", "tp2 dp2 mb2"),
        ("dense", "tp2 sp pp2 recompute=full"),
        ("dense", "ulysses2 ring2 dp2 zero1 mb2"),
        ("mixture", "dp2 tp2 sp ep2 mb2 recompute=full"),
    ],
)
def test_masks_agree_with_one_process(references: dict, family: str, text: str) -> None:
    config = MODELS[family]
    split = run(config, layout_for(text, config, SAMPLES), SAMPLES, 2, drop_much)
    assert_within_limits(compare(references[config], split), text)
