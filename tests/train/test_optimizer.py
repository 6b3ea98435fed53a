"""Steps of a run against the same steps written out in plain arithmetic.

Parity compares the program with itself; this compares it with the formula of AdamW.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.model.parameters import local_tensor
from fivefold.parallel.comm import Recorder
from fivefold.train.launch import launch
from fivefold.train.learning_rate import learning_rate
from fivefold.train.runfile import Run
from fivefold.train.trainer import Trainer
from tests.parity.harness import layout_for, random_samples, tiny

STEPS = 3
LR, BETAS, EPS, DECAY, CLIP = 3e-2, (0.8, 0.9), 1e-6, 0.3, 0.05
RUN = Run.model_validate(
    {
        "model": "config.json",
        "data": {"sequence_length": 64},
        "global_batch": 8,
        "steps": 5,
        "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "clip": CLIP},
        "lr_schedule": {"warmup_steps": 2, "decay": "cosine", "final_fraction": 0.1},
        "folder": Path(),
    }
)
RATES = [LR / 2, LR, LR]
"""Two steps of warm-up, then the peak, from which the cosine begins to fall."""
CONFIG = tiny("qwen2", num_hidden_layers=2)  # it has norms, and biases of q, k and v

Weights = dict[str, Tensor]


def plain_adamw(weights: Weights, gradients: list[Weights]) -> Weights:
    """The weights after clipped AdamW steps (arXiv:1711.05101, algorithm 2), in fp64. `gradients`
    are those of the mean loss, one dictionary per step."""
    weights = {name: value.double() for name, value in weights.items()}
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    second = {name: torch.zeros_like(value) for name, value in weights.items()}
    for step, (lr, mine) in enumerate(zip(RATES, gradients, strict=True), start=1):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in mine.values()))
        for name, value in weights.items():
            g = mine[name].double() * min(1.0, CLIP / norm)
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
            update = first[name] / (1 - BETAS[0] ** step)
            update = update / ((second[name] / (1 - BETAS[1] ** step)).sqrt() + EPS)
            decay = 0.0 if "norm" in name or name.endswith("bias") else DECAY
            weights[name] = value - lr * (update + decay * value)
    return weights


def steps_of_the_trainer() -> tuple[Weights, list[Weights], Weights, list[float]]:
    """The weights before, the mean loss's gradients of each step, the weights after, the norms."""
    samples = random_samples(CONFIG.vocab_size)
    layout = layout_for("mb2", CONFIG, samples)
    device = torch.device("cpu")
    trainer = Trainer(CONFIG, layout, samples, RUN.optimizer, "fp32", 0, 0, Recorder(), device)
    stage = trainer.stages[0]

    def weights() -> Weights:
        # Norms begin as ones and biases as zeros, where decay would not show.
        return {name: local_tensor(p).clone() for name, p in stage.named_parameters()}

    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith("bias"):
                local_tensor(parameter).fill_(0.5)
    before, gradients, norms = weights(), [], []
    for step in range(STEPS):
        sums, parameters = trainer.gradients(step)
        tokens = trainer._valid_tokens
        names = [name for name, _ in stage.named_parameters()]
        pairs = zip(names, parameters, strict=True)
        gradients.append({name: each.grad.clone() / tokens for name, each in pairs})
        result = trainer.finish_step(sums, parameters, learning_rate(step, RUN))
        norms.append(result.grad_norm)
    return before, gradients, weights(), norms


def test_three_steps_are_those_of_plain_adamw():
    """Betas, decay of matrices alone, clipping and the schedule: each shows in the weights."""
    ((before, gradients, after, norms),) = launch(steps_of_the_trainer, 1, timeout_s=120)
    assert min(norms) > 2 * CLIP  # every step is clipped
    assert any("norm" in name for name in before) and any(n.endswith("bias") for n in before)
    expected = plain_adamw(before, gradients)
    for name, value in after.items():
        moved = float((expected[name] - before[name].double()).abs().max())
        assert moved > 1e-2, name
        wrong = float((value.double() - expected[name]).abs().max())
        assert wrong < 1e-4 * moved, name


@pytest.mark.parametrize("step", range(STEPS))
def test_the_rates_of_the_steps_are_those_of_the_run_file(step: int):
    assert learning_rate(step, RUN) == pytest.approx(RATES[step])
