"""Cross-entropy over a vocabulary of which this rank may hold only a part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that does not count."""

Join = Callable[[Tensor, str], Tensor]


def no_join(x: Tensor, op: str) -> Tensor:
    """The join of a vocabulary that is in one piece."""
    return x


class _CrossEntropy(torch.autograd.Function):
    """The logits are turned into the softmax's numerators and then into their own gradient in
    place: one [tokens, vocabulary] tensor in fp32 is all that the loss needs."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, first_id: int, join: Join) -> Tensor:
        z = logits.detach().float()
        z -= join(z.amax(-1), "max").unsqueeze(-1)
        ids = labels - first_id
        held = (ids >= 0) & (ids < z.shape[-1])
        ids = ids.where(held, 0).unsqueeze(-1)
        target = z.gather(-1, ids).squeeze(-1) * held
        sums = join(torch.stack([z.exp_().sum(-1), target]), "sum")
        valid = labels != IGNORED
        ctx.save_for_backward(z, sums[0], ids, held, valid)
        ctx.dtype = logits.dtype
        return ((sums[0].log() - sums[1]) * valid).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        z, total, ids, held, valid = ctx.saved_tensors
        # d loss / d logit = softmax - 1 at the label
        z *= (grad * valid / total).unsqueeze(-1)
        z.scatter_add_(-1, ids, (-grad * (valid & held)).unsqueeze(-1))
        return z.to(ctx.dtype), None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, first_id: int, join: Join) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[label], in fp32.

    logits [tokens, local vocabulary], overwritten; labels [tokens] are global ids, IGNORED ones
    count nothing; `first_id` is the id of the first local column; `join(x, "max" or "sum")`
    joins a [..., tokens] tensor over the ranks that hold the other columns.
    """
    return _CrossEntropy.apply(logits, labels, first_id, join)
