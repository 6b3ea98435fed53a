from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.actions import Action, rank_of, table_text
from fivefold.layout.legality import violations
from fivefold.layout.notation import parse
from fivefold.parallel.pipeline import table_file
from fivefold.parallel.pipeline.table_file import read_table, with_table
from tests.helpers import refusal


def written(folder: Path, text: str) -> str:
    path = folder / "Table.csv"
    path.write_text(text)
    read_table.cache_clear()
    return str(path)


def test_a_file_says_its_numbers_and_where_its_stages_lie(tmp_path: Path):
    path = written(
        tmp_path, "0F0,0F1,3F0, ,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,1F1,2I0,1B0,2F1,2W0,2B1,1B1\n"
    )
    table = read_table(path)
    assert (table.pp, table.vpp, table.micro_batches, table.placement) == (2, 2, 2, "fold")
    assert table.rows[0][:3] == (Action("F", 0, 0), Action("F", 0, 1), Action("F", 3, 0))
    assert len(table.rows[0]) == 8  # the pause is no action
    assert Action("W", 2, 0) in table.rows[1]


def test_side_by_side_is_read_and_written(tmp_path: Path):
    text = "0F0,3F0,(0F1;3B0)OVERLAP_F_B,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2B0,1B0,2F1,2B1,1B1\n"
    table = read_table(written(tmp_path, text))
    assert table.pairs == (frozenset({2}), frozenset())
    assert table_text(table.rows, table.pairs) == text


CELLS = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 1), st.integers(0, 9))


@given(st.lists(CELLS, max_size=9), st.lists(CELLS, max_size=9))
def test_what_is_written_is_read_again(tmp_path_factory, first: list[Action], second: list[Action]):
    rows = tuple(
        (Action("F", rank, 0), *(action._replace(stage=rank) for action in row))
        for rank, row in enumerate((first, second))
    )
    path = written(tmp_path_factory.mktemp("t"), table_text(rows, (frozenset(), frozenset())))
    assert read_table(path).rows == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no actions: a row a rank"),
        ("\n\n", "has no actions"),
        ("0F0,0B0\n1F0,1X0\n", "row 2: '1X0' is no action: write stage, kind (F, B, I or W)"),
        ("0F0,__import__('os')\n", "is no action"),
        ("0F-1\n", "'0F-1' is no action"),
        ("0F\n", "'0F' is no action"),
        ("0F99999999999\n", "is no action"),
        ("(0B0;1F0)OVERLAP_F_B\n", "not a forward with a backward"),
        ("(0F0;1B0;2B0)OVERLAP_F_B\n", "is no action"),
        ("0UNSHARD,0F0\n", "'0UNSHARD' is no action"),
        ("0F0,2F0\n1F0\n", "has 3 stages for its 2 rows"),
        ("1F0\n0F0\n", "gives rank 0 the stages [1] of 2"),
        (
            "0F0,1F0\n2F0,3F0\n",
            "stages lie in a loop (stage s on rank s % 2) or, two a rank, in a V",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str):
    assert words in refusal(read_table, written(tmp_path, text))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch):
    assert "cannot read" in refusal(read_table, str(tmp_path / "none.csv"))
    (tmp_path / "folder.csv").mkdir()
    assert "cannot read" in refusal(read_table, str(tmp_path / "folder.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    assert "not UTF-8" in refusal(read_table, str(tmp_path / "bytes.csv"))
    monkeypatch.setattr(table_file, "LARGEST_FILE", 10)
    assert "larger than a table" in refusal(read_table, written(tmp_path, "0F0,0B0,0F1"))


@given(st.integers(1, 9), st.integers(0, 3))
def test_a_v_turns_on_the_last_rank_and_on_the_first(pp: int, lap: int):
    ranks = [rank_of(lap * pp + place, pp, "fold") for place in range(pp)]
    assert ranks == (list(range(pp)) if lap % 2 == 0 else list(reversed(range(pp))))


def test_a_layout_may_name_a_file_and_must_have_its_numbers(tmp_path: Path):
    path = written(tmp_path, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    layout = with_table(parse(f"PP2 ga2 schedule={path}"))
    assert layout.schedule == path  # files have capitals
    assert parse(str(layout)) == layout
    assert not layout.is_v_shaped and violations(layout) == []
    (sentence,) = violations(with_table(parse(f"pp2 ga4 schedule={path}")))
    assert "is a table for pp2 vpp1 ga2, not for pp2 vpp1 ga4" in sentence
    with pytest.raises(UserError, match="cannot read"):
        with_table(parse("pp2 ga2 schedule=none.csv"))


def test_a_file_may_have_a_v(tmp_path: Path):
    path = written(tmp_path, "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    layout = with_table(parse(f"pp2 vpp2 schedule={path}"))
    assert layout.is_v_shaped and layout.first_and_last_share_rank and violations(layout) == []
