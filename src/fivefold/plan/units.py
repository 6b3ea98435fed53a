"""Values with units, as typed: tokens, bytes, shares, seconds."""

from __future__ import annotations

import re

from fivefold.errors import UserError

COUNT_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LENGTH_UNITS = {"": 1, "K": 2**10, "M": 2**20}
BYTE_UNITS = {"M": 1e6, "G": 1e9, "T": 1e12, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}
TIME_UNITS = {"s": 1.0, "ms": 1e-3}
LARGEST_NUMBER = 1e18
"""Of tokens, bytes or seconds; more digits could make a float infinite."""


def token_count(text: str, option: str) -> float:
    """`16M`, `15T` or `4e6`: a count of tokens."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]{1,2})?)([kKmMbBtT]?)", text.strip())
    value = float(parts[1]) * COUNT_UNITS[parts[2].upper()] if parts else 0.0
    if not 1 <= value <= LARGEST_NUMBER:
        raise UserError(f"{option} {text!r} is not a number of tokens: write it like 16M or 15T")
    return value


def sequence_tokens(text: str) -> int:
    """`8192` or `8K`. A sequence of 8K tokens has 8 x 1,024, as usual."""
    parts = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text.strip())
    value = int(parts[1]) * LENGTH_UNITS[parts[2].upper()] if parts else 0
    if value < 1:
        raise UserError(f"--seq {text!r} is not a number of tokens: write it like 8192 or 8K")
    return value


def memory_bytes(text: str) -> float:
    """`70GB`, `70G` or `64GiB`."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([MGT]i?)B?", text.strip(), re.IGNORECASE)
    value = float(parts[1]) * BYTE_UNITS[parts[2].upper()] if parts else 0.0
    if not 0 < value <= LARGEST_NUMBER:
        raise UserError(f"--max-memory {text!r} is not an amount of memory: write it like 70GB")
    return value


def memory_share(text: str) -> float:
    """`5%` or `0.05`."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text.strip())
    value = float(parts[1]) / (100 if parts[2] else 1) if parts else -1.0
    if not 0 <= value < 1:
        raise UserError(f"--headroom {text!r} is not a share of the memory: write it like 5%")
    return value


def layout_and_seconds(text: str) -> tuple[str, float]:
    """`tp8 pp4 mb1=9.31s`: the text of a layout, and seconds."""
    line, equals, time = text.rpartition("=")
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(s|ms)", time.strip())
    seconds = float(parts[1]) * TIME_UNITS[parts[2]] if parts else 0.0
    if not equals or not line.strip() or not 0 < seconds <= LARGEST_NUMBER:
        raise UserError(
            f'--measured {text!r} is not a measured step: write it like "tp8 pp4=9.31s"'
        )
    return line, seconds
