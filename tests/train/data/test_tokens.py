from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from fivefold.errors import UserError
from fivefold.train.data import default_corpus
from fivefold.train.data.tokenizer import train_bpe
from fivefold.train.data.tokens import default_cache_dir, open_tokens, prepare


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "a.txt"
    path.write_text("ab")
    return str(path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "fivefold"


def test_documents_follow_each_other_each_with_its_end(tmp_path: Path, text_file: str, cache: Path):
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"body": "c"}\n\n{"body": "de"}\n')
    made = prepare([text_file, str(lines)], "body", "bytes", cache_dir=cache)
    assert made.ids.tolist() == [97, 98, 256, 99, 256, 100, 101, 256]
    assert (made.tokens, made.documents) == (8, 3)
    assert (made.vocab_size, made.eos_id, made.dtype) == (257, 256, "uint16")
    assert made.tokenizer().decode(made.ids.tolist()) == "abcde"


def test_the_header_beside_the_tokens_says_what_they_are(text_file: str, cache: Path):
    made = prepare([text_file], cache_dir=cache)
    header = json.loads((made.path / "tokens.json").read_text())
    assert header == {
        "vocab_size": 257,
        "eos_id": 256,
        "tokens": 3,
        "documents": 1,
        "dtype": "uint16",
        "tokenizer_spec": "bytes",
        "key": made.path.name,
    }
    assert (made.path / "tokens.bin").read_bytes() == np.array([97, 98, 256], "u2").tobytes()
    assert open_tokens(str(made.path)) == made


def test_the_stream_is_read_only_and_mapped_only_when_used(text_file: str, cache: Path):
    made = prepare([text_file], cache_dir=cache)
    assert "ids" not in vars(made)
    with pytest.raises(ValueError, match="read-only"):
        made.ids[0] = 1
    again = pickle.loads(pickle.dumps(made))
    assert "ids" not in vars(again) and again.ids.tolist() == made.ids.tolist()


def test_a_trained_bpe_is_kept_beside_the_tokens(text_file: str, cache: Path):
    Path(text_file).write_text("low lower lowest\n" * 50)
    made = prepare([text_file], tokenizer_spec="bpe:270", cache_dir=cache)
    assert made.vocab_size == 270
    assert (made.path / "tokenizer.json").exists()
    assert made.tokens < 50 * 17 / 2
    assert made.tokenizer().decode(made.ids.tolist()) == "low lower lowest\n" * 50
    assert made.ids[-1] == made.eos_id == made.tokenizer().eos_id


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path, text_file: str, cache: Path):
    content = json.loads(train_bpe(["ab"], 257).library.to_str())
    content["model"]["vocab"]["Q"] = 70_000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    Path(text_file).write_text("Q")
    made = prepare([text_file], tokenizer_spec=str(path), cache_dir=cache)
    assert (made.vocab_size, made.dtype) == (70_001, "uint32")
    assert made.ids.tolist() == [70_000, made.eos_id]


def test_prepared_tokens_are_used_again(text_file: str, cache: Path):
    reports: list[tuple[int, int]] = []
    first = prepare([text_file], cache_dir=cache)
    again = prepare([text_file], cache_dir=cache, progress=lambda *r: reports.append(r))
    assert again == first
    assert not reports, "it was tokenized again"


def test_another_file_time_size_field_or_tokenizer_is_another_stream(
    tmp_path: Path, text_file: str, cache: Path
):
    tokenizer_json = tmp_path / "tokenizer.json"
    train_bpe(["ab"], 257).library.save(str(tokenizer_json))
    other = tmp_path / "other.txt"
    other.write_text("ab")

    def keys() -> set[str]:
        made = [
            prepare([text_file], cache_dir=cache),
            prepare([str(other)], cache_dir=cache),
            prepare([text_file], text_field="body", cache_dir=cache),
            prepare([text_file], tokenizer_spec="bpe:257", cache_dir=cache),
            prepare([text_file], tokenizer_spec=str(tokenizer_json), cache_dir=cache),
            prepare([text_file], "text", str(tokenizer_json), "a", cache_dir=cache),
        ]
        return {token_file.key for token_file in made}

    before = keys()
    assert len(before) == 6
    for path in (text_file, other):
        os.utime(path, ns=(1, 1))
    after_touch = keys()
    assert len(after_touch | before) == 12
    train_bpe(["aaaa"], 258).library.save(str(tokenizer_json))
    assert len(keys() - after_touch) == 2, "the content of a tokenizer.json counts"


def test_progress_ends_with_all_bytes_done(tmp_path: Path, cache: Path):
    path = tmp_path / "a.txt"
    path.write_text("some text\n" * 250_000)
    reports: list[tuple[int, int]] = []
    prepare([str(path)], cache_dir=cache, progress=lambda *r: reports.append(r))
    done = [d for d, _ in reports]
    assert done == sorted(done)
    assert reports[0][0] < 2_500_000, "a long document is reported on the way"
    assert reports[-1] == (2_500_000, 2_500_000)


def test_the_process_that_comes_second_uses_the_tokens_of_the_first(text_file: str, cache: Path):
    def another_process_is_faster(done: int, total: int) -> None:
        if not list(cache.glob("[!.]*")):
            inner.append(prepare([text_file], cache_dir=cache))

    inner = []
    outer = prepare([text_file], cache_dir=cache, progress=another_process_is_faster)
    assert inner == [outer]
    assert [path.name for path in cache.iterdir()] == [outer.key], "something is left over"


def test_processes_that_prepare_at_once_all_end_well(text_file: str, cache: Path):
    Path(text_file).write_text("low lower lowest\n" * 500)
    fork = multiprocessing.get_context("fork")
    barrier, keys = fork.Barrier(3), fork.SimpleQueue()

    def work() -> None:
        barrier.wait(timeout=20)
        keys.put(prepare([text_file], tokenizer_spec="bpe:300", cache_dir=cache).key)

    workers = [fork.Process(target=work, daemon=True) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=20)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    key = keys.get()
    assert [keys.get(), keys.get()] == [key, key]
    assert [path.name for path in cache.iterdir()] == [key]
    assert open_tokens(cache / key).ids[-1] == 0


def test_a_failure_leaves_nothing_behind(tmp_path: Path, text_file: str, cache: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no json\n")
    with pytest.raises(UserError, match="line 1 is no JSON"):
        prepare([text_file, str(bad)], cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_refused(text_file: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"2 bytes of text cannot be written to .*txt: Not a d"):
        prepare([text_file], cache_dir=text_file)


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_an_end_token_without_a_tokenizer_json_is_refused(text_file: str, spec: str):
    with pytest.raises(UserError, match=f"eos_token '</s>' .* '{spec}' has its own"):
        prepare([text_file], "text", spec, "</s>")


def test_damaged_tokens_are_refused(text_file: str, cache: Path, tmp_path: Path):
    made = prepare([text_file], cache_dir=cache)
    with pytest.raises(UserError, match="is no folder of prepared tokens"):
        open_tokens(tmp_path / "nowhere")

    short = Path(shutil.copytree(made.path, tmp_path / "short"))
    (short / "tokens.bin").write_bytes(b"ab")
    with pytest.raises(UserError, match="has 2 bytes where its header says 6"):
        open_tokens(short)

    objects = Path(shutil.copytree(made.path, tmp_path / "objects"))
    header = (objects / "tokens.json").read_text().replace("uint16", "object")
    (objects / "tokens.json").write_text(header)
    with pytest.raises(UserError, match="has dtype 'object'"):
        open_tokens(objects)

    (objects / "tokens.json").write_text("[]")
    with pytest.raises(UserError, match="is no folder of prepared tokens"):
        open_tokens(objects)


def test_the_default_cache_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, text_file: str, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare([text_file]).path.parent == tmp_path / "xdg" / "fivefold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "fivefold"


def test_a_slice_of_the_standard_library_becomes_tokens(cache: Path):
    files = [path for path in default_corpus() if path.parent.name == "json"]
    made = prepare([str(path) for path in files], tokenizer_spec="bpe:512", cache_dir=cache)
    assert made.documents == len(files) == np.count_nonzero(made.ids == made.eos_id)
    assert made.ids.max() == 511
    text = "".join(path.read_bytes().decode() for path in files)
    assert made.tokenizer().decode(made.ids.tolist()) == text
