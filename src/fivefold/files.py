"""Files that are never half there."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(path: Path, text: str) -> None:
    """Write a file aside and give it its name when it is whole. OSError where that fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
