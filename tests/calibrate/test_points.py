from __future__ import annotations

import yaml

from fivefold.calibrate.clusterfile import as_text
from fivefold.calibrate.points import Point, merged, point_of


def test_a_point_comes_back_from_the_file_as_it_was() -> None:
    point = Point("product", {"part": "input", "m": 8, "n": 16, "k": 4}, 1e-5, 12345e-9, "bf16")
    text = as_text({"summary": "a", "points": [point.record()]})
    assert text.splitlines()[1:] == ["points:", f"- {text.splitlines()[2][2:]}"]  # on one line
    read = yaml.safe_load(text)["points"][0]
    assert point_of(read) == Point("product", point.sizes, 1e-5, 1.234e-5, "bf16")


def test_processes_count_with_their_median_and_ranks_of_a_message_with_their_mean() -> None:
    by_rank = [
        [Point("light", {"rows": 1}, x, x), Point("message", {"size": 2}, x, x)]
        for x in (1.0, 2.0, 9.0)
    ]
    by_rank.append([Point("message", {"size": 2}, 4.0, 4.0)])  # measures messages only
    light, message = merged(by_rank)
    assert (light.wall_s, light.cpu_s) == (2.0, 2.0)
    assert (message.wall_s, message.cpu_s) == (4.0, 4.0)


def test_points_of_other_sizes_stay_apart() -> None:
    points = [Point("light", {"rows": n}, n, n) for n in (1, 2)]
    assert merged([points, points]) == points
