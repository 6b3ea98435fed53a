"""Reads the tables of actions that `schedule=FILE.csv` names."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fivefold.errors import UserError
from fivefold.layout.actions import ActionTable, is_table_file, parse_table
from fivefold.layout.notation import Layout

LARGEST_FILE = 64 * 2**20
"""Bytes of a table's file; 128 ranks with 1,024 micro-batches are 3 MB."""


def with_table(layout: Layout) -> Layout:
    """The layout with the table of the file that its schedule names, if it names one; UserError
    where `read_table` raises it."""
    if not is_table_file(layout.schedule):
        return layout
    return replace(layout, table=read_table(layout.schedule))


@lru_cache(maxsize=16)
def read_table(path: str) -> ActionTable:
    """The table in a file. Raises UserError for a file that cannot be read or has no table."""
    try:
        file = Path(path)
        if file.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} is larger than a table of actions may be, {LARGEST_FILE:,} B")
        return parse_table(file.read_text(encoding="utf-8-sig"), path)  # spreadsheets add a mark
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no CSV file: it is not UTF-8 text") from None
