from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.errors import UserError
from fivefold.train.prepare import plan_run, prepare_run
from fivefold.train.runfile import Run
from tests.helpers import refusal

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    return {
        "model": MODEL,
        "data": {
            "files": [str(tmp_path / "text.txt")],
            "sequence_length": 16,
            "cache": str(tmp_path / "cache"),
        },
        "global_batch": 8,
        "steps": 2,
        "optimizer": {"lr": 1e-3},
        "device": "cpu",
        "folder": tmp_path,
    }


def refused(values: dict[str, Any], tmp_path: Path) -> str:
    """The one sentence of a refusal, which comes before anything is written."""
    message = refusal(prepare_run, Run.model_validate(values))
    assert not (tmp_path / "cache").exists()
    return message


def test_a_run_file_becomes_all_that_a_process_needs(values: dict[str, Any]) -> None:
    prepared = prepare_run(Run.model_validate(values | {"layout": "tp2 dp2 mb2"}))
    assert str(prepared.layout) == "tp2 dp2 mb2 ga2"
    assert prepared.config.hidden_size == 32
    assert prepared.device == "cpu"
    assert prepared.samples.sequence_length == 16
    assert prepared.samples.global_batch == 8
    assert prepared.samples.token_file.tokens == 2101

    again = pickle.loads(pickle.dumps(prepared))
    ids = prepared.samples.ids(0)
    assert np.array_equal(again.samples.read(ids).tokens, prepared.samples.read(ids).tokens)


def test_the_number_of_processes_gives_a_dp_that_was_left_out(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.model_validate(values | {"layout": "tp2"})
    assert str(prepare_run(run).layout) == "tp2 ga8"
    started(8, monkeypatch)
    assert str(prepare_run(run).layout) == "tp2 dp4 ga2"


def started(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process."""
    variables = {"RANK": 0, "WORLD_SIZE": processes, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_accumulation_that_is_stated_gives_the_micro_batch(values: dict[str, Any]) -> None:
    plan = plan_run(Run.model_validate(values | {"layout": "dp2 ga2"}))
    assert plan.layout.micro_batch == 2


@pytest.mark.parametrize(
    ("changes", "processes", "told"),
    [
        ({"layout": "tp3"}, None, "tp 3 does not divide 4 attention heads"),
        ({"layout": "tpp2"}, None, "unknown layout token 'tpp2'"),
        ({"layout": "dp3"}, None, "global batch 8 is not a multiple of dp 3"),
        ({"layout": "ep2 dp2"}, None, "is a dense model"),
        ({"layout": "dp2"}, 4, "the layout is for 2 ranks, but 4 were started"),
        ({"layout": "ring3"}, None, "sequence length 16 is not a multiple"),
        ({"model": MODEL | {"vocab_size": 256}}, None, "'bytes' has 257 tokens"),
        ({"model": MODEL | {"hidden_sizes": 3}}, None, "hidden_sizes"),
        ({"model": "/nowhere/config.json"}, None, "cannot be read"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    changes: dict,
    processes: int | None,
    told: str,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if processes is not None:
        started(processes, monkeypatch)
    assert told in refused(values | changes, tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"files": ["/nowhere/*.txt"]}, "no file matches"),
        ({"tokenizer": "bpe:300"}, "'bpe:300' has 300 tokens and the model's vocab_size is 257"),
        ({"tokenizer": "/nowhere/tokenizer.json"}, "neither 'bytes' nor"),
        ({"eos_token": "</s>"}, "leave it out"),
    ],
)
def test_data_that_cannot_be_are_refused_before_anything_is_written(
    changes: dict, told: str, values: dict[str, Any], tmp_path: Path
) -> None:
    assert told in refused(values | {"data": values["data"] | changes}, tmp_path)


def test_a_smaller_tokenizer_than_the_model_is_fine(values: dict[str, Any]) -> None:
    model = MODEL | {"vocab_size": 1000}
    assert prepare_run(Run.model_validate(values | {"model": model})).config.vocab_size == 1000


def test_too_little_text_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="fewer than one sample"):
        prepare_run(
            Run.model_validate(values | {"data": values["data"] | {"sequence_length": 4096}})
        )


def test_a_gpu_is_taken_where_there_is_one(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def device(wanted: str) -> str:
        return plan_run(Run.model_validate(values | {"device": wanted})).device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device("auto") == "cpu"
    with pytest.raises(UserError, match="no CUDA device is visible"):
        device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device("auto") == "cuda"
    assert device("cpu") == "cpu"
    with pytest.raises(UserError, match="4 ranks need one GPU each, but 2 are visible"):
        plan_run(Run.model_validate(values | {"device": "auto", "layout": "dp4"}))


def test_long_tokenizing_is_shown_on_stderr(
    values: dict[str, Any], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_run(Run.model_validate(values))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    monkeypatch.setattr("fivefold.train.prepare.PATIENCE_S", 0.0)
    other = values["data"] | {"cache": values["data"]["cache"] + "2"}
    prepare_run(Run.model_validate(values | {"data": other}))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "tokenizing 0.0 MB of text\n")
