"""Attention of one block of queries with one block of keys, with the log-sum-exp of its scores.

The log-sum-exp is what lets blocks be merged exactly. These are PyTorch's own flash kernels; the
public scaled_dot_product_attention does not hand the log-sum-exp out.
"""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [b, heads, s, d], k and v [b, kv_heads, t, d]; `mask` [b, 1, s, t] True where a query may
    look. Returns the output [b, heads, s, d] (fp32 on CPUs) and the log-sum-exp [b, heads, s] in
    fp32, which is minus infinity for a query that may look nowhere."""
    if q.device.type != "cpu":
        return _cuda_forward(q, k, v, causal, mask)
    q, k, v = q.float(), k.float(), v.float()  # CPU kernels are far slower in bf16
    bias = _as_bias(mask, q.dtype)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias
    )
    if mask is not None:  # the kernel reports 0 for a row without keys
        lse = lse.masked_fill(~mask.any(-1), -torch.inf)
    return out, lse


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the output and log-sum-exp over all blocks."""
    if q.device.type != "cpu":
        return _cuda_backward(grad, q, k, v, out, lse, causal, mask)
    grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=_as_bias(mask, q.dtype)
    )


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -torch.inf)


def _flash_can(q: Tensor, mask: Tensor | None) -> bool:
    """Of CUDA's two kernels flash takes neither masks, nor fp32, nor fewer kv heads; the
    memory-efficient one takes a mask as a bias, and fp32."""
    return mask is None and q.dtype in (torch.float16, torch.bfloat16)


def _wide_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    bias = _as_bias(mask, q.dtype)
    return None if bias is None else bias.expand(-1, q.shape[1], -1, -1)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None):
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    if _flash_can(q, mask):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return out, lse
    bias, causal = _wide_bias(mask, q), causal and mask is None
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)
    lse = lse[..., : q.shape[2]]
    if mask is None:
        return out, lse
    seen = mask.any(-1)
    return out.masked_fill(~seen.unsqueeze(-1), 0.0), lse.masked_fill(~seen, -torch.inf)


def _cuda_backward(grad, q, k, v, out, lse, causal, mask):
    wide_k, wide_v = _repeat_heads(k, q), _repeat_heads(v, q)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if _flash_can(q, mask):
        length_q, length_k = q.shape[2], k.shape[2]
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            wide_k,
            wide_v,
            out,
            lse,
            None,
            None,
            length_q,
            length_k,
            0.0,
            causal,
            seed,
            seed,
        )
    else:
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            wide_k,
            wide_v,
            _wide_bias(mask, q),
            out,
            lse,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal and mask is None,
        )
    return dq, _sum_heads(dk, k), _sum_heads(dv, v)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)
