"""Which positions of a sequence each context-parallel rank holds.

Ring ranks hold two chunks each, one from either end (zigzag), so that causal attention gives
every rank the same work: of 2r equal chunks, ring rank i has chunk i and chunk 2r - 1 - i. The
ulysses ranks of one ring rank hold consecutive parts of its positions. Megatron sequence
parallelism splits what a rank holds once more, in order. No torch here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ring_positions(sequence_length: int, ring: int, rank: int) -> NDArray[np.int64]:
    """Positions on one ring rank, ascending: [sequence_length / ring]."""
    positions = np.arange(sequence_length)
    if ring == 1:
        return positions
    chunks = positions.reshape(2 * ring, -1)
    return np.concatenate([chunks[rank], chunks[2 * ring - 1 - rank]])


def context_positions(
    sequence_length: int, ring: int, ring_rank: int, ulysses: int, ulysses_rank: int
) -> NDArray[np.int64]:
    """Positions on one context-parallel rank: [sequence_length / (ring * ulysses)]."""
    return ring_positions(sequence_length, ring, ring_rank).reshape(ulysses, -1)[ulysses_rank]
