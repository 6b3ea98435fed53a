"""What users of other planners were told wrong, with the right values (public issue trackers)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout, parse
from fivefold.ledger import Transfer
from fivefold.model.config import LayerKind
from fivefold.model.counts import parameter_shapes
from fivefold.model.huggingface.presets import load_preset
from fivefold.parallel.cost import ledger
from fivefold.plan.engines import Engine, Job
from fivefold.plan.estimate import Estimate, LedgerRow, estimate
from fivefold.plan.request import Options, parse_request
from fivefold.plan.result import make_plan
from fivefold.plan.result_json import to_json
from fivefold.plan.time.operations import Operations, layer_operations

GIB = 2**30
NETWORK = 50e9  # bytes/s and device: one NIC of 400 Gbit/s


def nodes(network: float = NETWORK) -> str:
    """Nodes of eight 80 GB devices, of which each has a NIC."""
    return f"989TFLOPS,80GB,3.35TB/s:8x450GB/s,{network / 1e9:g}GB/s"


def sent(name: str, text: str, sequence_length: int, rank: int = 0) -> list[Transfer]:
    layout = parse(text)
    return list(ledger(load_preset(name), layout, sequence_length, rank, "bf16"))


# Case 41: heads and kv heads


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("phi-4", "tp4", ["10 kv heads", "tp may be 1, 2, 5, 10, 20 or 40"]),
        ("phi-4", "tp8", ["10 kv heads", "tp may be 1, 2, 5, 10, 20 or 40"]),
        ("falcon-7b", "tp2", ["71 attention heads", "tp may be 1 or 71"]),
    ],
)
def test_case_41_a_tp_degree_that_heads_cannot_be_split_by_is_refused(model, layout, words):
    with pytest.raises(UserError) as refused:
        ask_and_answer(model=model, gpus=8, layout=layout)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("model", "tp", "sizes"),
    [
        # A kv head is on two ranks each, and the gradients of the copies are summed.
        ("qwen3-30b-a3b", 8, {"q_proj": 4 * 128, "k_proj": 128, "v_proj": 128}),
        ("gpt-oss-120b", 16, {"q_proj": 4 * 64, "k_proj": 64, "v_proj": 64}),
    ],
)
def test_case_41_kv_heads_that_are_fewer_than_ranks_are_repeated(model, tp, sizes):
    config = load_preset(model)
    shapes = parameter_shapes(config)
    for name, rows in sizes.items():
        of_all = shapes[f"model.layers.0.self_attn.{name}.weight"][0]
        copies = tp // config.num_kv_heads if name != "q_proj" else 1
        assert rows == of_all * copies // tp
    copies_summed = [each for each in sent(model, f"tp{tp} sp", 4096) if each.phase == "optimizer"]
    assert 2 in {each.group_size for each in copies_summed}


def ask_and_answer(**options) -> dict:
    options.setdefault("cluster", nodes())
    return to_json(make_plan(parse_request(Options(**options))))


# Case 53: TP across nodes


@pytest.mark.parametrize(("tp", "gib"), [(8, 87.5), (16, 93.75)])
def test_case_53_ten_collectives_a_layer_and_micro_batch(tp: int, gib: float):
    """Llama-3.1-70B, S = 8192: (t-1)/t x 128 MiB each, over 80 layers."""
    moves = [
        each
        for each in sent("llama-3.1-70b", f"tp{tp} sp", 8192)
        if each.op in ("all_gather", "reduce_scatter") and each.phase != "optimizer"
    ]
    assert {each.payload_bytes for each in moves} == {128 * 2**20}
    calls = sum(each.calls for each in moves)
    assert calls == 80 * 10 + 5  # the embedding has 2, the head 3
    wire = sum(each.wire_bytes for each in moves) * 800 / calls
    assert wire == pytest.approx(gib * GIB)


def test_case_53_two_stages_of_tp8_are_faster_than_tp16():
    job = job_of("llama-3.1-70b", 16, 8192, global_batch=16)
    narrow, wide = (estimate(job, of_batch(text, job)) for text in ("tp8 sp pp2", "tp16 sp"))
    assert narrow.step_time_s < wide.step_time_s
    assert exposed(wide, "tp") > exposed(narrow, "tp")


def job_of(
    name: str,
    gpus: int,
    sequence_length: int,
    global_batch: int,
    network: float = NETWORK,
    **others,
) -> Job:
    cluster = load_cluster(nodes(network), gpus)
    return Job(load_preset(name), cluster, sequence_length, global_batch, **others)


def of_batch(text: str, job: Job) -> Layout:
    layout = parse(text, job.cluster.num_devices)
    return replace(layout, accumulation=job.global_batch // (layout.dp * layout.micro_batch))


def rows(found: Estimate, split: str) -> list[LedgerRow]:
    return [row for row in found.ledger if row.split == split]


def exposed(found: Estimate, split: str) -> float:
    return sum(row.exposed_s for row in rows(found, split))


# Case 65: MFU


def test_case_65_mfu_of_a_rate_with_its_convention():
    """Qwen3-30B-A3B, S = 8192: 3750 tokens/s on a device of 989 TFLOP/s are 14.2 % with the full
    square of attention, with 37,578,559,488 FLOPs a token; with all weights it would be above 69 %.
    """
    job = job_of("qwen3-30b-a3b", 8, 8192, global_batch=64)
    found = estimate(job, of_batch("ep8 zero1", job))
    full = found.mfu_full_attention / found.tokens_per_s_per_device
    assert 3750 * full == pytest.approx(0.142, abs=5e-4)
    assert 3750 * found.mfu / found.tokens_per_s_per_device == pytest.approx(
        3750 * 27_914_883_072 / 989e12
    )


# Case 67: topology and overlap


ALONE = Engine(overlapped_gradients=False, overlapped_weights=False)


def dp16(network: float, gpus: int = 16, engine: Engine = ALONE) -> Estimate:
    job = job_of("llama-3.1-8b", gpus, 4096, 4 * gpus, network, engine=engine)
    return estimate(job, of_batch("zero1", job))


def test_case_67_traffic_that_nothing_hides_doubles_on_half_the_bandwidth():
    # 8 NICs of 50 GB/s are as fast as NVLink: at half of that and less the network decides.
    whole, half = dp16(NETWORK / 2), dp16(NETWORK / 4)
    assert exposed(half, "dp") == pytest.approx(2 * exposed(whole, "dp"), rel=0.02)
    longer = half.step_time_s - whole.step_time_s
    assert longer == pytest.approx(exposed(half, "dp") - exposed(whole, "dp"), rel=0.1)


def test_case_67_exposed_traffic_falls_with_bandwidth():
    for engine in (Engine(), ALONE):
        found = [
            exposed(dp16(each, engine=engine), "dp") for each in (5e9, 12.5e9, 25e9, 50e9, 400e9)
        ]
        assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_case_67_twice_the_devices_take_longer_for_the_same_bytes():
    fewer, more = dp16(NETWORK), dp16(NETWORK, gpus=32)
    assert exposed(more, "dp") > exposed(fewer, "dp")
    assert sum(row.wire_bytes for row in rows(more, "dp")) == pytest.approx(
        sum(row.wire_bytes for row in rows(fewer, "dp")) * (31 / 32) / (15 / 16)
    )


def test_case_67_the_step_is_as_long_as_the_stated_overlap_makes_it():
    alone, beside = dp16(NETWORK), dp16(NETWORK, engine=Engine())
    assert exposed(alone, "dp") == pytest.approx(sum(row.time_s for row in rows(alone, "dp")))
    hidden = exposed(alone, "dp") - exposed(beside, "dp")
    slowed = beside.seconds["slowed"] - alone.seconds["slowed"]
    assert hidden > 0
    assert alone.step_time_s - beside.step_time_s == pytest.approx(hidden - slowed, rel=0.05)


def test_case_67_every_row_is_calls_times_payload_times_the_operations_factor():
    factor = {"all_reduce": 2 * 15 / 16, "all_gather": 15 / 16, "reduce_scatter": 15 / 16}
    ledger = dp16(NETWORK).ledger
    assert ledger
    for row in ledger:
        assert row.group_size == 16
        expected = row.calls * row.payload_bytes * factor[row.op]
        assert row.wire_bytes == pytest.approx(expected)


# Case 68: dispatch and combine


def test_case_68_dispatch_and_combine_of_deepseek_v3():
    """4096 tokens, 8 experts each of 7168 elements in bf16: 448 MiB a layer and direction."""
    moves = [
        each
        for each in sent("deepseek-v3", "ep64 dp64", 4096)
        if each.split == "ep" and each.op == "all_to_all" and each.payload_bytes > 2**20
    ]
    assert {each.payload_bytes for each in moves} == {4096 * 8 * 7168 * 2} == {448 * 2**20}
    assert sum(each.calls for each in moves) == 58 * 4
    assert sum(each.payload_bytes * each.calls for each in moves) == 101.5 * GIB
    assert sum(each.wire_bytes for each in moves) == pytest.approx(101.5 * GIB * 63 / 64)


def test_case_68_a_token_goes_to_each_of_four_nodes_once():
    """At most 4 x 7168 x 2 = 57,344 bytes for what would be 8 x 7168 x 2 = 114,688."""
    seconds = []
    for engine in (Engine(), Engine(once_a_node=True)):
        job = job_of("deepseek-v3", 32, 4096, global_batch=32, engine=engine)
        found = estimate(job, of_batch("ep32 zero1", job))
        seconds.append(sum(row.time_s for row in rows(found, "ep") if row.payload_bytes > 2**20))
    assert 0.4 * 114_688 < seconds[1] / seconds[0] * 114_688 <= 57_344


def test_case_68_compute_of_the_experts_follows_the_busiest_rank():
    job = job_of("deepseek-v3", 64, 4096, global_batch=64)
    layout = of_batch("ep64 zero1", job)
    hot = replace(job, imbalance=2.0)
    even, uneven = (
        sum(p.flops for p in mixture(each, layout).products if p.name.startswith("experts"))
        for each in (job, hot)
    )
    assert uneven == pytest.approx(2 * even)
    added = estimate(hot, layout).seconds["compute"] - estimate(job, layout).seconds["compute"]
    assert added > 0.5 * 58 * 3 * even / 989e12  # what the added products take at the least


def mixture(job: Job, layout: Layout) -> Operations:
    return layer_operations(job, LayoutBatch.of([layout]), LayerKind(moe=True))
