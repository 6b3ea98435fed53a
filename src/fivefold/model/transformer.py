"""A stage: consecutive layers of a decoder, with the embedding or the head where it has them.

One process has one stage with all layers. Parameters have the names of Hugging Face weights,
with the layer's number in the whole model, so that a name means the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.model.config import ModelConfig
from fivefold.model.dropout import Dropout
from fivefold.model.layers import MLP, Attention, Embedding, RMSNorm
from fivefold.model.linear import InputCollective, column_parallel_linears
from fivefold.model.loss import Join, cross_entropy, no_join
from fivefold.model.moe import MoE
from fivefold.model.rope import rope_frequencies

NO_DROPOUT = Dropout(0.0, seed=0)


@dataclass
class MicroBatch:
    """What one micro-batch gives to every layer. `[sequence, batch]` is this rank's part."""

    tokens: Tensor  # int64 [sequence, batch]
    labels: Tensor  # int64 [sequence, batch], IGNORED where nothing is to be predicted
    angles: tuple[Tensor, Tensor]  # cosine and sine of the positions
    mask: list[Tensor] | Tensor | None  # for `attention_fn`, with packed documents
    sequence_length: int  # of the whole sequences
    valid: Tensor  # float [batch]: tokens of each whole sequence that count in the loss
    token_ids: Tensor  # int64 [sequence between layers, batch]: places in the global batch
    step: int


def rotary_angles(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for positions [sequence, batch or 1], each [..., 1, head_dim / 2], fp32."""
    frequencies = torch.from_numpy(np.asarray(rope_frequencies(config), dtype=np.float32))
    angles = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


class Layer(nn.Module):
    """One decoder layer: attention, then an MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int, recompute: str, dropout: Dropout) -> None:
        super().__init__()
        self.index, self.dropout = index, dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_moe = config.is_moe(index)
        if self.is_moe:
            self.mlp: nn.Module = MoE(config)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.recompute = recompute

    def forward(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Hidden states in and out, and this rank's part of the balance loss (None if dense)."""
        if self.recompute == "full":
            return checkpoint(
                self._compute, x, batch, use_reentrant=False, preserve_rng_state=False
            )
        return self._compute(x, batch)

    def _compute(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        y = self.self_attn(self.input_layernorm(x), batch.angles, batch.mask)
        x = x + self._drop(y, batch, "attention")
        h = self.post_attention_layernorm(x)
        balance = None
        if self.is_moe:
            y, balance = self.mlp(h, batch.sequence_length, batch.valid)
        else:
            y = self.mlp(h)
        return x + self._drop(y, batch, "mlp"), balance

    def _drop(self, y: Tensor, batch: MicroBatch, part: str) -> Tensor:
        return self.dropout.apply(y, batch.token_ids, batch.step, f"{self.index}.{part}")


class Body(nn.Module):
    """The part of the model whose parameter names begin with `model.`"""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        has_table: bool,
        last: bool,
        recompute: str,
        recompute_layers: int,
        dtype: torch.dtype,
        dropout: Dropout,
    ) -> None:
        super().__init__()
        if has_table:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        count = recompute_layers or len(layers)
        modes = {i: recompute if place < count else "none" for place, i in enumerate(layers)}
        self.layers = nn.ModuleDict({str(i): Layer(config, i, modes[i], dropout) for i in layers})
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Stage(nn.Module):
    """Layers `layers` of the model; `first` has the embedding, `last` the head and the loss."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        first: bool,
        last: bool,
        recompute: str = "none",
        recompute_layers: int = 0,  # of "full": the first layers; 0 = all
        dtype: torch.dtype = torch.float32,
        dropout: Dropout = NO_DROPOUT,
    ) -> None:
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.tied = config.tied_embeddings
        self.has_table = first or (last and self.tied)
        self.model = Body(
            config, layers, self.has_table, last, recompute, recompute_layers, dtype, dropout
        )
        if last and not self.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.input_collective: InputCollective | None = None  # of the head
        self.first_id = 0  # of the vocabulary columns that this rank holds
        self.join: Join = no_join

    @property
    def layers(self) -> dict[str, Layer]:
        """The stage's layers by their number in the whole model, in order."""
        return cast("dict[str, Layer]", dict(self.model.layers.items()))

    def forward(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """x: token ids on the first stage, hidden states elsewhere, [sequence, batch(, hidden)].

        Returns hidden states, or on the last stage the sum of the token losses; and this rank's
        part of the balance losses of the stage's layers (None without a mixture).
        """
        if self.first:
            x = self.model.embed_tokens(x)
        balance = None
        for layer in self.layers.values():
            x, part = layer(x, batch)
            if part is not None:
                balance = part if balance is None else balance + part
        if self.last:
            x = self._loss(self.model.norm(x), batch.labels)
        return x, balance

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        head = self.model.embed_tokens if self.tied else self.lm_head
        (logits,) = column_parallel_linears(x, [cast(nn.Linear, head)], self.input_collective)
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), self.first_id, self.join)
