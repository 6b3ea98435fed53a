"""Costs of many layouts at once are, row by row, those of each one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.legality import legal
from fivefold.layout.notation import Layout, parse
from fivefold.layout.ranks import dense_ranks
from fivefold.layout.stages import rank_stages, split_layers
from fivefold.ledger import Transfer
from fivefold.model.config import MLAConfig, ModelConfig
from fivefold.model.huggingface.presets import load_preset
from fivefold.parallel.cost import SPLIT_COSTS, ledger
from fivefold.parallel.data.memory import StateBytes, after_step, before_last_backward
from fivefold.parallel.workload import ROLES, RankWorkload, pipeline_work, rank_work, stage_work

SEQUENCE_LENGTH = 4096


@cache
def model(name: str) -> ModelConfig:
    if name == "latent":  # every second layer a mixture, latent attention, modules to predict more
        config = model("qwen1.5-moe-a2.7b")
        assert config.moe is not None
        moe = replace(config.moe, layers=(False, True) * (config.num_layers // 2))
        mla = MLAConfig(512, 128, 96, 32, 64)
        return replace(config, moe=moe, mla=mla, head_dim=128, mtp_layers=2)
    return load_preset(name)


MODELS = [
    "llama-3.1-405b",
    "llama-3.2-1b",  # tied embeddings
    "mixtral-8x22b",
    "qwen1.5-moe-a2.7b",  # a shared expert
    "qwen3-235b-a22b",
    "latent",
]
SCHEDULES = ["1f1b", "1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]


def draw(config: ModelConfig, count: int, seed: int, devices: int = 1024) -> LayoutBatch:
    """`count` legal layouts."""
    random = np.random.default_rng(seed)
    n = 200 * count

    def pick(*values: Any) -> Any:
        return random.choice(np.array(values), n)

    recompute = pick("none", "selective", "full", "full")
    layouts = LayoutBatch(
        tp=pick(1, 2, 4, 8),
        sp=pick(True, False),
        pp=pick(1, 2, 3, 4, 6, 8),
        vpp=pick(1, 1, 2, 3),
        dp=pick(1, 2, 4, 6, 8, 16),
        dp_replicate=pick(1, 1, 1, 2),
        zero=pick(0, 1, 2, 3),
        ep=pick(1, 2, 4, 8) if config.moe else pick(1),
        etp=pick(1, 2, 4) if config.moe else pick(1),
        ulysses=pick(1, 1, 2),
        ring=pick(1, 1, 2),
        micro_batch=pick(1, 2),
        accumulation=pick(1, 8, 12, 24),
        recompute=recompute,
        recompute_layers=pick(0, 1, 2, 3) * (recompute == "full"),
        schedule=pick(*SCHEDULES),
        order=parse("").order,
        layers=None,
    )
    chosen = legal(layouts, config, SEQUENCE_LENGTH) & (layouts.world_size <= devices)
    layouts = layouts.take(np.flatnonzero(chosen)[:count])
    assert len(layouts) == count
    return layouts


def transfers(work: RankWorkload) -> list[Transfer]:
    return [transfer for split in SPLIT_COSTS for transfer in split.transfers(work)]


def totals(rows: Any) -> dict[tuple[Any, ...], float]:
    """Bytes and calls by split, phase, operation and size of the group."""
    sums: dict[tuple[Any, ...], float] = defaultdict(float)
    for row in rows:
        if row.calls and row.split != "world":
            key = (row.split, row.phase, row.op, row.group_size)
            sums[(*key, "bytes")] += row.total_bytes
            sums[(*key, "calls")] += row.calls
    return dict(sums)


def row(transfer: Transfer, index: int, n: int) -> Transfer:
    def at(value: Any) -> Any:
        return np.broadcast_to(value, n)[index].item()

    return replace(
        transfer,
        group_size=at(transfer.group_size),
        payload_bytes=at(transfer.payload_bytes),
        calls=at(transfer.calls),
    )


def first_rank(layout: Layout, role: str) -> int:
    """The rank of a role that has the largest part of whatever is uneven."""
    pipeline_rank = {"first": 0, "middle": min(1, layout.pp - 1), "last": layout.pp - 1}[role]
    return int(dense_ranks(layout)[pipeline_rank, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_of_many_layouts_sends_what_its_ledger_says(name: str, mtp: bool):
    config = model(name)
    layouts = draw(config, 50, seed=len(name))
    for role in ROLES:
        work = stage_work(config, layouts, SEQUENCE_LENGTH, "bf16", role, mtp=mtp)
        sent = transfers(work)
        for index in range(len(layouts)):
            layout = layouts[index]
            rank = first_rank(layout, role)
            single = ledger(config, layout, SEQUENCE_LENGTH, rank, "bf16", mtp=mtp)
            many = totals(row(transfer, index, len(layouts)) for transfer in sent)
            assert many == pytest.approx(totals(single), rel=1e-12), f"{role} of {layout}"


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_of_many_layouts_holds_what_it_holds_alone(name: str):
    config = model(name)
    layouts = draw(config, 50, seed=len(name) + 1)
    for role in ROLES:
        work = stage_work(config, layouts, SEQUENCE_LENGTH, "bf16", role)
        for bytes_of in (after_step, before_last_backward):
            many = bytes_of(work)
            for index in range(len(layouts)):
                layout = layouts[index]
                rank = first_rank(layout, role)
                chunks = rank_work(config, layout, SEQUENCE_LENGTH, rank, "bf16")
                single = sum((bytes_of(chunk) for chunk in chunks), StateBytes(0, 0, 0))
                for what in ("weights", "gradients", "optimizer"):
                    assert getattr(many, what)[index] == getattr(single, what), f"{role} {layout}"


@pytest.mark.parametrize(
    "text",
    ["pp8 ga8", "pp4 vpp3 ga8 recompute=full:1", "tp2 pp4 layers=7,5,5,7", "pp4 schedule=dualpipe"],
)
def test_each_rank_of_a_pipeline_holds_what_its_chunks_hold(text: str):
    config, layout = model("latent"), parse(text)
    work = pipeline_work(config, layout, SEQUENCE_LENGTH, "bf16", mtp=True)
    for number in range(layout.pp):
        rank = int(dense_ranks(layout)[number].flat[0])
        chunks = rank_work(config, layout, SEQUENCE_LENGTH, rank, "bf16", mtp=True)
        assert work.count_layers()[number] == sum(chunk.count_layers() for chunk in chunks)
        assert work.count_recomputed()[number] == sum(c.count_recomputed() for c in chunks)
        assert work.first[number] == any(chunk.first for chunk in chunks)
        assert work.last[number] == any(chunk.last for chunk in chunks)
        assert work.sends_on[number] == sum(chunk.sends_on for chunk in chunks)


def test_layers_are_counted_by_kind_and_so_are_those_recomputed():
    config = model("latent")  # dense and mixture in turns, 24 layers
    texts = ["pp4 recompute=full:3", "pp4 recompute=full", "pp4 vpp2 ga4 recompute=full:1", "pp4"]
    work = stage_work(config, LayoutBatch.of([parse(t) for t in texts]), 4096, "bf16", "first")
    (dense, dense_counts), (mixture, mixture_counts) = work.layers
    assert (dense.moe, mixture.moe) == (False, True)
    assert dense_counts.tolist() == [3, 3, 4, 3]
    assert mixture_counts.tolist() == [3, 3, 2, 3]
    # The first three layers of a stage of six; both chunks' first layers, at 0 and at 12.
    assert work.recomputed[0].tolist() == [2, 3, 2, 0]
    assert work.recomputed[1].tolist() == [1, 3, 0, 0]


def test_all_ranks_of_the_published_pipeline_have_its_layers():
    config = model("llama-3.1-405b")
    layouts = LayoutBatch.of(
        [parse("tp8 pp16 dp64 ga16"), parse("tp8 pp16 dp64 ga16 schedule=zb-h1")]
    )
    counts = {
        role: stage_work(config, layouts, 8192, "bf16", role).count_layers().tolist()
        for role in ROLES
    }
    assert split_layers(126, 16) == (7, *[8] * 14, 7)
    assert counts == {"first": [7, 7], "middle": [8, 8], "last": [7, 7]}


def test_a_v_has_both_ends_on_its_first_rank_and_sends_nothing_where_it_turns():
    layout = parse("pp4 vpp2 ga8 schedule=zb-v")
    layouts = LayoutBatch.of([layout])
    ends = {role: stage_work(model("latent"), layouts, 4096, "bf16", role) for role in ROLES}
    assert [(bool(work.first[0]), bool(work.last[0])) for work in ends.values()] == [
        (True, True),
        (False, False),
        (False, False),
    ]
    assert rank_stages(layout, 3) == [3, 4]
    assert [work.sends_on[0] for work in ends.values()] == [1, 2, 1]
    assert [work.sends_back[0] for work in ends.values()] == [1, 2, 1]


def test_modules_for_more_tokens_are_on_the_last_stage_only_when_asked_for():
    layouts = LayoutBatch.of([parse("pp4"), parse("pp1")])
    for role, counts in (("first", [0, 2]), ("middle", [0, 2]), ("last", [2, 2])):
        work = stage_work(model("latent"), layouts, 4096, "bf16", role, mtp=True)
        assert work.mtp_layers.tolist() == counts
        assert not np.any(stage_work(model("latent"), layouts, 4096, "bf16", role).mtp_layers)


def test_of_no_layouts_nothing_is_computed():
    none = draw(model("latent"), 1, seed=0).take(slice(0, 0))
    assert legal(none, model("latent"), SEQUENCE_LENGTH).tolist() == []
    for role in ROLES:
        work = stage_work(model("latent"), none, SEQUENCE_LENGTH, "bf16", role)
        assert len(work.first) == 0
        assert after_step(work).weights.tolist() == []
        assert not any(np.any(transfer.calls) for transfer in transfers(work))


def test_listed_layers_are_the_stages():
    layouts = LayoutBatch.of([parse("pp4 layers=10,40,40,36")])
    counts = [
        stage_work(model("llama-3.1-405b"), layouts, 4096, "bf16", role).count_layers().item()
        for role in ROLES
    ]
    assert counts == [10, 40, 36]
