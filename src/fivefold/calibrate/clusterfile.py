"""The cluster file of a machine that was measured. Needs no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fivefold.errors import UserError
from fivefold.files import atomic_write


def as_text(head: Mapping[str, Any], lists: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    """YAML with a record of each list on a line of its own."""
    parts = [yaml.safe_dump(dict(head), sort_keys=False, width=100)]
    for name, records in lists.items():
        lines = [yaml.safe_dump(dict(r), **_ONE_LINE).strip() for r in records]
        parts.append(f"{name}:\n" + "".join(f"- {line}\n" for line in lines) if lines else "")
    return "".join(parts)


_ONE_LINE: dict[str, Any] = {
    "default_flow_style": True,
    "sort_keys": False,
    "width": float("inf"),
}


def check_writable(path: Path) -> None:
    """Makes the folder of a file that is to be written. UserError where that or a file in it is
    not allowed, which is better known before minutes of measuring."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it, such as {path / 'here.yaml'}")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def write(path: Path, text: str) -> None:
    """Writes the file. UserError where that is not allowed."""
    with _writing(path):
        atomic_write(path, text)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the cluster file {path} cannot be written ({error.strerror}): name another with --out"
        ) from None
