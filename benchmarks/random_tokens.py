"""Data for measurements of speed: what the tokens are makes no difference to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fivefold.train.data.tokens import HEADER, TOKENS, TokenFile


def random_tokens(folder: Path, vocabulary: int, count: int) -> TokenFile:
    """A token folder of one document with `count` random token ids below `vocabulary`."""
    ids = np.random.default_rng(0).integers(0, vocabulary, count).astype(np.uint32)
    ids.tofile(folder / TOKENS)
    made = TokenFile(folder, vocabulary, 0, count, 1, "uint32", "bytes", "random")
    header = {name: value for name, value in vars(made).items() if name != "path"}
    (folder / HEADER).write_text(json.dumps(header))
    return made
