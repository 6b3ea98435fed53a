"""The cluster file of a machine that was measured. Needs no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from fivefold.errors import UserError
from fivefold.files import atomic_write


def as_text(values: Mapping[str, object]) -> str:
    """YAML with each record of a list on a line of its own."""
    return yaml.safe_dump(values, default_flow_style=None, sort_keys=False, width=float("inf"))


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
