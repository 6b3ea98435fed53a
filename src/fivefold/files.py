"""Files that are never half there."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file (text in UTF-8) aside and give it its name when it is whole. OSError where that
    fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(aside, path)
