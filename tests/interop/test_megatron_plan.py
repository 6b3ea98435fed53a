"""`fivefold plan --from-megatron` takes model and layout from Megatron-LM arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.errors import UserError
from fivefold.interop.megatron_plan import read_request
from fivefold.plan.request import Options

OPTIONS = Options(cluster="989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s", gpus=64)


def test_megatron_arguments_or_a_script_that_has_them_are_a_model_and_a_layout(tmp_path):
    arguments = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
        "--untie-embeddings-and-output-weights --disable-bias-linear "
        "--position-embedding-type rope --vocab-size 128256 --seq-length 8192 --bf16 "
        "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 "
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2"
    )
    request = read_request(OPTIONS, arguments)
    assert (request.job.sequence_length, request.job.global_batch) == (8192, 128)
    assert request.layout is not None
    assert (request.layout.tp, request.layout.pp, request.layout.dp) == (4, 2, 8)
    script = tmp_path / "pretrain.sh"
    script.write_text(f"torchrun pretrain_gpt.py {arguments}", encoding="utf-8")
    assert read_request(OPTIONS, str(script)).job == request.job


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("no.sh", {}, "no.sh: there is no such file"),
        (" ", {}, "--from-megatron is empty"),
        ("--bf16", {"model": "llama-3.1-8b"}, "--from-megatron and MODEL both describe"),
        ("--bf16", {"layout": "tp8"}, "--from-megatron and --layout both describe"),
    ],
)
def test_a_wrong_use_is_one_sentence(text, changes, expected):
    with pytest.raises(UserError, match=expected):
        read_request(replace(OPTIONS, **changes), text)
