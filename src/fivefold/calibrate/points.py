"""What was measured: points, and how those of several processes become one."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sizes = Mapping[str, int | str]


@dataclass(frozen=True)
class Point:
    """One operation at one size: the seconds that a call takes."""

    what: str  # product, attention, light, memory, host, optimizer, message, layer, ...
    sizes: Sizes  # what tells it from others: part, shape, group
    wall_s: float
    cpu_s: float
    """Processor seconds of all threads of a process; of a message, the mean over its ranks."""
    precision: str = "fp32"

    def record(self) -> dict[str, Any]:
        """As a cluster file keeps it."""
        return {
            "what": self.what,
            **self.sizes,
            "precision": self.precision,
            "wall_s": rounded(self.wall_s),
            "cpu_s": rounded(self.cpu_s),
        }


def point_of(record: Mapping[str, Any]) -> Point:
    """The point that a record was made of."""
    named = ("what", "precision", "wall_s", "cpu_s")
    sizes = {key: value for key, value in record.items() if key not in named}
    return Point(sizes=sizes, **{key: record[key] for key in named})


def rounded(value: float) -> float:
    """To four digits: no measurement has more."""
    return float(f"{value:.4g}")


def merged(by_rank: Sequence[Iterable[Point]]) -> list[Point]:
    """The points of all processes, in the order of the first. Those of several processes are one:
    a message's seconds are means, since its ranks may have different parts in it, and all others
    are medians."""
    alike: dict[tuple, list[Point]] = defaultdict(list)
    for points in by_rank:
        for point in points:
            alike[point.what, tuple(point.sizes.items()), point.precision].append(point)
    return list(_merged(alike.values()))


def _merged(groups: Iterable[list[Point]]) -> Iterator[Point]:
    for group in groups:
        first = group[0]
        middle = statistics.fmean if first.what == "message" else statistics.median
        yield Point(
            first.what,
            first.sizes,
            middle(point.wall_s for point in group),
            middle(point.cpu_s for point in group),
            first.precision,
        )
