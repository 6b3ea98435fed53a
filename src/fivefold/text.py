"""Words for the numbers in an error: what was asked for, and the nearest that works."""

from __future__ import annotations

import math
from collections.abc import Iterable


def product(factors: dict[str, int]) -> str:
    """`tp 2 x dp 4`, without the factors that are 1 (unless all are)."""
    shown = {name: value for name, value in factors.items() if value != 1} or factors
    return " x ".join(f"{name} {value}" for name, value in shown.items())


def divisors(number: int) -> list[int]:
    """The divisors of a number of 1 or more, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` (1 or more times) on both sides of a value that is none."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)


def join_or(values: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def nearest_choices(choices: Iterable[int], wanted: int) -> str:
    """`1, 2, 5 or 10`: the choices, of a long list the 16 nearest to what was wanted."""
    return join_or(sorted(sorted(choices, key=lambda choice: abs(choice - wanted))[:16]))
