"""What a rule about layouts is: a condition and a sentence.

The condition is elementwise, so that it holds for one `Layout`, or says which of a `LayoutBatch`
keep it. The sentence is about one layout that does not: what is wrong, the numbers, the nearest
choices that work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fivefold.arrays import Elementwise


@dataclass(frozen=True)
class Rule:
    """`holds` says elementwise whether a layout keeps the rule, given what the rule is about;
    `sentence` says, given the same, how one layout breaks it."""

    holds: Callable[..., Elementwise]
    sentence: Callable[..., str]


def rule(holds: Callable[..., Elementwise]) -> Callable[[Callable[..., str]], Rule]:
    """Makes a function that gives the sentence the rule whose condition is `holds`."""
    return lambda sentence: Rule(holds, sentence)


def broken(rules: Iterable[Rule], *subject: object) -> Iterator[str]:
    """The sentences of the rules that one layout breaks."""
    return (each.sentence(*subject) for each in rules if not each.holds(*subject))


def is_one_of(value: Elementwise, names: tuple[str, ...]) -> Elementwise:
    return np.any([value == name for name in names], axis=0)
