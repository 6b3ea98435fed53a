from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fivefold.cluster.load import cluster_of, load_cluster
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import load_preset
from fivefold.parallel.workload import role_rank
from fivefold.plan.engines import ENGINES, Engine, Job
from fivefold.plan.memory.activations import layer_activations, routed_copies
from fivefold.plan.memory.states import (
    FITS,
    KINDS,
    Memory,
    checkpoint_bytes,
    estimate_memory,
    fewest_devices,
    loading_bytes,
    stage_memory,
    verdict,
)
from tests.plan.cpu import machine as cpu_machine

GIB = 2**30
DENSE, MOE = LayerKind(moe=False), LayerKind(moe=True)
PLAIN = Engine(placeholder_gradients=False)

TINY = load_config(
    {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
)

GPT = replace(  # a GPT block with dropout: hidden 4096, 32 heads, an MLP of four times the width
    TINY,
    hidden_size=4096,
    intermediate_size=4 * 4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    gated_mlp=False,
    norm_kind="layer",
    dropout=True,
)


def job(config: ModelConfig, sequence_length: int = 4096, engine: Engine = PLAIN, **others) -> Job:
    cluster = load_cluster("dgx-h100", 64)
    return Job(config, cluster, sequence_length, global_batch=64, engine=engine, **others)


def one(of: Job, text: str) -> Memory:
    return estimate_memory(of, LayoutBatch.of([parse(text)]))


def state_bytes(kinds: dict) -> float:
    return sum(float(np.sum(kinds[kind])) for kind in ("weights", "gradients", "optimizer"))


def layer(of: Job, text: str, kind: LayerKind = DENSE):
    return layer_activations(of, LayoutBatch.of([parse(text)]), kind)


# Field cases


def test_case_49_a_70b_model_on_32_devices_of_80_gb() -> None:
    llama = job(load_preset("llama-2-70b"))
    device_bytes = 80e9

    deep_tp = one(llama, "tp8 sp dp4 zero1 ga16")
    assert state_bytes(deep_tp.kinds) == pytest.approx(77.6e9, rel=1e-3)
    assert verdict(deep_tp.peak_bytes, device_bytes) == "no"

    stages = stage_memory(llama, parse("tp8 sp pp4 ga64"))
    assert sum(map(state_bytes, stages)) / 4 == pytest.approx(38.8e9, rel=1e-3)

    fsdp = replace(llama, engine=ENGINES["fsdp"])
    sharded = one(fsdp, "dp32 zero3 ga2 recompute=full")
    assert state_bytes(sharded.kinds) == pytest.approx(34.5e9, rel=1e-3)
    layer_inputs = 80 * layer(fsdp, "dp32 zero3").input
    assert float(layer_inputs[0]) == pytest.approx(5.4e9, rel=1e-2)
    assert verdict(sharded.peak_bytes, device_bytes) == "fits"


@pytest.mark.parametrize(
    ("name", "of_16", "of_18"),
    [
        ("llama-3.1-405b", 82, 92),
        ("glm-4.5", 71, 80),
        ("deepseek-v3", 135, 151),
        ("kimi-k2", 206, 231),
        ("qwen3-235b-a22b", 48, 53),
        ("gpt-oss-120b", 24, 27),
        ("llama-3.1-70b", 15, 16),
        ("mixtral-8x7b", 10, 11),
    ],
)
def test_case_51_fewest_devices_that_can_hold_the_state(name: str, of_16: int, of_18: int) -> None:
    config = load_preset(name)
    assert fewest_devices(config, 80e9, 16) == of_16
    assert fewest_devices(config, 80e9, 18) == of_18


def test_case_52_states_of_qwen3_235b_on_64_devices() -> None:
    qwen = job(load_preset("qwen3-235b-a22b"))
    stages = stage_memory(qwen, parse("tp2 sp pp2 dp16 zero1 ep32 ga4"))
    assert sum(map(state_bytes, stages)) / 2 == pytest.approx(77.4e9, rel=1e-3)
    sharded = one(replace(qwen, engine=ENGINES["fsdp"]), "dp64 zero3 recompute=full")
    assert state_bytes(sharded.kinds) == pytest.approx(58.8e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("tp2 sp dp4 ep8", 4_400_822_272),
        ("tp4 sp dp2 ep2", 14_890_383_360),
        ("dp8 ep8", 5_164_972_032),
    ],
)
def test_case_54_expert_weights_are_split_by_ep_and_the_rest_by_tp(text, parameters) -> None:
    memory = one(job(load_preset("qwen3-30b-a3b")), text)
    assert float(memory.kinds["weights"][0]) == 2 * parameters


def test_case_55_activations_of_experts_follow_the_copies_of_tokens() -> None:
    qwen = job(load_preset("qwen3-30b-a3b"))
    layouts = LayoutBatch.of([parse("dp8 ep8")])
    balanced = layer_activations(qwen, layouts, MOE).kept
    assert routed_copies(qwen, layouts) == 32_768
    assert balanced["experts_input"] == 128 * 2**20
    assert balanced["experts_hidden"] == 2 * 32_768 * 2 * 768

    worst = layer_activations(replace(qwen, imbalance=100.0), layouts, MOE).kept
    for name in ("experts_input", "experts_hidden", "experts_activation"):
        assert worst[name] == 8 * balanced[name]  # no more tokens than there are
    assert worst["query"] == balanced["query"]


def test_case_58_activations_grow_with_micro_batches_under_gpipe_alone() -> None:
    tiny = job(TINY, sequence_length=64)
    counts = (2, 4, 8, 16)
    texts = [f"pp2 ga{count}" for count in counts]
    same = [float(one(tiny, text).kinds["activations"][0]) for text in texts]
    assert len(set(same)) == 1
    growing = [
        stage_memory(tiny, parse(f"{text} schedule=gpipe"))[0]["activations"] for text in texts
    ]
    assert growing == pytest.approx([growing[0] * count / 2 for count in counts])


@pytest.mark.parametrize(
    ("vocab_size", "gib"), [(128_256, 3.914), (151_936, 4.637), (256_000, 7.813)]
)
def test_case_59_logits_are_on_the_last_stage_and_split_by_tp(vocab_size, gib) -> None:
    config = replace(TINY, vocab_size=vocab_size)
    fp32 = job(config, sequence_length=8192, engine=replace(PLAIN, loss_bytes=4))
    whole = one(fp32, "tp1").kinds["logits"]
    assert float(whole[0]) / GIB == pytest.approx(gib, abs=6e-4)
    assert one(fp32, "tp8 sp").kinds["logits"] == whole / 8

    first, last = stage_memory(fp32, parse("pp2 ga4"))
    assert (first["logits"], last["logits"]) == (0, whole)
    piped = one(fp32, "pp2 ga4")
    assert (piped.worst, piped.kinds["logits"]) == ("last", whole)


def test_case_59_logits_in_chunks_of_1024_of_8192_tokens_take_an_eighth() -> None:
    config = replace(TINY, vocab_size=128_256, num_layers=1)
    whole = job(config, sequence_length=8192, engine=replace(PLAIN, loss_bytes=4))
    chunked = replace(whole, engine=replace(whole.engine, loss_chunk=1024))
    ratio = one(chunked, "tp1").kinds["logits"] / one(whole, "tp1").kinds["logits"]
    assert ratio == pytest.approx(1 / 8)


def test_case_60_context_and_communicators_are_a_line_of_their_own() -> None:
    mixture = job(load_preset("qwen3-30b-a3b"))
    memory = one(mixture, "dp8 zero1 ep8")
    assert memory.kinds["reserve"] >= 2e9
    assert memory.peak_bytes - memory.reserved_bytes == memory.kinds["reserve"]
    dense = job(load_preset("llama-3.1-8b"))
    reserves = [
        one(dense, text).kinds["reserve"] for text in ("dp1", "dp8 zero1", "tp2 sp pp2 dp2 zero1")
    ]
    assert reserves == sorted(reserves)
    assert len({float(reserve[0]) for reserve in reserves}) == 3


def test_case_61_a_verdict_has_three_levels_and_a_margin() -> None:
    peaks = np.array([0.5, FITS, 0.93, 1.0, 1.01]) * 80e9
    assert list(verdict(peaks, 80e9)) == ["fits", "fits", "tight", "tight", "no"]


def test_case_62_a_gpt_layer_keeps_what_the_formula_says() -> None:
    s, b, h, a = 2048, 1, 4096, 32
    plain = job(GPT, sequence_length=s, engine=replace(PLAIN, flash_attention=False))
    unsplit = layer(plain, "tp1")
    assert unsplit.whole == 956_301_312 == s * b * h * (34 + 5 * a * s / h)
    assert unsplit.selective == 272 * 2**20
    assert unsplit.input == 16 * 2**20
    flash = replace(plain, engine=replace(plain.engine, flash_attention=True))
    assert layer(flash, "tp1").whole == 272 * 2**20

    # arXiv:2205.05198, equations 2 and 4
    t = 8
    assert layer(plain, f"tp{t}").whole == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer(plain, f"tp{t} sp").whole == unsplit.whole / t


def test_case_64_full_recomputation_leaves_layer_inputs_and_one_layer() -> None:
    deep = job(replace(TINY, num_layers=32), sequence_length=1024)
    of_one = layer(deep, "tp1")
    none, full, some = (one(deep, f"recompute={mode}") for mode in ("none", "full", "full:8"))
    hidden = 2 * 1024 * 64
    assert none.kinds["activations"] == 32 * of_one.whole + 2 * hidden
    assert full.kinds["activations"] == 34 * hidden
    assert full.kinds["buffers"] - none.kinds["buffers"] == of_one.whole - hidden
    assert some.kinds["activations"] == 8 * hidden + 24 * of_one.whole + 2 * hidden


def test_case_69_host_memory_while_loading_is_a_file_a_rank() -> None:
    llama, mixtral = load_preset("llama-3.1-70b"), load_preset("mixtral-8x7b")
    assert loading_bytes(llama, ranks=8) == 8 * 5e9
    assert loading_bytes(llama, ranks=1, file_bytes=math.inf) == pytest.approx(141.1e9, rel=1e-3)
    assert loading_bytes(mixtral, ranks=1, file_bytes=math.inf) == pytest.approx(93.4e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama-3.1-8b", 112.4e9), ("llama-3.1-70b", 987.8e9), ("deepseek-v3", 9.39e12)],
)
def test_case_79_a_checkpoint_takes_14_bytes_a_parameter(name: str, size: float) -> None:
    assert checkpoint_bytes(job(load_preset(name))) == pytest.approx(size, rel=1e-3)


# Published figures


LLAMA_CUT = replace(load_preset("llama-3.1-70b"), num_layers=12)


@pytest.mark.parametrize(
    ("text", "sequence_length", "gib"),
    [
        ("pp2 dp4 zero1 ga4", 4096, 66.55),
        ("tp2 sp dp4 zero1 ga4", 4096, 60.68),
        ("tp8 sp ga4", 4096, 28.29),
        ("zero1 ulysses8 ga4", 32_768, 104.51),
        ("tp2 sp zero1 ulysses4 ga4", 131_072, 112.67),
    ],
)
def test_allocated_memory_of_megatron_on_b200_is_met(text, sequence_length, gib) -> None:
    """max_memory_allocated of Megatron-LM, Llama-3-70B cut to 12 layers (SimuMax's table)."""
    memory = one(job(LLAMA_CUT, sequence_length, engine=ENGINES["megatron"]), text)
    assert float(memory.allocated_bytes[0]) / GIB == pytest.approx(gib, rel=0.01)


def test_activations_of_deepseek_v3_are_those_of_the_megatron_report() -> None:
    """131.0 GB on 256 devices (arXiv:2603.07685, table 3)."""
    deepseek = job(load_preset("deepseek-v3"), engine=ENGINES["megatron"])
    memory = one(deepseek, "pp4 vpp4 dp64 zero1 ep64 ga128")
    assert float(memory.kinds["activations"][0]) == pytest.approx(131.0e9, rel=0.05)


# Schedules, precision, engines


def test_interleaving_multiplies_the_first_ranks_activations() -> None:
    pp, vpp = 4, 2  # by 1 + (p - 1) / (p v), arXiv:2205.05198, section 4.2.3
    tiny = job(TINY, sequence_length=64)
    plain, interleaved = (
        stage_memory(tiny, parse(text))[0]["activations"]
        for text in (f"pp{pp} ga16", f"pp{pp} vpp{vpp} ga16")
    )
    assert interleaved / plain == pytest.approx(1 + (pp - 1) / (pp * vpp))


def test_8_bit_products_keep_smaller_inputs() -> None:
    llama = job(load_preset("llama-3.1-8b"), engine=ENGINES["megatron"])
    kept, kept8 = (
        layer(replace(llama, precision=precision), "tp1").kept for precision in ("bf16", "fp8")
    )
    assert kept8["norm_output"] == kept["norm_output"] / 2
    assert kept8["mlp_activation"] == kept["mlp_activation"] / 2
    assert kept8["query"] == kept["query"]


def test_latent_attention_keeps_latents_beside_its_heads() -> None:
    deepseek = job(load_preset("deepseek-v3"))
    mla, t, heads = deepseek.config.mla, 4096, 128
    assert mla is not None and mla.q_lora_rank is not None
    kept = layer(deepseek, "ep8 dp8", MOE).kept
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    assert kept["query"] == kept["key"] == 2 * t * heads * width
    assert kept["value"] == kept["attention_output"] == 2 * t * heads * mla.v_head_dim
    ranks = mla.q_lora_rank + mla.kv_lora_rank
    assert kept["latents"] == 2 * t * (2 * ranks + mla.qk_rope_head_dim)


def test_kv_heads_that_are_fewer_than_ranks_are_held_more_than_once() -> None:
    llama = job(load_preset("llama-3.1-8b"))  # 8 kv heads of 128
    head = 2 * 4096 * 128
    assert layer(llama, "tp4").kept["key"] == 2 * head
    assert layer(llama, "tp16").kept["key"] == head
    assert layer(llama, "ulysses16").kept["key"] == 16 * head / 16


def test_each_zero_stage_shards_more_and_offload_takes_the_optimizer_away() -> None:
    llama = job(load_preset("llama-3.1-8b"))
    shards = 8
    states = [one(llama, f"dp{shards} zero{stage} ga8").kinds for stage in range(4)]
    for stage, kind in enumerate(("optimizer", "gradients", "weights"), start=1):
        assert states[stage][kind] < states[stage - 1][kind]
    assert states[3]["weights"] == 0
    assert states[1]["optimizer"] == states[0]["optimizer"] / shards
    offloaded = replace(llama, engine=replace(PLAIN, host_optimizer=True))
    assert one(offloaded, "dp8 zero1 ga8").kinds["optimizer"] == 0


def test_expert_state_is_sharded_over_the_copies_of_an_expert() -> None:
    qwen = job(load_preset("qwen3-30b-a3b"))
    alone, copied = (one(qwen, f"dp{dp} zero1 ep8").kinds["optimizer"] for dp in (8, 16))
    experts = 12 * 48 * 128 * 3 * 2048 * 768 / 8  # edp 1: whole
    dense = 12 * (30_532_122_624 - 48 * 128 * 3 * 2048 * 768)
    assert float(alone[0]) == pytest.approx(experts + dense / 8)
    assert float(copied[0]) == pytest.approx(experts / 2 + dense / 16)


def test_16_bit_moments_and_gradients_take_what_they_take() -> None:
    small = replace(PLAIN, optimizer_bytes=8, gradient_bytes=2)
    before, after = (one(job(TINY, engine=engine), "dp1").kinds for engine in (PLAIN, small))
    assert after["optimizer"] == before["optimizer"] * 8 / 12
    assert after["gradients"] == before["gradients"] / 2


def test_mtp_adds_a_module_and_its_logits_to_the_last_stage_alone() -> None:
    deepseek = job(load_preset("deepseek-v3"))
    layout = parse("pp8 dp8 zero1 ep8 ga16")
    without, with_mtp = (
        stage_memory(each, layout) for each in (deepseek, replace(deepseek, mtp=True))
    )
    for kind in ("weights", "activations"):
        assert with_mtp[-1][kind] > without[-1][kind]
        assert with_mtp[4][kind] == without[4][kind]


def test_the_optimizer_step_is_the_peak_where_activations_are_small() -> None:
    hungry = replace(PLAIN, step_bytes=64)
    memory = one(job(load_preset("llama-3.1-8b"), sequence_length=64, engine=hungry), "dp1")
    assert memory.kinds["activations"] == 0
    assert memory.kinds["buffers"] > 64 * 8.03e9


# Many at once


TEXTS = [
    "tp8 sp pp4 dp2 zero1 ep16 mb2 ga8",
    "pp8 vpp2 dp8 zero2 ep8 ga16 recompute=selective",
    "tp2 dp32 zero3 ep8 ga2 recompute=full",
    "pp4 dp16 zero1 ep16 ulysses2 ga8 schedule=gpipe",
    "tp2 sp pp8 dp4 zero1 ep8 ga32 recompute=full:2",
]


def test_many_layouts_agree_with_each_alone() -> None:
    deepseek = job(load_preset("deepseek-v3"), engine=ENGINES["megatron"])
    together = estimate_memory(deepseek, LayoutBatch.of([parse(text) for text in TEXTS]))
    for i, text in enumerate(TEXTS):
        alone = one(deepseek, text)
        assert together.worst[i] == alone.worst[0]
        for kind in KINDS:
            assert together.kinds[kind][i] == pytest.approx(float(alone.kinds[kind][0])), kind


@pytest.mark.parametrize("text", TEXTS)
def test_a_layout_in_full_agrees_with_its_estimate(text: str) -> None:
    deepseek = job(load_preset("deepseek-v3"), engine=ENGINES["megatron"])
    layout: Layout = parse(text)
    stages = stage_memory(deepseek, layout)
    assert len(stages) == layout.pp
    assert sum(stage["layers"] for stage in stages) == deepseek.config.num_layers
    memory = estimate_memory(deepseek, LayoutBatch.of([layout]))
    worst = max(sum(stage[kind] for kind in KINDS) for stage in stages)
    assert worst == pytest.approx(float(memory.peak_bytes[0]), rel=0.02)
    rank = int(role_rank(deepseek.config, layout, memory.worst[0]))
    for kind in KINDS:
        assert stages[rank][kind] == pytest.approx(float(memory.kinds[kind][0]), rel=1e-6), kind


# Processes on a CPU

LAYER_BYTES = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64)
HIDDEN_BYTES = 4 * 64 * 48 * 4  # of 4 sequences


@pytest.mark.parametrize(
    ("text", "bytes_", "share", "more"),
    [
        ("mb8", 4e7, 0.1, 0.0),
        ("dp2 mb4", 5e7, 0.2, 0.0),
        ("dp2 zero1 mb4", 5e7, 0.2, 3 * LAYER_BYTES),
        ("dp2 mb4 recompute=selective", 5e7, 0.2, 0.0),
        ("dp2 mb4 recompute=full", 5e7, 0.2, 7 * HIDDEN_BYTES),
        ("dp2 zero3 mb4 recompute=full", 5e7, 0.2, 3 * LAYER_BYTES + 7 * HIDDEN_BYTES),
    ],
)
def test_a_process_on_a_cpu_holds_beside_tensors_what_was_measured_of_its_kind(
    text: str, bytes_: float, share: float, more: float
) -> None:
    kinds = {"alone": (4e7, 0.1), "messages": (5e7, 0.2), "zero": (0, 3.0), "recompute": (0, 7.0)}
    file = cpu_machine()
    file["cpu"]["overhead"] = {
        kind: {"bytes": size, "share": part} for kind, (size, part) in kinds.items()
    }
    layout = parse(text)
    cluster = cluster_of(file, "cpu", "cpu", layout.world_size)
    job = Job(TINY, cluster, 48, 8, "fp32", ENGINES["fivefold"])
    [stage] = stage_memory(job, layout)
    tensors = sum(stage[kind] for kind in KINDS if kind not in ("overhead", "reserve"))
    assert (stage["reserve"], stage["overhead"]) == pytest.approx((bytes_, share * tensors + more))
