"""Training as one writes it with PyTorch alone: what our one process is measured against.

Nothing of fivefold's model is used here; only the samples are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.config import ModelConfig
from fivefold.train.data.samples import Samples


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            projection(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """A loop over experts, as in Hugging Face models; without balance loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.k, hidden = config.moe.experts_per_token, config.hidden_size
        self.gate = nn.Linear(hidden, config.moe.num_experts, bias=False)
        width = config.moe.expert_intermediate_size
        self.experts = nn.ModuleList(MLP(hidden, width) for _ in range(config.moe.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_moe(index):
            self.mlp: nn.Module = MoE(config)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        pairs = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(sequence_length), config.rope_theta**-pairs)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))


class PlainLoop:
    """One process, with gradients accumulated over micro-batches."""

    def __init__(self, config: ModelConfig, samples: Samples, micro_batch: int) -> None:
        self.samples, self.micro_batch = samples, micro_batch
        self.model = Model(config, samples.sequence_length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, step: int, lr: float) -> float:
        """One optimizer step, number `step` from 0; returns the mean loss."""
        total = 0.0
        for ids in self.samples.ids(step).reshape(-1, self.micro_batch):
            batch = self.samples.read(ids)
            logits = self.model(torch.from_numpy(batch.tokens))
            labels = torch.from_numpy(batch.labels).flatten()
            share = len(ids) / self.samples.global_batch
            loss = F.cross_entropy(logits.flatten(0, 1), labels) * share
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
