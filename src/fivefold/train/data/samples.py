"""Which samples a step trains on, and their tokens.

The order of the samples is a pure function of the seed and the step. It knows nothing of ranks,
micro-batches or the run before, so a run that is resumed, or split in another way, sees the same
samples: none twice, none left out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.train.data.tokens import TokenFile

Ints = NDArray[np.int64]

IGNORED = -100
"""The label of a position that has no target (torch's cross_entropy skips it by default)."""


@dataclass(frozen=True)
class Batch:
    """Some samples of S tokens each. All arrays are int64 [n, S]."""

    tokens: Ints
    labels: Ints  # the next token of each position, or IGNORED
    documents: Ints  # which document of the sample a position belongs to, from 0
    positions: Ints  # place in the document; from 0 also where the sample cuts into a document


@dataclass(frozen=True)
class Samples:
    """The samples of a token stream: sample i is the window [i*S, i*S + S + 1) of it.

    With `isolate_documents` no position is to see or predict another document: `documents` and
    `positions` tell the documents apart, and the end of one has no label. Without, a sample is
    one text. Raises UserError if the stream has fewer samples than a step takes.
    """

    token_file: TokenFile
    sequence_length: int  # S, tokens
    global_batch: int  # samples per step, over all ranks
    seed: int
    isolate_documents: bool = False

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise UserError(
                f"the data have {self.token_file.tokens:,} tokens, fewer than one sample of "
                f"{self.sequence_length:,} + 1; give more text or a shorter sequence"
            )
        if len(self) < self.global_batch:
            raise UserError(
                f"the data have {self.token_file.tokens:,} tokens, {len(self):,} samples of "
                f"{self.sequence_length:,}, fewer than one global batch of {self.global_batch:,}: "
                f"an epoch would have no step; a global batch of {len(self):,} works"
            )

    def __len__(self) -> int:
        """Samples in an epoch. The last one, too, needs a token after it as its last label."""
        return max(0, self.token_file.tokens - 1) // self.sequence_length

    def ids(self, step: int) -> Ints:
        """The samples of `step` (from 0), [global_batch].

        Step and place in the batch number the samples on without end. Each epoch has an order
        of its own and the next one follows on directly, so a step can lie in two epochs.
        """
        numbers = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)
        epochs, places = np.divmod(numbers, len(self))
        ids = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = _order(len(self), self.seed, int(epoch))[places[here]]
        return ids

    def ids_for(
        self, step: int, dp_rank: int, dp: int, micro_batch: int, accumulation: int
    ) -> Ints:
        """The samples of `step` that one dp rank trains on, [accumulation, micro_batch].

        All ranks that share `dp_rank` (the tp, cp and pp peers) get the same ones, and the dp
        ranks together exactly `ids(step)`. ValueError if the split does not make up the batch.
        """
        return self.ids(step).reshape(accumulation, dp, micro_batch)[:, dp_rank]

    def read(self, ids: Ints) -> Batch:
        """The samples `ids`, [n]."""
        starts = np.asarray(ids)[:, None] * self.sequence_length
        windows = self.token_file.ids[starts + np.arange(self.sequence_length + 1)]
        windows = windows.astype(np.int64)
        tokens, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
        ends = tokens == self.token_file.eos_id
        if self.isolate_documents:
            labels[ends] = IGNORED  # the target is the first token of the next document
        else:
            ends = np.zeros_like(ends)
        return Batch(tokens, labels, *_documents_and_positions(ends))


@lru_cache(maxsize=4)  # two epochs each of a training and a validation set
def _order(samples: int, seed: int, epoch: int) -> Ints:
    """The order of one epoch, a permutation of [0, samples)."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(samples)


def _documents_and_positions(ends: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """For each position the document it is in and its place there, given where documents end."""
    documents = np.zeros(ends.shape, np.int64)
    documents[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
    places = np.arange(ends.shape[1], dtype=np.int64)
    first = np.zeros_like(documents)
    first[:, 1:] = np.where(ends[:, :-1], places[1:], 0)
    return documents, places - np.maximum.accumulate(first, axis=1)


def data_hash(batch: Batch) -> str:
    """16 hex digits that are equal for equal batches and otherwise differ.

    Ranks that share samples compare it, a string instead of the samples, to find out that one
    of them reads other data.
    """
    digest = hashlib.blake2b(digest_size=8)
    for field in fields(batch):
        array = np.ascontiguousarray(getattr(batch, field.name))
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
