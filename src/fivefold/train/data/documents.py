"""Where the training text comes from: files, and the documents in them."""

from __future__ import annotations

import glob
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UserError

# Folders of the standard library that are not its own source, or are tests full of odd data.
NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

PIECE = 1_000_000
"""Characters that are tokenized at once: a long document must not fill the memory."""

# Before a single space between two words, or after a single line break between two lines of
# text: byte-level tokenizers (GPT-2, Llama 3, Qwen) end a word here, whatever is around it.
SEAM = re.compile(r"(?<=\w)(?= [^\W\d_])|(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class Document:
    """One document, and the bytes it takes in its file (for progress)."""

    text: str
    size: int


def find_files(files: Sequence[str] | None = None) -> list[Path]:
    """The absolute paths of `files`, each a path or a glob (`**` reaches into folders).

    The order is that of `files`, sorted within a glob; a file named twice is read once. With
    no files it is the default corpus. Raises UserError for what is missing or matches nothing.
    """
    if not files:
        return default_corpus()
    found = (path.resolve() for name in files for path in _matches(name))
    return list(dict.fromkeys(found))


def default_corpus() -> list[Path]:
    """The source of this Python's standard library, without its tests: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - NOT_CORPUS  # these it does not walk into
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise UserError(
            f"the default corpus, the Python standard library's source, is not in {root}; "
            "name the files to train on"
        )
    return sorted(path for path in paths if path.is_file())


def _matches(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise UserError(f"{name} is a folder; name its files, for example {name}/**/*.txt")
    if not glob.has_magic(name):
        raise UserError(f"there is no file {name}")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    matches = [match for match in matches if match.is_file()]
    if not matches:
        raise UserError(f"no file matches {name}")
    return matches


def read_documents(paths: Sequence[Path], text_field: str = "text") -> Iterator[Document]:
    """The documents of `paths`: each line of a .jsonl file, and any other file as a whole.

    Bytes that are no UTF-8 become U+FFFD. Raises UserError, with file and line, for a jsonl
    line that is no JSON object with a text in `text_field`; empty lines are passed over.
    """
    for path in paths:
        try:
            if path.suffix == ".jsonl":
                yield from _read_jsonl(path, text_field)
            else:
                content = path.read_bytes()
                yield Document(_decode(content), len(content))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Document(_text_of_line(line, text_field, f"{path} line {number}"), len(line))


def _text_of_line(line: bytes, text_field: str, where: str) -> str:
    line_text = _decode(line).strip()
    try:
        record = json.loads(line_text)
    except ValueError as error:
        raise UserError(f"{where} is no JSON: it begins with {line_text[:40]!r}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{where} is a JSON {type(record).__name__}; each line must be an object with a "
            f"field {text_field!r}"
        )
    if text_field not in record:
        raise UserError(f"{where} has no field {text_field!r}; its fields are {sorted(record)}")
    text = record[text_field]
    if not isinstance(text, str):
        raise UserError(
            f"{where} has a {type(text).__name__} in field {text_field!r}; it must be a text"
        )
    # JSON can spell half a surrogate pair, which no UTF-8 text can hold.
    return _decode(text.encode("utf-8", errors="surrogatepass"))


def _decode(content: bytes) -> str:
    return content.decode("utf-8-sig", errors="replace")


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """`text` in pieces of `size` to `2 * size` characters, the last one shorter.

    A piece ends between words, where a byte-level tokenizer would cut the text anyway, so the
    tokens are those of the whole text. Only where there is no such place for `size` characters
    a word may be cut.
    """
    start = 0
    while len(text) - start > 2 * size:
        seam = SEAM.search(text, start + size, start + 2 * size)
        end = seam.end() if seam else start + 2 * size
        yield text[start:end]
        start = end
    yield text[start:]
