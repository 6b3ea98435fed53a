"""Dropout whose mask depends on the token, never on where it is computed.

Each element is kept or dropped by a hash of seed, step, layer, the token's place in the global
batch and the feature. So the mask is the same in every layout: ranks that hold the same values
drop the same ones, ranks that hold different tokens draw independently, and a recomputed forward
pass, a resumed run or another layout repeats it exactly, with no generator state to keep.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Dropout:
    """Dropout with one probability through a run."""

    probability: float
    seed: int

    def apply(self, x: Tensor, token_ids: Tensor, step: int, site: str) -> Tensor:
        """Drop elements of x [sequence, batch, hidden] and scale the others by 1 / (1 - p).

        token_ids [sequence, batch]: place of each token in the global batch. `site` names the
        place in the model, such as `3.mlp`.
        """
        if self.probability == 0.0:
            return x
        key = hashlib.sha256(f"{self.seed}:{step}:{site}".encode()).digest()
        salt = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")
        return _Drop.apply(x, token_ids, salt, self.probability)


class _Drop(torch.autograd.Function):
    """Keeps the token ids instead of a mask; the backward pass makes the mask again."""

    @staticmethod
    def forward(ctx, x: Tensor, token_ids: Tensor, salt: tuple[int, int], p: float) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.salt, ctx.p = salt, p
        return x * keep_mask(token_ids, x.shape[-1], salt, p) / (1.0 - p)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (token_ids,) = ctx.saved_tensors
        keep = keep_mask(token_ids, grad.shape[-1], ctx.salt, ctx.p)
        return grad * keep / (1.0 - ctx.p), None, None, None


def keep_mask(token_ids: Tensor, features: int, salt: tuple[int, int], p: float) -> Tensor:
    """True where an element is kept: [*token_ids.shape, features]."""
    rows = _mix(token_ids.unsqueeze(-1) ^ salt[0])
    columns = _mix(torch.arange(features, device=token_ids.device) ^ salt[1])
    return _mix(rows ^ columns) >= int(p * 2**32)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash, carried in int64 (the `lowbias32` constants of C. Wellons's hash
    prospector, 2018)."""
    x = x & _MASK_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK_32
    return x ^ (x >> 16)
