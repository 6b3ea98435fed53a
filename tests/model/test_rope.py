"""Rotary frequencies against values computed by hand from the published formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig, require_trainable
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import load_preset
from fivefold.model.rope import rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**rope: Any) -> ModelConfig:
    """Heads of 8 elements, so four pairs."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    return load_config({"model_type": "llama", **sizes, **rope})


def test_without_scaling_each_pair_is_slower_by_the_same_factor() -> None:
    frequencies = rope_frequencies(config())
    assert frequencies.dtype == np.float64 and frequencies.shape == (4,)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-14)


def test_linear_scaling_divides_every_frequency() -> None:
    frequencies = rope_frequencies(config(rope_scaling={"type": "linear", "factor": 4}))
    np.testing.assert_allclose(frequencies, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-14)


def test_llama3_scaling_keeps_the_fast_pairs_and_blends_the_one_in_between() -> None:
    # Turns within 8192 tokens: 1304, 130.4, 13.04 (all above 4: kept) and 8.192 / 2 pi = 1.3038,
    # which lies (1.3038 - 1) / (4 - 1) = 0.10127 of the way from "divided by 8" to "kept":
    # 0.001 * (0.10127 + 0.89873 / 8) = 2.13608e-4.
    frequencies = rope_frequencies(config(rope_scaling=LLAMA3))
    np.testing.assert_allclose(frequencies[:3], [1.0, 0.1, 0.01], rtol=1e-14)
    assert frequencies[3] == pytest.approx(2.13608e-4, rel=1e-5)


def test_llama3_scaling_divides_the_pairs_that_turn_less_than_once() -> None:
    # Frequencies 1, 1e-2, 1e-4, 1e-6: the last two turn 0.13 and 0.0013 times in 8192 tokens.
    frequencies = rope_frequencies(config(rope_theta=1e8, rope_scaling=LLAMA3))
    np.testing.assert_allclose(frequencies, [1.0, 1e-2, 1e-4 / 8, 1e-6 / 8], rtol=1e-14)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_llama3_scaling_is_the_published_rule_by_wavelengths(name: str) -> None:
    model = load_preset(name)
    assert model.rope_scaling is not None
    factor, original = model.rope_scaling["factor"], 8192
    regimes = set()
    for pair, frequency in enumerate(rope_frequencies(model)):
        unscaled = 500000.0 ** (-2 * pair / model.head_dim)
        wavelength = 2 * math.pi / unscaled
        if wavelength < original / 4:
            regime, expected = "kept", unscaled
        elif wavelength > original / 1:
            regime, expected = "divided", unscaled / factor
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            regime, expected = "blended", (1 - smooth) * unscaled / factor + smooth * unscaled
        regimes.add(regime)
        assert frequency == pytest.approx(expected, rel=1e-12)
    assert regimes == {"kept", "blended", "divided"}


def test_the_new_style_of_writing_it_means_the_same_as_the_old() -> None:
    old = config(rope_theta=5e5, rope_scaling=LLAMA3)
    assert config(rope_parameters={**LLAMA3, "rope_theta": 5e5}) == old
    assert config(rope_theta=5e5, rope_parameters=LLAMA3) == old
    assert config(rope_theta=5e5, rope_scaling=LLAMA3, rope_parameters=LLAMA3) == old
    assert (old.rope_theta, old.rope_scaling) == (5e5, LLAMA3)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_is_written_in_several_ways(scaling: Any) -> None:
    assert config(rope_scaling=scaling).rope_scaling is None
    assert config(rope_parameters=scaling).rope_scaling is None


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_scaling": {"rope_type": "sideways"}}, "sideways"),
        ({"rope_scaling": {"type": "yarn", "gamma": 4.0}}, "rope_scaling.gamma"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear"),
        ({"rope_scaling": "linear"}, "rope_scaling must be"),
        ({"rope_scaling": False}, "rope_scaling must be"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {**LLAMA3, "factor": ...}}, "rope_scaling.factor"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 1.2}}, "rope_scaling.attention_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
    ],
)
def test_a_scaling_that_is_not_known_or_incomplete_is_refused_by_name(
    rope: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        config(**rope)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "high_freq_factor 4"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ],
)
def test_a_scaling_that_is_not_implemented_is_planned_but_not_trained(
    rope: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        require_trainable(config(**rope))
