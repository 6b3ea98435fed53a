"""All documents as one flat stream of token ids on disk, tokenized once and kept.

A token folder holds tokens.bin (the ids, nothing else), tokens.json (what they are) and, unless
tokens are bytes, tokenizer.json. It is written aside and then renamed, so a folder that is there
is whole, and of two processes that prepare the same data at once the later one uses the folder
of the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers

from fivefold.errors import UserError
from fivefold.train.data.documents import Document, find_files, pieces, read_documents
from fivefold.train.data.tokenizer import (
    BPE_SAMPLE,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    bpe_vocab_size,
    open_tokenizer,
    read_tokenizer_file,
    spread_sample,
    train_bpe,
)

FORMAT = 1  # raise it when the same files and tokenizer come to give other tokens
TOKENS, HEADER, TOKENIZER = "tokens.bin", "tokens.json", "tokenizer.json"
DTYPES = ("uint16", "uint32")

Progress = Callable[[int, int], None]
"""Called as progress(done_bytes, total_bytes) while the files are tokenized."""


@dataclass(frozen=True)
class TokenFile:
    """A token folder. Nothing is opened before `ids` is asked for."""

    path: Path
    vocab_size: int
    eos_id: int
    tokens: int  # length of the stream, end-of-document tokens included
    documents: int
    dtype: str
    tokenizer_spec: str
    key: str  # hash of all that the tokens depend on

    @cached_property
    def ids(self) -> np.memmap:
        """The stream, [tokens], memory-mapped read-only."""
        return np.memmap(self.path / TOKENS, dtype=self.dtype, mode="r", shape=(self.tokens,))

    def __reduce__(self):
        # Another process maps the file itself; a pickled map would carry all the tokens.
        return open_tokens, (self.path,)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the stream."""
        if self.tokenizer_spec == "bytes":
            return ByteTokenizer()
        library = tokenizers.Tokenizer.from_file(str(self.path / TOKENIZER))
        return LibraryTokenizer(library, self.vocab_size, self.eos_id)


def prepare(
    files: Sequence[str] | None = None,
    text_field: str = "text",
    tokenizer_spec: str = "bytes",
    eos_token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> TokenFile:
    """Tokenize all documents of `files` into one stream, or find it already made.

    `files` are paths and globs (none: the Python standard library's source), `text_field` the
    field of .jsonl lines. `tokenizer_spec` is "bytes", "bpe:N" or a tokenizer.json, whose
    end-of-document token `eos_token` may name. `cache_dir` defaults to fivefold's folder in the
    user's cache. Made again when a file's size or time changes. Raises UserError for bad input.
    """
    if eos_token is not None and (tokenizer_spec == "bytes" or bpe_vocab_size(tokenizer_spec)):
        raise UserError(
            f"eos_token {eos_token!r} names a token of a tokenizer.json; tokenizer "
            f"{tokenizer_spec!r} has its own end-of-document token, so leave it out"
        )
    paths = find_files(files)
    key = _key(paths, text_field, tokenizer_spec, eos_token)
    folder = (Path(cache_dir).expanduser() if cache_dir else default_cache_dir()) / key
    if not folder.exists():
        _make_folder(folder, paths, text_field, tokenizer_spec, eos_token, progress)
    return open_tokens(folder)


def open_tokens(path: str | Path) -> TokenFile:
    """The token folder at `path`. Raises UserError if it is none or is damaged."""
    path = Path(path)
    try:
        token_file = TokenFile(path=path, **json.loads((path / HEADER).read_text()))
        size = (path / TOKENS).stat().st_size
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is no folder of prepared tokens ({error}); delete it and prepare it again"
        ) from error
    if token_file.dtype not in DTYPES:
        raise UserError(f"{path / HEADER} has dtype {token_file.dtype!r}; it must be in {DTYPES}")
    expected = token_file.tokens * np.dtype(token_file.dtype).itemsize
    if size != expected:
        raise UserError(
            f"{path / TOKENS} has {size:,} bytes where its header says {expected:,}; delete "
            f"{path} and prepare it again"
        )
    return token_file


def default_cache_dir() -> Path:
    """fivefold's folder in the user's cache: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fivefold"


def _key(paths: Sequence[Path], text_field: str, spec: str, eos_token: str | None) -> str:
    known = spec == "bytes" or bpe_vocab_size(spec)
    stats = [(path, path.stat()) for path in paths]
    parts = {
        "format": FORMAT,
        "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "text_field": text_field,
        "tokenizer": spec if known else hashlib.sha256(read_tokenizer_file(spec)).hexdigest(),
        "eos_token": eos_token,
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _make_tokenizer(
    spec: str, eos_token: str | None, paths: Sequence[Path], text_field: str, total: int
) -> Tokenizer:
    vocab_size = bpe_vocab_size(spec)
    if vocab_size is None:
        return open_tokenizer(spec, eos_token)
    texts = (document.text for document in read_documents(paths, text_field))
    share = min(1.0, BPE_SAMPLE / max(1, total))
    return train_bpe(spread_sample(texts, share), vocab_size)


def _make_folder(
    folder: Path,
    paths: Sequence[Path],
    text_field: str,
    spec: str,
    eos_token: str | None,
    progress: Progress | None,
) -> None:
    total = sum(path.stat().st_size for path in paths)
    tokenizer = _make_tokenizer(spec, eos_token, paths, text_field, total)
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        aside.mkdir(parents=True)
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        with (aside / TOKENS).open("wb") as file:
            documents = read_documents(paths, text_field)
            counts = _write_tokens(file, documents, tokenizer, dtype, progress, total)
        _write_header(aside, tokenizer, spec, dtype, counts, key=folder.name)
        _rename(aside, folder)
    except OSError as error:
        raise UserError(
            f"the tokens of {total:,} bytes of text cannot be written to {folder.parent}: "
            f"{error.strerror}; make room there, or set data.cache to another folder"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_tokens(
    file: BinaryIO,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    dtype: str,
    progress: Progress | None,
    total: int,
) -> tuple[int, int]:
    """Append every document and its end to `file`; how many tokens and documents they are."""
    tokens = count = 0
    done = 0.0

    def append(ids: list[int]) -> None:
        nonlocal tokens
        file.write(np.array(ids, dtype).tobytes())
        tokens += len(ids)

    for document in documents:
        for piece in pieces(document.text):
            append(tokenizer.encode(piece))
            done += document.size * len(piece) / max(1, len(document.text))
            if progress:
                progress(round(done), total)
        append([tokenizer.eos_id])
        count += 1
    if progress:
        progress(total, total)  # empty lines were passed over
    return tokens, count


def _write_header(
    folder: Path, tokenizer: Tokenizer, spec: str, dtype: str, counts: tuple[int, int], key: str
) -> None:
    tokens, documents = counts
    header = {
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokens": tokens,
        "documents": documents,
        "dtype": dtype,
        "tokenizer_spec": spec,
        "key": key,
    }
    (folder / HEADER).write_text(json.dumps(header, indent=2))
    if isinstance(tokenizer, LibraryTokenizer):
        tokenizer.library.save(str(folder / TOKENIZER))


def _rename(aside: Path, folder: Path) -> None:
    try:
        os.replace(aside, folder)
    except OSError:
        if not folder.exists():
            raise
        # Another process was first. Its tokens are the same, so they serve.
