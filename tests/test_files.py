from __future__ import annotations

import pytest

from fivefold.files import parse_yaml, read_yaml
from tests.helpers import refusal


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("4.5e2", 450.0), ("1E3", 1000.0), (".5e1", 5.0), ("1", 1), ("e1", "e1")],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(f"a: {text}", "here", "file")
    assert found == {"a": value} and isinstance(found, dict)
    assert type(found["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", ", line 3: the key a is given twice"),
        ("a: {b: 1, b: 2}", ", line 1: the key b is given twice"),
        ("a: [1", ", line 1"),
        ("a: !!python/object/apply:os.getcwd []", ", line 1: could not determine a constructor"),
        ("? {a: 1}\n: 2\n", ", line 1: found unhashable key"),
        ("a: 2020-99-99", ": month must be in 1..12"),
        ("[" * 20_000, ""),
        ("- " * 50_000, ""),
    ],
)
def test_what_is_no_yaml_is_refused_with_the_line(tmp_path, text, problem):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    message = refusal(read_yaml, path, "plan file")
    assert message.startswith(f"{path}: the plan file is not valid YAML{problem}")
    assert "\n" not in message
