"""Text to token ids and back: bytes, a byte-level BPE trained on the data, or a tokenizer.json.

The tokenizers library runs a pool of threads unless told not to, and a process forked after
that pool has started can hang in it. Workers are forked after the data are prepared, so this
module keeps the library to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fivefold.errors import UserError
from fivefold.train.data.documents import pieces

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the library at each call

END_OF_DOCUMENT = "<|endoftext|>"
COMMON_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")

BPE_SAMPLE = 4_000_000
"""Bytes of text a BPE is trained on, spread over all documents: 1 to 2 s on one core."""

SAMPLE_PIECE = 16_384  # characters of a document taken into the sample, or left out, at once
BYTE_VALUES = 256


class Tokenizer(Protocol):
    """What the data need of a tokenizer. All ids are in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int:
        """The token that ends each document."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with nothing added at its beginning or end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without end-of-document tokens."""
        ...


class ByteTokenizer:
    """The 256 byte values of UTF-8 text, and the end of a document."""

    vocab_size = BYTE_VALUES + 1
    eos_id = BYTE_VALUES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < BYTE_VALUES).decode(errors="replace")


@dataclass(frozen=True)
class LibraryTokenizer:
    """A tokenizer of the tokenizers library.

    A special token that is spelled out in a text is encoded as that token, as the library does
    by itself: a text file that separates its documents with <|endoftext|> is understood.
    """

    library: tokenizers.Tokenizer
    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        # The "fast" call leaves out the character offsets, which nobody needs here.
        return self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=True)


def bpe_vocab_size(spec: str) -> int | None:
    """N of the specification "bpe:N"; None if `spec` is another one. UserError if N is bad."""
    if not spec.startswith("bpe:"):
        return None
    number = spec.removeprefix("bpe:")
    if not number.isdecimal() or int(number) <= BYTE_VALUES:
        raise UserError(
            f"tokenizer {spec!r} must be bpe:N with N at least {BYTE_VALUES + 1}: the "
            f"{BYTE_VALUES} byte values and the end of a document; bpe:1024 is usual for a test"
        )
    return int(number)


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, as in GPT-2) trained on `texts`.

    The same texts give the same tokenizer. `vocab_size` counts the 256 bytes and the end of a
    document; if the texts are too small for that many tokens, the last ids are never used.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return LibraryTokenizer(library, vocab_size, eos_id=0)  # special tokens come first


def spread_sample(texts: Iterable[str], share: float) -> Iterator[str]:
    """About `share` (0 to 1) of the characters of `texts`, in pieces spread evenly over them."""
    seen = kept = 0
    for text in texts:
        for piece in pieces(text, SAMPLE_PIECE):
            seen += len(piece)
            if kept + len(piece) <= share * seen:
                kept += len(piece)
                yield piece


def read_tokenizer_file(spec: str) -> bytes:
    """The content of the tokenizer.json that `spec` names. UserError if there is none."""
    path = Path(spec).expanduser()
    if path.is_dir():
        raise UserError(f"tokenizer {spec} is a folder; name the file, {spec}/tokenizer.json")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"tokenizer {spec!r} is neither 'bytes' nor 'bpe:N' (such as bpe:1024) nor a "
            f"tokenizer.json that can be read ({error.strerror})"
        ) from error


def open_tokenizer(spec: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer of "bytes" or of the path of a tokenizer.json.

    A tokenizer.json does not say which token ends a document: it is `eos_token`, else the first
    of COMMON_END_TOKENS that it has. Raises UserError if the file cannot be used or has none.
    """
    if spec == "bytes":
        return ByteTokenizer()
    try:
        library = tokenizers.Tokenizer.from_buffer(read_tokenizer_file(spec))
    except ValueError as error:
        raise UserError(f"{spec} is no tokenizer.json: {error}") from error
    # A tokenizer.json may ask for both, and would silently shorten or pad every document.
    library.no_truncation()
    library.no_padding()
    eos_id = _end_token_id(library, spec, eos_token)
    # Not the number of tokens: ids can have gaps, and each must index the embedding.
    vocab_size = max(library.get_vocab().values()) + 1
    return LibraryTokenizer(library, vocab_size, eos_id)


def _end_token_id(library: tokenizers.Tokenizer, spec: str, eos_token: str | None) -> int:
    candidates = (eos_token,) if eos_token is not None else COMMON_END_TOKENS
    for token in candidates:
        token_id = library.token_to_id(token)
        if token_id is not None:
            return token_id
    special = [token.content for token in library.get_added_tokens_decoder().values()]
    raise UserError(
        f"{spec} has no end-of-document token {' or '.join(candidates)}; name one of its tokens "
        f"as eos_token (its special tokens: {', '.join(special[:8]) or 'none'})"
    )
