from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.train.data.documents import pieces
from fivefold.train.data.tokenizer import (
    ByteTokenizer,
    LibraryTokenizer,
    bpe_vocab_size,
    open_tokenizer,
    spread_sample,
    train_bpe,
)

SOURCE = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text()
BPE = train_bpe([SOURCE], 400)


def save(path: Path, tokens: list[str], **settings: object) -> str:
    """A tokenizer.json with the added `tokens`; `settings` replace parts of the file."""
    library = train_bpe([SOURCE], 300).library
    content = json.loads(library.to_str())
    (end,) = content["added_tokens"]
    del content["model"]["vocab"][end["content"]]
    content["added_tokens"] = [{**end, "id": 1000 + i, "content": t} for i, t in enumerate(tokens)]
    path.write_text(json.dumps({**content, **settings}))
    return str(path)


@given(st.text())
def test_bytes_and_bpe_give_the_text_back(text: str):
    assume("<|endoftext|>" not in text)  # which is a token, not text, to a BPE
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eos_id for i in ids)


def test_bytes_are_the_utf8_values_and_one_end():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_a_bpe_has_the_vocabulary_asked_for_and_shortens_the_text():
    assert BPE.vocab_size == BPE.library.get_vocab_size() == 400
    assert BPE.library.id_to_token(BPE.eos_id) == "<|endoftext|>"
    assert len(BPE.encode(SOURCE)) < len(SOURCE) / 2


def test_the_same_text_trains_the_same_bpe():
    again = train_bpe([SOURCE], 400)
    assert again.library.to_str() == BPE.library.to_str()


def test_a_bpe_of_a_tiny_text_still_has_the_vocabulary_asked_for():
    tokenizer = train_bpe(["aaaa"], 1024)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.decode(tokenizer.encode("zebra")) == "zebra"


def test_a_spelled_out_end_token_ends_a_document_in_a_bpe():
    assert BPE.encode("a<|endoftext|>b").count(BPE.eos_id) == 1


def test_a_long_text_has_the_same_tokens_in_pieces():
    parts = list(pieces(SOURCE, size=800))
    assert len(parts) > 10
    assert [i for part in parts for i in BPE.encode(part)] == BPE.encode(SOURCE)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_no_thread_is_left_that_a_fork_would_break():
    code = """if True:
        import os
        from fivefold.train.data.tokenizer import train_bpe
        before = os.listdir("/proc/self/task")
        tokenizer = train_bpe(["some text"] * 100, 300)
        tokenizer.encode("some text")
        assert os.listdir("/proc/self/task") == before
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sample_is_spread_over_all_texts():
    texts = [str(i) * 100 for i in range(10)]
    assert list(spread_sample(texts, 1.0)) == texts
    half = list(spread_sample(texts, 0.5))
    assert half == texts[1::2]
    long = "line\n" * 1_000_000
    assert sum(map(len, spread_sample([long], 0.1))) == pytest.approx(len(long) / 10, rel=0.1)


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:-5", "bpe:256"])
def test_a_bpe_needs_a_number_above_the_256_bytes(spec: str):
    with pytest.raises(UserError, match=f"tokenizer '{spec}' must be bpe:N with N at least 257"):
        bpe_vocab_size(spec)
    assert bpe_vocab_size("bpe:257") == 257
    assert bpe_vocab_size("bytes") is None


@pytest.mark.parametrize("token", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_a_common_end_token_is_found_in_a_tokenizer_json(tmp_path: Path, token: str):
    tokenizer = open_tokenizer(save(tmp_path / "tokenizer.json", ["<other>", token]))
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.library.id_to_token(tokenizer.eos_id) == token


def test_a_named_end_token_goes_before_the_common_ones(tmp_path: Path):
    path = save(tmp_path / "tokenizer.json", ["</s>", "<stop>"])
    common, named = open_tokenizer(path), open_tokenizer(path, "<stop>")
    assert common.eos_id != named.eos_id
    assert named.decode(named.encode("a b<stop>")) == "a b"


def test_the_vocabulary_reaches_to_the_highest_id_even_with_gaps(tmp_path: Path):
    path = Path(save(tmp_path / "tokenizer.json", ["</s>"]))
    content = json.loads(path.read_text())
    content["model"]["vocab"]["rare"] = 5000
    path.write_text(json.dumps(content))
    assert open_tokenizer(str(path)).vocab_size == 5001


def test_truncation_and_padding_in_a_tokenizer_json_do_not_touch_documents(tmp_path: Path):
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    path = save(tmp_path / "tokenizer.json", ["</s>"], truncation=cut, padding=fill)
    tokenizer = open_tokenizer(path)
    assert len(tokenizer.encode("x y z " * 100)) > 50
    assert len(tokenizer.encode("x")) == 1


def test_a_tokenizer_json_without_an_end_token_is_refused(tmp_path: Path):
    path = save(tmp_path / "tokenizer.json", ["<stop>"])
    common = r"<\|endoftext\|> or </s> or <\|end_of_text\|> or <eos>"
    with pytest.raises(UserError, match=f"no end-of-document token {common}; .*<stop>"):
        open_tokenizer(path)
    with pytest.raises(UserError, match=r"no end-of-document token <halt>; .*<stop>"):
        open_tokenizer(path, "<halt>")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="'byte' is neither 'bytes' nor 'bpe:N'"):
        open_tokenizer("byte")
    with pytest.raises(UserError, match=r"is a folder; name the file, .*/tokenizer.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{}")
    with pytest.raises(UserError, match=r"is no tokenizer\.json"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
