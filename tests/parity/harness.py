"""Tiny models on random tokens, and layouts that are run on real processes beside one process.

A test forks its workers from the test process, so that a worker may be any function, and sees
what the test has patched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.legality import check as check_layout
from fivefold.layout.notation import Layout, parse, stated
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.comm import Recorder
from fivefold.parallel.pipeline.table_file import with_table
from fivefold.train.data.samples import Samples
from fivefold.train.data.tokens import TokenFile
from fivefold.train.launch import launch
from fivefold.train.trainer import Trainer
from fivefold.verify.ledgers import compare_ledgers
from fivefold.verify.parity import LIMITS, PARITY, Comparison, RankRecord, compare, record

for _name in ("numpy.ma", "fivefold.verify.memory_tracker", "fivefold.train.checkpoint.dcp"):
    import_module(_name)  # here, or in each of the workers

GLOBAL_BATCH = 8
SEQUENCE_LENGTH = 64
STEPS = 3
"""With the first gradient, a step from it, and steps from moments that are not zero."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MIXTURE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
QWEN_MIXTURE = {**MIXTURE, "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "mixtral": {**SIZES, **MIXTURE, "num_local_experts": 8, "intermediate_size": 32},
    "qwen2_moe": {**SIZES, **QWEN_MIXTURE, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**SIZES, **QWEN_MIXTURE, "head_dim": 8},
}


def tiny(family: str, **changes: Any) -> ModelConfig:
    return load_config({"model_type": family, **FAMILIES[family], **changes})


TINY_D = tiny("llama", num_hidden_layers=8)
TINY_M = tiny("qwen3_moe", num_hidden_layers=2)


def tokens_in_memory(ids: np.ndarray, vocab_size: int, name: str) -> TokenFile:
    """A token file that is no file; 0 ends a document. `name` tells it from others."""
    path, documents = Path("in memory"), int((ids == 0).sum())
    file = TokenFile(path, vocab_size, 0, len(ids), documents, "uint16", "bytes", name)
    file.__dict__["ids"] = ids.astype(np.uint16)
    return file


@lru_cache
def random_samples(
    vocab_size: int,
    global_batch: int = GLOBAL_BATCH,
    isolate: bool = False,
    sequence_length: int = SEQUENCE_LENGTH,
    kind: type[Samples] = Samples,
) -> Samples:
    """Samples of random tokens in documents of 20 tokens on average."""
    random = np.random.default_rng(0)
    ids = random.integers(1, vocab_size, 20_000)
    ids[random.random(len(ids)) < 0.05] = 0
    file = tokens_in_memory(ids, vocab_size, f"random {vocab_size}")
    return kind(file, sequence_length, global_batch, seed=0, isolate_documents=isolate)


def layout_for(text: str, config: ModelConfig, samples: Samples) -> Layout:
    """The layout that a line of text states, with the accumulation of the global batch."""
    layout = with_global_batch(with_table(parse(text)), samples.global_batch, stated(text))
    check_layout(layout, config, samples.sequence_length)
    return layout


def make_trainer(
    config: ModelConfig, layout: Layout, samples: Samples, precision: str = "fp32"
) -> Trainer:
    """This rank's trainer, in a worker."""
    return Trainer(
        config,
        layout,
        samples,
        PARITY,
        precision,
        seed=0,
        rank=dist.get_rank(),
        recorder=Recorder(),
        device=torch.device("cpu"),
    )


def run(
    config: ModelConfig,
    layout: Layout,
    samples: Samples,
    steps: int = STEPS,
    alter: Callable[[Trainer], None] | None = None,
    precision: str = "fp32",
) -> list[RankRecord]:
    """What each rank records; `alter` may change its trainer before."""

    def work() -> RankRecord:
        trainer = make_trainer(config, layout, samples, precision)
        if alter is not None:
            alter(trainer)
        return record(trainer, steps)

    return launch(work, layout.world_size, timeout_s=120)


@lru_cache
def one_process(config: ModelConfig, samples: Samples, steps: int = STEPS) -> list[RankRecord]:
    """The reference: one process, with micro-batches of 2 sequences where that is possible."""
    text = "mb2" if samples.global_batch % 2 == 0 else "mb1"
    return run(config, layout_for(text, config, samples), samples, steps)


def assert_within_limits(comparison: Comparison, what: str) -> None:
    found = {key: getattr(comparison, key) for key in LIMITS}
    assert comparison.ok, (
        f"{what}: {found}, gradient {comparison.worst_gradient}, weight {comparison.worst_weight},"
        f" replicas {comparison.differing_replicas}, rerouted {comparison.rerouted}"
    )


def assert_parity(
    config: ModelConfig, text: str, samples: Samples | None = None, steps: int = STEPS
) -> list[RankRecord]:
    """The layout computes what one process does, and sends what the plan says; see
    fivefold.verify.parity for what is compared. Returns the layout's records."""
    samples = samples or random_samples(config.vocab_size)
    layout = layout_for(text, config, samples)
    split = run(config, layout, samples, steps)
    assert_within_limits(compare(one_process(config, samples, steps), split), text)
    ledgers = [rank.ledger for rank in split]
    _, differences = compare_ledgers(config, layout, samples.sequence_length, "fp32", ledgers)
    assert not differences, f"{text}: {differences}"
    return split
