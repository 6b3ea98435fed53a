"""What commands print and write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError
from fivefold.files import atomic_write

if TYPE_CHECKING:
    from rich.console import Console


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def console() -> Console:
    """Where tables are printed. A pipe has 80 columns, or what COLUMNS says."""
    from rich.console import Console

    return Console(highlight=False)


def write_file(path: str, text: str) -> None:
    try:
        atomic_write(Path(path), text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def note(text: str) -> None:
    """A line on stderr, so that stdout stays what was asked for."""
    print(text, file=sys.stderr)
