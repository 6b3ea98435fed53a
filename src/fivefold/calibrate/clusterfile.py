"""The cluster file of a machine that was measured. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fivefold.errors import UserError
from fivefold.files import write_aside


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


def write(path: Path, text: str) -> None:
    """Writes the file and its folder. UserError where that is not allowed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, text)
    except OSError as error:
        raise UserError(
            f"the cluster file {path} cannot be written ({error.strerror}): name another with --out"
        ) from None
