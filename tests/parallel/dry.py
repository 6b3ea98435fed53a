"""A dry run: the real training program for one rank of any world, with nothing sent."""

from __future__ import annotations

import numpy as np
import torch

from fivefold.layout.notation import Layout
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.comm import Recorder
from fivefold.train.data import Samples
from fivefold.train.runfile import Optimizer
from fivefold.train.trainer import Trainer
from fivefold.verify.trace import fake_world

__all__ = ["fake_world"]

torch.set_num_threads(1)  # for sizes as tiny as these, threads cost ten times what they save

SEQUENCE_LENGTH = 48

TINY = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 101,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
MIXTURE = {
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.02,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def tiny_dense(**changes) -> ModelConfig:
    return load_config({**TINY, **changes})


def tiny_mixture(**changes) -> ModelConfig:
    """Every second layer a mixture; a shared expert with a gate if changed to qwen2_moe."""
    keys = {**TINY, "model_type": "qwen3_moe", **MIXTURE, "decoder_sparse_step": 2, **changes}
    return load_config(keys)


def tiny_shared(**changes) -> ModelConfig:
    keys = {**TINY, "model_type": "qwen2_moe", **MIXTURE}
    keys |= {"shared_expert_intermediate_size": 48, **changes}
    keys.pop("head_dim")
    return load_config(keys)


class RandomTokens:
    """A stream of random tokens that stands for a token file."""

    eos_id = 0
    vocab_size = 101
    tokens = 200_000

    def __init__(self) -> None:
        self.ids = np.random.default_rng(0).integers(0, 101, self.tokens).astype(np.uint16)


TOKENS = RandomTokens()


def dry_trainer(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    precision: str,
    sequence_length: int = SEQUENCE_LENGTH,
) -> Trainer:
    """The trainer of one rank; call inside `fake_world`."""
    samples = Samples(TOKENS, sequence_length, layout.global_batch, seed=0)  # pyright: ignore
    return Trainer(
        config,
        layout,
        samples,
        Optimizer(lr=1e-3),
        precision,
        seed=0,
        rank=rank,
        recorder=Recorder(dry=True),
        device=torch.device("cpu"),
    )
