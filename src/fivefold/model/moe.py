"""The mixture of experts: a router, experts, and the hook through which tokens travel."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.config import ModelConfig
from fivefold.model.layers import MLP, gated
from fivefold.model.linear import add_product, column_parallel_linears, product
from fivefold.model.parameters import compute_value, differentiable, weight_gradients


class TokenDispatcher(Protocol):
    """How tokens reach the experts that were chosen for them, and come back."""

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """The part of the hidden states [sequence, ...] that this rank routes."""
        ...

    def gather_tokens(self, y: Tensor) -> Tensor:
        """The reverse of scatter_tokens."""
        ...

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        """Sum of counts over the ranks that route parts of the same sequences."""
        ...

    def dispatch(self, rows: Tensor, counts: Tensor) -> Any:
        """Begin to send rows [n, hidden], sorted by expert with `counts` [num_experts] each.
        Returns what finish_dispatch needs."""
        ...

    def finish_dispatch(self, travelling: Any) -> tuple[Tensor, list[int], Any]:
        """Wait for what was dispatched: the rows for the local experts in their order, how many for
        each, and what combine needs."""
        ...

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        """Send the results back into the order of the rows that were dispatched."""
        ...


class LocalDispatcher:
    """The dispatcher of a rank that has all experts: nothing is sent."""

    def scatter_tokens(self, x: Tensor) -> Tensor:
        return x

    def gather_tokens(self, y: Tensor) -> Tensor:
        return y

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        return counts

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return rows, counts

    def finish_dispatch(self, travelling: tuple[Tensor, Tensor]) -> tuple[Tensor, list[int], None]:
        rows, counts = travelling
        return rows, on_host(counts, rows.shape[0]).tolist(), None

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        return rows


def count(ids: Tensor, size: int) -> Tensor:
    """How often each of the ids 0 to size - 1 occurs, int64 [size]. (bincount waits for the device
    to tell it how long its result is.)"""
    return ids.new_zeros(size).scatter_add_(0, ids, torch.ones_like(ids))


def on_host(counts: Tensor, total: int) -> Tensor:
    """Counts whose sum is `total` (of each row, if there are rows), on the host: shapes that
    follow depend on them. On the meta device, which has no values, routing counts as even."""
    if not counts.is_meta:
        return counts.cpu()
    ends = torch.arange(counts.shape[-1] + 1) * total // counts.shape[-1]
    return ends.diff().expand(counts.shape)


class _GroupedLinears(torch.autograd.Function):
    """Rows of expert i times weight[i]^T, for stacked weights [experts, b, a] that share the rows
    x [n, a]. Returns one [n, b] per weight.

    On GPUs this is one grouped matrix product per weight, which needs bf16; on CPUs one product per
    expert, which measured faster there and adds weight gradients without a temporary
    (docs/decisions.md).
    """

    @staticmethod
    def forward(ctx, x: Tensor, counts: list[int], *parameters: Tensor):
        weights = [compute_value(p, x.dtype) for p in parameters]
        ctx.counts, ctx.parameters = counts, parameters
        ctx.save_for_backward(x, *weights)
        return tuple(grouped_product(x, w.transpose(1, 2), counts) for w in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        x = x.detach()  # its graph would keep the stage's input until deferred products are done
        dx = grouped_product(grads[0], weights[0], ctx.counts)
        for g, w in zip(grads[1:], weights[1:], strict=True):
            dx += grouped_product(g, w, ctx.counts)
        parameters, counts, shapes = ctx.parameters, ctx.counts, [w.shape for w in weights]

        def of_weights() -> list[Tensor | None]:
            return [
                grouped_weight_gradient(p, g, x, shape, counts)
                for p, g, shape in zip(parameters, grads, shapes, strict=True)
            ]

        return (dx, None, *weight_gradients(parameters, of_weights))


def _is_one_product(x: Tensor) -> bool:
    """Whether `F.grouped_mm` takes the rows: on GPUs it expects bf16 (torch 2.13's reference)."""
    return x.device.type != "cpu" and x.dtype == torch.bfloat16


def grouped_product(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """x [n, a] in groups of `counts` rows, weights [groups, a, b] -> [n, b]."""
    if _is_one_product(x):
        return F.grouped_mm(x, weights, offs=_group_ends(counts, x.device))
    out = x.new_empty(x.shape[0], weights.shape[2])
    for group, rows, part in zip(weights, x.split(counts), out.split(counts), strict=True):
        if rows.dtype == torch.float32:
            torch.mm(rows, group, out=part)
        else:
            part.copy_(product(rows, group))
    return out


def grouped_weight_gradient(
    p: Tensor, grad: Tensor, x: Tensor, shape: torch.Size, counts: list[int]
) -> Tensor | None:
    """grad^T x for each group [groups, b, a]: returned for autograd, or None where it was added to
    the parameter's main_grad."""
    main_grad = getattr(p, "main_grad", None)
    if _is_one_product(x):
        total = F.grouped_mm(grad.t(), x, offs=_group_ends(counts, x.device))
        if main_grad is None:
            return total
        main_grad += total
        return None
    total = main_grad if main_grad is not None else x.new_zeros(shape)
    for group, g, rows in zip(total, grad.split(counts), x.split(counts), strict=True):
        add_product(group, g.t(), rows)
    return None if main_grad is not None else total


def _group_ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


class Experts(nn.Module):
    """Gated MLPs, stacked: gate and up [experts, width, hidden], down [experts, hidden, width]."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [n, hidden] sorted by expert, `counts` rows for each -> [n, hidden]."""
        opening = (differentiable(self.gate_proj), differentiable(self.up_proj))
        gate, up = _GroupedLinears.apply(rows, counts, *opening)
        (y,) = _GroupedLinears.apply(gated(gate, up), counts, differentiable(self.down_proj))
        return y


class MoE(nn.Module):
    """Top-k softmax router, experts, and a shared expert where the model has one.

    The balance loss is taken for each sequence by itself, so that it does not depend on how
    sequences are grouped into micro-batches or spread over ranks. For one sequence of S tokens it
    is `num_experts * sum_e f_e P_e`, f_e the share of the S * k assignments that expert e got and
    P_e its mean router probability (Switch Transformer, arXiv:2101.03961, eq. 4-6, with f over
    assignments): 1.0 when routing is uniform.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        moe = self.config = config.moe
        self.gate = nn.Linear(config.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(moe.num_experts, config.hidden_size, moe.expert_intermediate_size)
        if moe.shared_intermediate_size:
            self.shared_expert = MLP(config.hidden_size, moe.shared_intermediate_size)
        if moe.shared_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.token_dispatcher: TokenDispatcher = LocalDispatcher()
        self.rows = 0  # rows that the local experts computed in the last call

    def forward(self, x: Tensor, sequence_length: int, valid: Tensor) -> tuple[Tensor, Tensor]:
        """x [sequence, batch, hidden] (perhaps a part of each sequence, whose whole length is
        `sequence_length`); `valid` [batch]: tokens of each sequence that count in the loss.
        Returns the output and this rank's part of the balance loss, summed over sequences with
        `valid` as weights."""
        own = self.token_dispatcher.scatter_tokens(x)
        tokens = own.flatten(0, 1)
        weights, experts, probabilities = self._route(tokens)

        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = count(flat, self.config.num_experts)
        rows = tokens.index_select(0, order // self.config.experts_per_token)
        travelling = self.token_dispatcher.dispatch(rows, counts)
        shared = self._shared(x)  # overlaps the rows' messages
        rows, local_counts, state = self.token_dispatcher.finish_dispatch(travelling)
        del travelling  # frees the rows that were sent
        self.rows = rows.shape[0]
        rows = self.token_dispatcher.combine(self.experts(rows, local_counts), state)
        chosen = rows.index_select(0, order.argsort()).view(*experts.shape, -1)
        y = (chosen * weights.to(chosen.dtype).unsqueeze(-1)).sum(1)
        # After the experts, so that its backward pass, which announces the layer's to FSDP2, comes
        # before theirs.
        balance = self._balance_loss(experts, probabilities, own.shape[1], sequence_length, valid)
        y = self.token_dispatcher.gather_tokens(y.view_as(own))
        return (y if shared is None else y + shared), balance

    def _shared(self, x: Tensor) -> Tensor | None:
        if not self.config.shared_intermediate_size:
            return None
        y = self.shared_expert(x)
        if self.config.shared_gate:
            (scale,) = column_parallel_linears(x, [self.shared_expert_gate])
            y = y * torch.sigmoid(scale)
        return y

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and ids of the chosen experts [tokens, k], probabilities [tokens, experts]."""
        (logits,) = column_parallel_linears(tokens, [self.gate])
        probabilities = logits.float().softmax(-1)
        weights, experts = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts, probabilities

    def _balance_loss(
        self,
        experts: Tensor,
        probabilities: Tensor,
        batch: int,
        sequence_length: int,
        valid: Tensor,
    ) -> Tensor:
        num_experts, k = self.config.num_experts, self.config.experts_per_token
        with torch.no_grad():
            sequence = torch.arange(experts.shape[0], device=experts.device) % batch
            slot = (sequence.unsqueeze(-1) * num_experts + experts).flatten()
            counts = count(slot, batch * num_experts).view(batch, num_experts)
            counts = self.token_dispatcher.sum_over_sequence(counts.float())
            share = counts / (sequence_length * k)
        sums = probabilities.view(-1, batch, num_experts).sum(0)
        loss = num_experts * (share * sums / sequence_length).sum(-1)
        return self.config.aux_loss_coef * (loss * valid).sum()
