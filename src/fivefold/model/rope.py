"""Rotary position embedding: its frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fivefold.model.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle in radians that each pair of head elements turns by from one token to the next.

    Returns float64 [head_dim / 2], pair 0 (the fastest) first.

    Sources: theta^(-2i/d) is Su et al. 2021, arXiv:2104.09864, section 3.2.2; linear scaling
    is position interpolation, Chen et al. 2023, arXiv:2306.15595; llama3 is the scaling published
    with Llama 3.1 (meta-llama/llama-models, `apply_scaling`).
    """
    pairs = np.arange(config.head_dim // 2, dtype=np.float64)
    frequencies = config.rope_theta ** (-2.0 * pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    return _llama3(frequencies, scaling)


def _llama3(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Slow down by `factor` only the pairs that turn too seldom within the original context.

    A pair that turns at least `high_freq_factor` times in it stays as it is, one that turns at
    most `low_freq_factor` times is divided by `factor`, and between the two it is blended.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling["factor"])
