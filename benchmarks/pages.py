"""Parts of pages that commands write, between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fivefold.files import atomic_write


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a part, its empty lines included."""
    return f"<!-- begin: {name} -->\n\n", f"\n\n<!-- end: {name} -->"


def block(page: str, name: str) -> str:
    """What stands between two markers. Raises ValueError where a page does not have them."""
    begin, end = markers(name)
    return page[page.index(begin) + len(begin) : page.index(end)]


def with_block(page: str, name: str, content: str) -> str:
    """The page with another content there."""
    begin, end = markers(name)
    return page.replace(begin + block(page, name) + end, begin + content + end)


def write(path: Path, contents: Mapping[str, str]) -> None:
    """Puts the contents, by name, into the page of a file."""
    page = path.read_text(encoding="utf-8")
    for name, content in contents.items():
        page = with_block(page, name, content)
    atomic_write(path, page)
