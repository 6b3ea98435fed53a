from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest

from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.simulation import simulate
from fivefold.report.schedule_drawing import draw, svg


def test_the_picture_shows_forwards_backwards_and_idle_time():
    assert draw(build("1f1b", 2, 1, 3)) == (
        "rank 0  0 1 . . [0] 2 [1] . [2]\nrank 1  . 0 [0] 1 [1] 2 [2]"
    )


def test_the_picture_names_the_chunk_by_a_letter():
    assert draw(build("1f1b", 2, 2, 2)) == (
        "rank 0  0a 1a 0b 1b .  .  [0b]  .  [1b]  [0a]  [1a]\n"
        "rank 1  .  0a 1a 0b [0b]  1b [1b]  [0a]  [1a]"
    )


def test_the_picture_tells_the_two_parts_of_a_backward():
    assert draw(build("zb-h1", 2, 1, 2)) == (
        "rank 0  0   1   .   (0) {0} (1) {1}\nrank 1  .   0   (0) 1   (1) {0} {1}"
    )


@pytest.mark.parametrize(("name", "vpp"), [("dualpipe", 1), ("zb-v", 2), ("1f1b", 3)])
def test_the_drawing_is_well_formed_and_has_every_action(name: str, vpp: int):
    schedule = build(name, 4, vpp, 8)
    drawing = ElementTree.fromstring(svg(simulate(schedule, 1.0, 2.0, overlapped_s=2.5)))
    titles = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(map(str, titles)) == sorted(str(a) for row in schedule.table for a in row)


def test_what_a_file_is_called_is_escaped_in_the_drawing():
    schedule = dataclasses.replace(build("1f1b", 2, 1, 2), name='<script>"&')
    drawing = svg(simulate(schedule, 1.0, 2.0))
    assert "<script>" not in drawing
    ElementTree.fromstring(drawing)
