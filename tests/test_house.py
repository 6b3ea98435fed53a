"""The program keeps its shape: which room imports which, and how large its parts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import ARROWS, BASE, House

HOUSE = House()
MEASURES = HOUSE.measures()

# What is larger than its limit has to become smaller; a limit is raised only with a reason.
LIMITS = {
    "runtime lines": 11_000,
    "step lines": 6_000,
    "step lines of code": 4_500,
    "worker lines": 7_400,
    "planner lines": 8_700,
    "files over 400 lines": 0,
    "functions over 50 lines of code": 1,
    "functions with over 2 booleans": 0,
    "lines with Any in annotations": 70,
    "upward imports": 0,
    "package cycles": 0,
    "module cycles": 0,
    "places that describe a weight's split": 1,
}


@pytest.mark.parametrize("name", LIMITS)
def test_no_measure_is_over_its_limit(name: str):
    value = MEASURES[name]
    size = len(value) if isinstance(value, list) else value
    assert size <= LIMITS[name], value


def test_every_room_has_its_arrows():
    """A new room says what it may import."""
    assert {m.room for m in HOUSE.modules.values()} - {"cli", "api", "__main__"} <= set(ARROWS)


def test_the_arrows_themselves_make_no_circle():
    for room, allowed in ARROWS.items():
        for other in allowed - BASE:
            assert room not in ARROWS[other], (room, other)


def test_imports_are_found_wherever_they_are(tmp_path: Path):
    """At the top, in a function, for types alone, of a module or of a name in it."""
    package = tmp_path / "fivefold"
    for room in ("layout", "plan", "train"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "layout" / "notation.py").write_text("def f():\n    import fivefold.plan.request\n")
    (package / "plan" / "request.py").write_text("from fivefold.train import trainer\n")
    (package / "train" / "trainer.py").write_text(
        "if TYPE_CHECKING:\n    from fivefold.layout.notation import Layout\n"
    )
    house = House(tmp_path)
    assert house.upward_imports() == [
        "fivefold.layout.notation -> fivefold.plan.request",
        "fivefold.plan.request -> fivefold.train.trainer",
    ]
    circle = "fivefold.layout <-> fivefold.plan <-> fivefold.train"
    assert house.package_cycles() == [circle]
    assert len(house.module_cycles()) == 1
    assert [m.name for m in house.executed("fivefold.train.trainer")] == ["fivefold.train.trainer"]


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path: Path):
    package = tmp_path / "fivefold"
    package.mkdir()
    (package / "__init__.py").write_text(
        '"""Text\nof two lines."""\n\n# A comment.\n'
        'def f(a: bool, b=True, *, c: bool = False, d: Any = 1):\n    """Text."""\n    return a\n'
    )
    house = House(tmp_path)
    measures = house.measures()
    assert measures["lines of code"] == 2
    (function,) = house.functions()
    assert (function.code_lines, function.booleans) == (2, 3)
    assert measures["lines with Any in annotations"] == 1
