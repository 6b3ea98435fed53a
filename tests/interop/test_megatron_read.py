"""Reading Megatron-LM's arguments: values, defaults from its source, and refusals by name."""

from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.interop.megatron_options import parse_pattern
from fivefold.interop.megatron_read import MegatronRun, read_megatron
from fivefold.layout.notation import parse

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50257 "
    "--max-position-embeddings 4096 --seq-length 2048 --micro-batch-size 2 "
)


def read(more: str = "", world_size: int = 64) -> MegatronRun:
    return read_megatron(MODEL + more, world_size)


def layout_of(more: str, world_size: int = 64) -> str:
    return str(read(more, world_size).layout)


def test_what_is_left_out_is_megatrons_default():
    run = read()
    config = run.config
    assert (config.intermediate_size, config.head_dim, config.num_kv_heads) == (16384, 128, 32)
    assert (config.gated_mlp, config.norm_kind, config.learned_positions) == (False, "layer", 4096)
    assert config.tied_embeddings and config.qkv_bias and config.output_bias and config.mlp_bias
    assert config.dropout and config.moe is None and config.mla is None
    assert (run.precision, run.sequence_length) == ("fp32", 2048)
    assert run.global_batch == 2 * 64  # a micro-batch a rank
    assert run.layout == parse("dp64 mb2")
    assert run.notes == ()


def test_the_width_of_a_swiglu_mlp_is_two_thirds_of_four_times_hidden_in_steps_of_64():
    assert read("--swiglu").config.intermediate_size == 10880
    assert read("--swiglu --ffn-hidden-size 14336").config.intermediate_size == 14336


def test_query_groups_count_only_with_group_query_attention():
    assert read("--num-query-groups 8").config.num_kv_heads == 32
    assert read("--group-query-attention").config.num_kv_heads == 1
    assert read("--group-query-attention --num-query-groups=8").config.num_kv_heads == 8


def test_values_may_follow_an_equals_sign_and_the_last_one_counts():
    assert read("--seq-length=1024 --seq-length=512").sequence_length == 512


def test_a_mixture_of_experts_is_read_with_its_defaults():
    run = read("--num-experts 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 2")
    moe = run.config.moe
    assert moe is not None
    assert (moe.experts_per_token, moe.expert_intermediate_size, all(moe.layers)) == (
        2,
        16384,
        True,
    )
    assert (run.layout.ep, run.layout.etp) == (2, 4)  # the experts' tensor size follows tp


@pytest.mark.parametrize(
    ("frequency", "mixtures"),
    [
        ("4", [0, 4, 8, 12, 16, 20, 24, 28]),
        ("'([0]*30+[1]*2)'", [30, 31]),
        ("[0,1]*16", list(range(1, 32, 2))),
    ],
)
def test_the_layers_that_are_mixtures_follow_from_the_frequency(frequency, mixtures):
    moe = read(f"--num-experts 8 --moe-layer-freq {frequency}").config.moe
    assert moe is not None
    assert [layer for layer, mixed in enumerate(moe.layers) if mixed] == mixtures


def test_latent_attention_takes_its_sizes():
    mla = read("--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512").config.mla
    assert mla is not None
    assert (mla.q_lora_rank, mla.kv_lora_rank) == (1536, 512)
    assert (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim) == (128, 64, 128)


def test_windows_count_the_querys_own_key():
    config = read("--window-size 127,0 --window-attn-skip-freq 2").config
    assert config.windows == (128, 0) * 16


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ("--tensor-model-parallel-size 8 --sequence-parallel", "tp8 sp dp8 mb2"),
        ("--sequence-parallel", "dp64 mb2"),  # Megatron turns it off at tp 1
        ("--use-distributed-optimizer", "dp64 zero1 mb2"),
        ("--use-megatron-fsdp", "dp64 zero3 mb2"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            "dp64 zero2 mb2",
        ),
        ("--use-torch-fsdp2", "dp64 zero3 mb2"),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
            "dp64 dp_replicate2 zero1 mb2",
        ),
        ("--context-parallel-size 4", "dp16 ring4 mb2"),
        ("--context-parallel-size 4 --cp-comm-type a2a", "dp16 ulysses4 mb2"),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 4 2",
            "dp8 ulysses4 ring2 mb2",
        ),
        ("--global-batch-size 512", "dp64 mb2 ga4"),
        ("--recompute-activations", "dp64 mb2 recompute=selective"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "dp64 mb2 recompute=full",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
            "dp64 mb2 recompute=full:5",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 99",
            "dp64 mb2 recompute=full",
        ),
        (
            "--pipeline-model-parallel-size 4 --use-tp-pp-dp-mapping",
            "pp4 dp16 mb2 order=tp-cp-ep-pp-dp",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            "pp4 vpp4 dp16 mb2",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "pp4 vpp2 dp16 mb2",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
            "--decoder-last-pipeline-num-layers 7",
            "pp4 dp16 mb2 layers=5,10*2,7",
        ),
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*5|(t*9|)*2,t*9L",
            "pp4 dp16 mb2 layers=5,9*3",
        ),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "pp4 dp16 mb2",  # 7, 8, 8, 7 is fivefold's own choice
        ),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 "
            "--num-virtual-stages-per-pipeline-rank 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "pp4 vpp2 dp16 mb2",  # 3, six times 4, 3
        ),
    ],
)
def test_arguments_become_a_layout(arguments, layout):
    assert layout_of(arguments) == layout


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        ("--bf16", "bf16"),
        ("--fp16", "fp16"),
        ("--bf16 --fp8-format hybrid", "fp8"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("--bf16 --fp4-format e2m1", "nvfp4"),
    ],
)
def test_precision_is_that_of_the_products(arguments, precision):
    assert read(arguments).precision == precision


def test_a_script_with_variables_arrays_comments_and_continued_lines_is_read():
    run = read_megatron(
        """#!/bin/bash
        TP=2   # two
        export LENGTH=${1:-4096}
        MODEL_ARGS=(
            --num-layers 4 --hidden-size 512 --num-attention-heads 8
            # --num-layers 8
            "--vocab-size 1000" --max-position-embeddings ${LENGTH}
        )
        torchrun --nproc_per_node 8 --nnodes=2 --rdzv_backend c10d pretrain_gpt.py \\
            ${MODEL_ARGS[@]} --seq-length $LENGTH \\
            --tensor-model-parallel-size $TP --micro-batch-size 1 --lr 1e-4 --bf16
        """
    )
    assert run.layout == parse("tp2 dp8")
    assert (run.config.num_layers, run.config.vocab_size) == (4, 1000)
    assert run.sequence_length == 4096
    assert run.notes == ("these arguments were not read: --lr",)


@pytest.mark.parametrize("argument", ["--hidden-size 10000001", "--num-layers 10001"])
def test_a_size_beyond_sense_is_refused(argument):
    with pytest.raises(UserError, match=r"is too large: the most is 10,"):
        read_megatron(f"{MODEL} {argument}", 64)


def test_a_vocabulary_of_the_tokenizer_must_be_given():
    text = MODEL.replace("--vocab-size 50257 ", "")
    with pytest.raises(UserError, match="--vocab-size"):
        read_megatron(text, 64)


def test_what_is_approximated_is_noted():
    notes = read(
        "--context-parallel-size 2 --cp-comm-type allgather --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 4 --rampup-batch-size 16 16 100"
    ).notes
    assert len(notes) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--tensor-model-parallel-size $TP", "--tensor-model-parallel-size is $TP, a variable"),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size has no value"),
        ("--tensor-model-parallel-size 0", "must be 1 or more"),
        ("--tensor-model-parallel-size x", "must be a whole number, not 'x'"),
        ("--tensor-model-parallel-size 3", "64 GPUs are not a multiple"),
        ("--global-batch-size 100", "= 128"),
        ("--cp-comm-type ring --context-parallel-size 2", "--cp-comm-type may be"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--hierarchical-context-parallel"),
        ("--expert-model-parallel-size 2", "needs --num-experts"),
        ("--hybrid-layer-pattern M*M*", "--hybrid-layer-pattern"),
        ("--num-experts 4 --moe-layer-freq [1]*3", "--moe-layer-freq must name each of 32"),
        ("--num-experts 4 --moe-layer-freq '[1]*99999999999'", "--moe-layer-freq must name"),
        ("--num-experts 4 --moe-layer-freq '[__import__(\"os\")]'", "--moe-layer-freq must name"),
        ("--pipeline-model-parallel-size 5 --world-size 5", "64 GPUs"),
        ("--pipeline-model-parallel-size 64 --seq-length 64", "cannot be shared out evenly"),
        ("--pipeline-model-parallel-layout 'E(t|)*999999999L'", "too often"),
        ("--pipeline-model-parallel-layout Ett|L", "does not fit"),
        ("--lr 'unclosed", "not a shell text"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named(arguments, sentence):
    with pytest.raises(UserError) as caught:
        read(arguments)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "name", ["num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size"]
)
def test_a_missing_argument_is_named(name: str):
    words = [*map(str, MODEL.split())]
    place = words.index(f"--{name}")
    with pytest.raises(UserError, match=f"--{name}"):
        read_megatron(" ".join(words[:place] + words[place + 2 :]), 64)


def test_the_number_of_gpus_must_be_known():
    with pytest.raises(UserError, match="--nproc-per-node"):
        read_megatron(MODEL)


def test_patterns_are_sums_and_multiples_of_lists_only():
    assert parse_pattern("([1]*2+[0])*2") == [1, 1, 0, 1, 1, 0]
    for text in ("3", "[x]", "[1]**9", "f()", "[1]*-1", "[" * 5000, "[1]*10000*10000"):
        assert parse_pattern(text) == [], text
