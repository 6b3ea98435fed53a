from __future__ import annotations

import math

import pytest

from fivefold.errors import UserError
from fivefold.layout.notation import parse
from fivefold.model.huggingface.presets import PUBLISHED, read_model
from fivefold.plan.planfile import load, save
from fivefold.plan.request import Options, measured_step, parse_request, round_batch
from fivefold.plan.result import make_plan
from fivefold.plan.units import memory_bytes, memory_share, sequence_tokens, token_count

LINE = "989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s"


def options(**changes) -> Options:
    return Options(**{"model": "llama-3.1-8b", "cluster": LINE, "gpus": 64, **changes})


@pytest.mark.parametrize(
    ("sequences", "unit", "rounded"),
    [
        (1024, 1, 1024),
        (16e6 / 8192, 1, 2048),  # the published batch of Llama 3: 16M tokens of 8K
        (12e6 / 8192, 1, 1536),
        (1024, 3, 1056),  # 24 devices: dp may be 3
        (1024, 125, 1000),
        (0.2, 1, 1),
        (0.2, 7, 7),
        (3, 1, 3),
    ],
)
def test_a_batch_is_the_roundest_number_of_sequences_near_it(sequences, unit, rounded):
    assert round_batch(sequences, unit) == rounded


def test_what_is_left_out_has_a_rule_and_the_rule_is_said():
    request = parse_request(options())
    assert (request.job.sequence_length, request.job.global_batch) == (4096, 1024)
    assert request.notes[-2:] == (
        "--seq is not given: the sequence length is 4,096 tokens",
        "--global-batch is not given: a step has 1,024 sequences (4,194,304 tokens)",
    )
    assert parse_request(options(sequence_length=8192, global_batch=512)).notes == ()


def test_a_model_with_learned_positions_has_no_longer_sequences():
    assert parse_request(options(model="gpt2")).job.sequence_length == 1024


def test_a_batch_in_tokens_is_said_in_sequences():
    request = parse_request(options(sequence_length=8192, global_batch_tokens="16M"))
    assert request.job.global_batch == 2048
    assert "2,048 sequences (16,777,216 tokens)" in request.notes[-1]


def test_a_layout_may_bring_the_number_of_devices_and_the_batch():
    request = parse_request(options(gpus=None, layout="tp8 pp2 dp4 ga6"))
    assert (request.job.cluster.num_devices, request.job.global_batch) == (64, 24)
    assert str(request.layout) == "tp8 pp2 dp4 ga6"


def test_a_layout_without_accumulation_makes_the_global_batch():
    request = parse_request(options(layout="tp8 pp2", global_batch=64))
    assert request.layout == parse("tp8 pp2 dp4 ga16")
    request = parse_request(options(layout="tp8 pp2 dp4 mb2"))
    assert request.layout is not None
    assert request.layout.global_batch == request.job.global_batch == 1024


def test_a_measured_step_is_a_layout_and_seconds():
    request = parse_request(options(measured=("tp8 pp2 recompute=full=9.31s", "tp4=250ms")))
    layout = parse("tp8 pp2 dp4 ga256 recompute=full")
    assert request.measured[0] == (layout, 9.31)
    assert request.measured[1][1] == 0.25


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": None}, "plan needs a model"),
        ({"model": "lama-3.1-8b"}, "llama-3.1-8b"),
        ({"cluster": None}, "plan needs --cluster"),
        ({"cluster": "dgx-h10"}, "did you mean dgx-h100"),
        ({"gpus": None}, "plan needs --gpus"),
        ({"gpus": 0}, "--gpus must be 1 or more"),
        ({"precision": "fp8"}, "no matrix products in fp8"),
        ({"engine": "megatro"}, "engine 'megatro' is unknown"),
        ({"imbalance": 0.5}, "cannot be below 1"),
        ({"imbalance": math.nan}, "cannot be below 1"),
        ({"imbalance": math.inf}, "has no experts"),
        ({"imbalance": math.inf, "model": "mixtral-8x7b"}, "it may be up to 4$"),
        ({"imbalance": 4.1, "model": "mixtral-8x7b"}, "it may be up to 4$"),
        (
            {"gpus": None, "layout": "tp1000 pp1000 dp1000"},
            "--gpus is .*up to 10,000,000",
        ),
        ({"gpus": 10_000_001}, "--gpus is 10,000,001 devices.*it may be up to 10,000,000"),
        ({"sequence_length": 10**12}, "--seq is .* tokens.*up to 100,000,000"),
        ({"global_batch": 10**12}, "the global batch is .*up to 1,000,000"),
        ({"global_batch_tokens": "100T"}, "the global batch is .*up to 1,000,000"),
        (
            {"model": "hidden=1000000,layers=10000,heads=8,vocab=8,ffn=1000000"},
            "parameters, which is too many",
        ),
        ({"cluster": "h100:0x450GB/s,50GB/s"}, "reaches 0 devices"),
        ({"model": None, "dims": "hidden"}, "has no dimensions"),
        ({"dims": "hidden=64"}, "--dims and MODEL both describe a model"),
        ({"mtp": True}, "no multi-token-prediction modules"),
        ({"global_batch": 8, "global_batch_tokens": "16M"}, "give only one of them"),
        ({"global_batch": 0}, "--global-batch must be 1 or more"),
        ({"global_batch_tokens": "lots"}, "not a number of tokens"),
        ({"objective": "cost"}, "needs --tokens"),
        ({"max_memory": "70"}, "write it like 70GB"),
        ({"headroom": "100%"}, "write it like 5%"),
        ({"measured": ("tp8",)}, "not a measured step"),
        ({"measured": ("tp8=0s",)}, "not a measured step"),
        ({"measured": ("=9s",)}, "not a measured step"),
        ({"measured": ("tp8=nans",)}, "not a measured step"),
        ({"layout": "tp3"}, "must divide"),
        ({"layout": "tp8 dp8", "global_batch": 9}, "not a multiple of dp 8"),
    ],
)
def test_a_wrong_option_is_one_sentence(changes, expected):
    with pytest.raises(UserError, match=expected):
        parse_request(options(**changes))


@pytest.mark.parametrize(
    "option", ["model", "cluster", "precision", "layout", "dims", "fix", "forbid"]
)
@pytest.mark.parametrize("text", ["", " "])
def test_an_option_without_a_value_is_refused(option, text):
    with pytest.raises(UserError, match="is empty: give it a value, or leave it out"):
        parse_request(options(**{option: text}))


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "", "1e999", "9" * 400, "0x1", "9" * 30])
@pytest.mark.parametrize("unit", ["", "s", "GB", "%"])
def test_no_value_with_a_unit_is_infinite_negative_or_no_number(text, unit):
    job = parse_request(options()).job
    readers = [
        lambda: token_count(text + unit, "--x"),
        lambda: sequence_tokens(text + unit),
        lambda: memory_bytes(text + unit),
        lambda: measured_step(f"tp8={text}{unit}", job),
    ]
    if float(text.replace("0x1", "1") or 1):  # all of the memory may be used
        readers.append(lambda: memory_share(text + unit))
    for read in readers:
        with pytest.raises(UserError):
            read()


def test_a_job_that_does_not_fill_its_nodes_is_said_to():
    for gpus, words in [
        (12, "12 GPUs do not fill whole nodes of 8: the plan has 2 nodes with 6"),
        (13, "the plan has 1 node with 8 and one with 5"),
    ]:
        assert words in parse_request(options(gpus=gpus)).notes[-1]
    for gpus in (4, 8, 64):
        assert not any("do not fill" in note for note in parse_request(options(gpus=gpus)).notes)


def test_units_are_read():
    assert (token_count("16M", "--x"), token_count("15T", "--x"), token_count("4e6", "--x")) == (
        16e6,
        15e12,
        4e6,
    )
    assert (memory_bytes("70GB"), memory_bytes("64 GiB")) == (70e9, 64 * 2**30)
    assert (memory_bytes("70G"), memory_bytes("64gi")) == (70e9, 64 * 2**30)
    assert (sequence_tokens("8192"), sequence_tokens("8K"), sequence_tokens("1m")) == (
        8192,
        8192,
        2**20,
    )
    assert (memory_share("5%"), memory_share("0.1")) == (0.05, 0.1)


def test_a_model_may_be_given_by_its_dimensions():
    text = "hidden=64,layers=2,heads=4,vocab=128,ffn=256"
    assert read_model(text).num_layers == 2
    request = parse_request(options(model=text))
    assert (request.model, request.name) == (text, "by dimensions")


def test_a_path_with_an_equals_sign_is_a_path_here_and_in_a_plan_file(tmp_path):
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "config.json").write_bytes((PUBLISHED / "llama-3.1-8b.json").read_bytes())
    request = parse_request(options(model=str(folder / "config.json")))
    assert request.name == "lr=1e-3"
    path = tmp_path / "plan.yaml"
    save(make_plan(request).plan_file(), path)
    assert load(path).read_model() == request.job.config
