from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.train.data.documents import default_corpus, find_files, pieces, read_documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(*paths: Path, field: str = "text") -> list[str]:
    return [document.text for document in read_documents(paths, field)]


def test_files_keep_their_order_and_globs_are_sorted(tmp_path: Path):
    z, b, a = (write(tmp_path / name, "") for name in ("z.txt", "in/b.py", "in/deep/a.py"))
    assert find_files([str(z), f"{tmp_path}/in/**/*.py"]) == [z, b, a]


def test_a_file_named_twice_is_read_once(tmp_path: Path):
    a, b = write(tmp_path / "a.txt", ""), write(tmp_path / "b.txt", "")
    assert find_files([str(b), f"{tmp_path}/*.txt", str(a)]) == [b, a]


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path):
    path = write(tmp_path / "a[1].txt", "")
    assert find_files([str(path)]) == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "there is no file .*missing.txt"),
        ("*.md", r"no file matches .*\*\.md"),
        ("", r"is a folder; name its files, for example .*\*\*/\*\.txt"),
    ],
)
def test_files_that_are_not_there_are_refused(tmp_path: Path, name: str, message: str):
    write(tmp_path / "a.txt", "")
    with pytest.raises(UserError, match=message):
        find_files([str(tmp_path / name)])


def test_an_unreadable_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"gone.txt cannot be read: No such file"):
        texts(tmp_path / "gone.txt")


def test_the_default_corpus_is_the_library_without_tests_in_a_fixed_order():
    paths = default_corpus()
    assert find_files(None) == find_files([]) == [path.resolve() for path in paths]
    assert paths == sorted(set(paths))
    names = {path.name for path in paths}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not {"test_argparse.py", "test_dataclasses.py", "idle_test"} & names
    folders = {part for path in paths for part in path.parts}
    assert "site-packages" not in folders
    assert sum(path.stat().st_size for path in paths) > 5_000_000


def test_a_file_is_one_document_with_its_line_ends_and_replaced_bad_bytes(tmp_path: Path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo \xff\n")
    (document,) = read_documents([path])
    assert document.text == "one\r\ntwo \N{REPLACEMENT CHARACTER}\n"
    assert document.size == path.stat().st_size


def test_a_jsonl_line_is_one_document_and_empty_lines_are_passed_over(tmp_path: Path):
    lines = [json.dumps({"body": "one\ntwo", "id": 1}), "", json.dumps({"body": ""}), "  "]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert texts(path, field="body") == ["one\ntwo", ""]


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path):
    (text,) = texts(write(tmp_path / "a.jsonl", r'{"text": "x\ud800y"}'))
    text.encode()  # would fail
    assert text[0] == "x" and text[-1] == "y"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "is no JSON: it begins with '{oops'"),
        ('{"txt": "a", "id": 1}', r"has no field 'text'; its fields are \['id', 'txt'\]"),
        ('{"text": null}', "has a NoneType in field 'text'"),
        ('["text"]', "is a JSON list"),
    ],
)
def test_a_bad_jsonl_line_is_refused_with_file_and_line(tmp_path: Path, line: str, message: str):
    path = write(tmp_path / "bad.jsonl", '{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl line 3 {message}"):
        texts(path)


def test_pieces_are_short_and_make_up_the_text():
    text = "".join(f"line {i}\n\n  indented\n" for i in range(200)) + "x" * 500
    parts = list(pieces(text, size=50))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 100
    assert list(pieces("short", size=50)) == ["short"]


@pytest.mark.parametrize(
    ("before", "after"),
    [("a line.\n\nand\n", "more"), ("two  spaces, a", " b"), ("12345678", " words")],
)
def test_pieces_end_between_words_with_one_space_or_line_break(before: str, after: str):
    text = before + after + "." * 20
    assert next(pieces(text, size=8)) == before
