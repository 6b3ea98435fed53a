from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.layout.notation import parse
from fivefold.model.presets import PUBLISHED, read_model
from fivefold.plan.answer import answer, plan_file
from fivefold.plan.planfile import load, save
from fivefold.plan.question import (
    Options,
    ask,
    memory_bytes,
    number,
    round_batch,
    share,
)

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
    question = ask(options())
    assert (question.job.sequence_length, question.job.global_batch) == (4096, 1024)
    assert question.notes[-2:] == (
        "sequence length 4,096 tokens, since --seq is not given",
        "global batch 1,024 sequences (4,194,304 tokens): about 4M tokens, since --global-batch "
        "is not given",
    )
    assert ask(options(sequence_length=8192, global_batch=512)).notes == ()


def test_a_model_with_learned_positions_has_no_longer_sequences():
    assert ask(options(model="gpt2")).job.sequence_length == 1024


def test_a_batch_in_tokens_is_said_in_sequences():
    question = ask(options(sequence_length=8192, global_batch_tokens="16M"))
    assert question.job.global_batch == 2048
    assert "2,048 sequences (16,777,216 tokens)" in question.notes[-1]


def test_a_layout_may_bring_the_number_of_devices_and_the_batch():
    question = ask(options(gpus=None, layout="tp8 pp2 dp4 ga6"))
    assert (question.job.cluster.num_devices, question.job.global_batch) == (64, 24)
    assert str(question.layout) == "tp8 pp2 dp4 ga6"


def test_a_layout_without_accumulation_makes_the_global_batch():
    question = ask(options(layout="tp8 pp2", global_batch=64))
    assert question.layout == parse("tp8 pp2 dp4 ga16")
    question = ask(options(layout="tp8 pp2 dp4 mb2"))
    assert question.layout is not None
    assert question.layout.global_batch == question.job.global_batch == 1024


def test_a_measured_step_is_a_layout_and_seconds():
    question = ask(options(measured=("tp8 pp2 recompute=full=9.31s", "tp4=250ms")))
    layout = parse("tp8 pp2 dp4 ga256 recompute=full")
    assert question.measured[0] == (layout, 9.31)
    assert question.measured[1][1] == 0.25


def test_megatron_arguments_are_a_model_and_a_layout():
    arguments = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
        "--untie-embeddings-and-output-weights --disable-bias-linear "
        "--position-embedding-type rope --vocab-size 128256 --seq-length 8192 --bf16 "
        "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 "
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2"
    )
    question = ask(options(model=None, from_megatron=arguments))
    assert (question.job.sequence_length, question.job.global_batch) == (8192, 128)
    assert question.layout is not None
    assert (question.layout.tp, question.layout.pp, question.layout.dp) == (4, 2, 8)
    with pytest.raises(UserError, match="hidden_size 8192 and the Megatron arguments say 4096"):
        ask(options(model="llama-2-70b", from_megatron=arguments))


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
        ({"engine": "megatro"}, "engine 'megatro' is not known"),
        ({"imbalance": 0.5}, "cannot be below 1"),
        ({"mtp": True}, "no multi-token-prediction modules"),
        ({"global_batch": 8, "global_batch_tokens": "16M"}, "give one of them"),
        ({"global_batch": 0}, "--global-batch must be 1 or more"),
        ({"global_batch_tokens": "lots"}, "no number of tokens"),
        ({"objective": "cost"}, "needs --tokens"),
        ({"max_memory": "70"}, "write it like 70GB"),
        ({"headroom": "100%"}, "write it like 5%"),
        ({"measured": ("tp8",)}, "no measured step"),
        ({"measured": ("tp8=0s",)}, "no measured step"),
        ({"layout": "tp3"}, "must divide"),
        ({"layout": "tp8 dp8", "global_batch": 9}, "not a multiple of dp 8"),
    ],
)
def test_a_wrong_option_is_one_sentence(changes, expected):
    with pytest.raises(UserError, match=expected):
        ask(options(**changes))


def test_units_are_read():
    assert (number("16M", "--x"), number("15T", "--x"), number("4e6", "--x")) == (16e6, 15e12, 4e6)
    assert (memory_bytes("70GB"), memory_bytes("64 GiB")) == (70e9, 64 * 2**30)
    assert (share("5%"), share("0.1")) == (0.05, 0.1)


def test_a_model_may_be_given_by_its_dimensions():
    text = "hidden=64,layers=2,heads=4,vocab=128,ffn=256"
    assert read_model(text).num_layers == 2
    question = ask(options(model=text))
    assert (question.model, question.name) == (text, "by dimensions")


def test_a_path_with_an_equals_sign_is_a_path_here_and_in_a_plan_file(tmp_path):
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "config.json").write_bytes((PUBLISHED / "llama-3.1-8b.json").read_bytes())
    question = ask(options(model=str(folder / "config.json")))
    assert question.name == "lr=1e-3"
    path = tmp_path / "plan.yaml"
    save(plan_file(question, answer(question)), path)
    assert load(path).read_model() == question.job.config
