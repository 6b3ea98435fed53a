"""The parts of a decoder layer, as one process computes them.

Activations are `[sequence, batch, hidden]`, so that a split of the sequence is a split of
dimension 0. Where a split changes what a part does, the part has a hook, an attribute that does
nothing by default and that the split's `run` replaces:

- `input_collective` (of a part's first linear layers) and `output_collective` (after its last):
  tensor parallelism;
- `attention_fn` of attention: context parallelism (ulysses and ring);
- `token_dispatcher` of a mixture: expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.config import ModelConfig
from fivefold.model.linear import (
    InputCollective,
    column_parallel_linears,
    row_parallel_linear,
    unchanged,
)
from fivefold.model.parameters import (
    compute_value,
    differentiable,
    local_tensor,
    small_weight_gradient,
    weight_gradients,
)


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight, in fp32. Keeps x and 1 / rms(x) only, and makes half as many passes over
    memory as autograd's derivative of the formula."""

    @staticmethod
    def forward(ctx, x: Tensor, p: Tensor, eps: float) -> Tensor:
        weight = compute_value(p, x.dtype)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (norm.square_() / x.shape[-1]).add_(eps).rsqrt_()
        ctx.parameter = p
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, scale, weight = ctx.saved_tensors
        normalized = x * scale
        product = normalized * grad
        # For n = x / rms(x) and dn = grad * weight: dx = (dn - n * mean(n * dn)) / rms(x).
        mean = (product @ weight.float()).unsqueeze(-1) / x.shape[-1]
        dx = (grad.float() * weight).addcmul_(normalized, mean, value=-1).mul_(scale)
        dweight = product.flatten(0, -2).sum(0)
        return dx.to(x.dtype), small_weight_gradient(ctx.parameter, dweight), None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, of length `size`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, differentiable(self.weight), self.eps)


class _Rotate(torch.autograd.Function):
    """Rotary embedding; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return out


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to x [sequence, batch, heads, head_dim].

    `angles` are cosine and sine, [sequence, batch or 1, 1, head_dim / 2] each. The halves of a
    head are paired (element i with i + head_dim / 2), the convention of Hugging Face weights.
    """
    cos, sin = angles
    return _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of whole sequences. q [s, b, heads, d], k and v [s, b, kv_heads, d]; `mask`
    [b, 1, s, s] (True where a query may look) replaces the causal mask. Returns q's shape."""
    dtype = q.dtype
    if q.device.type == "cpu":  # bf16 attention is far slower than fp32 on CPUs
        q, k, v = q.float(), k.float(), v.float()
    heads_first = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    if q.is_meta and mask is None:  # for which PyTorch would take its slowest kernel, not a GPU's
        out = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, True)[0]
        return out.permute(2, 0, 1, 3)
    out = F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.permute(2, 0, 1, 3).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. With fewer heads in its weights it computes
    fewer heads: nothing here knows how many the model has."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.input_collective: InputCollective | None = None
        self.output_collective: Callable[[Tensor], Tensor] = unchanged
        self.attention_fn: Callable[..., Tensor] = causal_attention

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], mask: list[Tensor] | Tensor | None
    ) -> Tensor:
        projections = column_parallel_linears(
            x, [self.q_proj, self.k_proj, self.v_proj], self.input_collective
        )
        q, k, v = (y.view(*y.shape[:2], -1, self.head_dim) for y in projections)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.attention_fn(rotate(q, angles), rotate(k, angles), v, mask)
        return row_parallel_linear(out.flatten(2), self.o_proj, self.output_collective)


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.input_collective: InputCollective | None = None
        self.output_collective: Callable[[Tensor], Tensor] = unchanged

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_parallel_linears(x, [self.gate_proj, self.up_proj], self.input_collective)
        return row_parallel_linear(gated(gate, up), self.down_proj, self.output_collective)


class _Gated(torch.autograd.Function):
    """silu(gate) * up, keeping its two inputs only."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        dgate = torch.ops.aten.silu_backward(grad * up, gate)
        return dgate, F.silu(gate).mul_(grad)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise: [..., width] each."""
    return _Gated.apply(gate, up)


class _Lookup(torch.autograd.Function):
    """Rows of the embedding for those ids that this rank holds, zeros for the others. Ids that are
    elsewhere read the first row and add zeros to its gradient, so that no size depends on values
    and no device is waited for. `held` is None where the rank holds all rows."""

    @staticmethod
    def forward(ctx, ids: Tensor, held: Tensor | None, p: Tensor, dtype: torch.dtype) -> Tensor:
        table = compute_value(p, dtype)
        ctx.parameter, ctx.shape = p, table.shape
        ctx.save_for_backward(ids, held)
        rows = F.embedding(ids, table)
        return rows if held is None else rows.mul_(held.unsqueeze(-1))

    @staticmethod
    def backward(ctx, grad: Tensor):
        ids, held = ctx.saved_tensors
        p, shape = ctx.parameter, ctx.shape

        def of_rows() -> list[Tensor | None]:
            main_grad = getattr(p, "main_grad", None)
            total = main_grad if main_grad is not None else grad.new_zeros(shape)
            rows = grad if held is None else grad * held.unsqueeze(-1)
            total.index_add_(0, ids.flatten(), rows.flatten(0, 1).to(total.dtype))
            return [None if main_grad is not None else total]

        return None, None, weight_gradients([p], of_rows)[0], None


class Embedding(nn.Module):
    """Token embedding [vocab_size, hidden]. `first_id` is the first row that this rank holds."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocab_size = vocab_size
        self.bias = None  # as a tied head it is read like a linear layer
        self.dtype = dtype
        self.first_id = 0
        self.output_collective: Callable[[Tensor], Tensor] = unchanged

    def forward(self, ids: Tensor) -> Tensor:
        """ids [sequence, batch] -> hidden states [sequence, batch, hidden]."""
        rows, held = local_tensor(self.weight).shape[0], None
        if rows < self.vocab_size:
            ids = ids - self.first_id
            held = (ids >= 0) & (ids < rows)
            ids = ids.where(held, 0)
        p = differentiable(self.weight)
        return self.output_collective(_Lookup.apply(ids, held, p, self.dtype))
