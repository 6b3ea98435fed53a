"""Context parallelism: how ulysses, ring and their product run.

Ulysses (arXiv:2309.14509) exchanges the split of the sequence for a split of the heads with
all-to-alls before and after attention. Ring attention (arXiv:2310.01889) leaves the queries where
they are and sends keys and values round the ring; blocks are merged by their log-sum-exp in fp32.
USP (arXiv:2405.07719) does both: ulysses inside, ring outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.layout.notation import Layout
from fivefold.model.layers import causal_attention
from fivefold.model.transformer import Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis
from fivefold.parallel.context.flash import block_attention, block_attention_backward
from fivefold.parallel.context.positions import ring_positions
from fivefold.parallel.mesh import Axes


def apply(stage: Stage, axes: Axes) -> None:
    """Put context parallelism (and selective recomputation) into a stage's attention."""
    attention_fn = causal_attention
    if axes.ring.size > 1:
        attention_fn = partial(ring_attention, axis=axes.ring)
    if axes.ulysses.size > 1:
        attention_fn = partial(ulysses_attention, inner=attention_fn, axis=axes.ulysses)
    if axes.layout.recompute == "selective":
        attention_fn = partial(
            checkpoint, attention_fn, use_reentrant=False, preserve_rng_state=False
        )
    for layer in stage.layers.values():
        layer.self_attn.attention_fn = attention_fn


# Ulysses


class _SequenceToHeads(torch.autograd.Function):
    """[s / u, b, heads, d] with all heads -> [s, b, heads / u, d] with all of the sequence."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _sequence_to_heads(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _heads_to_sequence(grad, ctx.axis), None


class _HeadsToSequence(torch.autograd.Function):
    """[s, b, heads / u, d] -> [s / u, b, heads, d]."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _heads_to_sequence(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sequence_to_heads(grad, ctx.axis), None


def _sequence_to_heads(x: Tensor, axis: Axis) -> Tensor:
    by_rank = x.unflatten(2, (axis.size, -1)).movedim(2, 0)  # [u, s / u, b, heads / u, d]
    return comm.all_to_all(by_rank.contiguous(), axis).flatten(0, 1)


def _heads_to_sequence(x: Tensor, axis: Axis) -> Tensor:
    by_rank = x.unflatten(0, (axis.size, -1))  # [u, s / u, b, heads / u, d]
    return comm.all_to_all(by_rank.contiguous(), axis).movedim(0, 2).flatten(2, 3)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor] | Tensor | None,
    inner: Callable[..., Tensor],
    axis: Axis,
) -> Tensor:
    """Attention of a sequence split over `axis`; `inner` sees whole sequences of fewer heads.

    With fewer kv heads than ranks each is repeated for the ranks that need it; autograd sums
    the gradients of the copies.
    """
    copies = max(1, axis.size // k.shape[2])
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    q, k, v = (_SequenceToHeads.apply(x, axis) for x in (q, k, v))
    return _HeadsToSequence.apply(inner(q, k, v, mask), axis)


# Ring


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor] | None, axis: Axis
) -> Tensor:
    """Causal attention of a zigzag-split sequence; q [s / r, b, heads, d] and so on.

    `mask`, with packed documents, has one entry per step of the ring (`document_masks`).
    """
    return _RingAttention.apply(q, k, v, mask, axis)


class _RingAttention(torch.autograd.Function):
    """Step i works on the keys of ring rank (rank - i). In the backward pass the gradients of
    travelling keys travel with them; each rank adds those of its own keys when they come home,
    so keys and gradients are sent r - 1 times each."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor] | None, axis: Axis):
        dtype = q.dtype
        q, k, v = (_heads_first(x) for x in (q, k, v))
        kv = torch.stack([k, v])
        out = lse = None
        for step in range(axis.size):
            pending = comm.start_shift(kv, axis) if step < axis.size - 1 else None
            block = _Block(step, axis, masks)
            part, part_lse = block.forward(q, kv)
            if out is None or lse is None:
                out, lse = part.float(), part_lse
            else:
                _merge(block.queries(out), block.queries(lse), part, part_lse)
            if pending:
                kv = pending.wait()
        assert out is not None and lse is not None
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.masks, ctx.dtype = axis, masks, dtype
        return _sequence_first(out).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        grad, out = _heads_first(grad), out.to(q.dtype)
        kv = torch.stack([k, v])
        dq = torch.zeros_like(q, dtype=torch.float32)
        own = arriving = None
        for step in range(axis.size):
            pending = comm.start_shift(kv, axis) if step < axis.size - 1 else None
            block = _Block(step, axis, ctx.masks)
            part_dq, dkv = block.backward(grad, q, kv, out, lse)
            block.queries(dq).add_(part_dq)
            if step == 0:
                own = dkv
            else:
                total = dkv if arriving is None else dkv.add_(arriving.wait())
                arriving = comm.start_shift(total, axis)
            if pending:
                kv = pending.wait()
        assert own is not None and arriving is not None
        own += arriving.wait()
        dq, dk, dv = (_sequence_first(x).to(ctx.dtype) for x in (dq, own[0], own[1]))
        return dq, dk, dv, None, None


class _Block:
    """One step of the ring: which queries look at which of the keys that are here.

    Zigzag: a rank's own block is causal. Keys of an earlier rank: all queries look at the first
    half only (its second half is later than any of ours). Keys of a later rank: only the second
    half of the queries looks, at all of them. So each step is half a block of work.
    """

    def __init__(self, step: int, axis: Axis, masks: list[Tensor] | None) -> None:
        self.own = step == 0
        self.earlier = axis.index >= step  # the keys' rank is index - step, round the ring
        self.mask = None if masks is None else masks[step]

    def queries(self, x: Tensor) -> Tensor:
        """The queries' part of a tensor [b, heads, s / r, ...]."""
        return x if self.own or self.earlier else x.chunk(2, dim=2)[1]

    def keys(self, kv: Tensor) -> Tensor:
        """The keys' and values' part of [2, b, kv_heads, s / r, d]."""
        return kv.chunk(2, dim=3)[0] if self.earlier and not self.own else kv

    @property
    def causal(self) -> bool:
        return self.own and self.mask is None

    def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.keys(kv)
        return block_attention(self.queries(q), k, v, self.causal, self.mask)

    def backward(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the block's queries, and of all keys and values here in fp32."""
        k, v = self.keys(kv)
        grad, q, out, lse = (self.queries(x) for x in (grad, q, out, lse))
        dq, dk, dv = block_attention_backward(grad, q, k, v, out, lse, self.causal, self.mask)
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        self.keys(dkv).copy_(torch.stack([dk, dv]))
        return dq, dkv


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a block's output into the running one, in place and in fp32. `out` has been weighted
    by exp(scores - lse); the block's rows may be minus infinity (no key), never all of them."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.float(), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, heads, d] -> [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


# Masks of packed documents


def document_masks(documents: Tensor, layout: Layout, ring_rank: int) -> list[Tensor] | Tensor:
    """The masks that keep queries inside their own document, as `attention_fn` needs them.

    documents [b, whole sequence]: the number of each token's document. Returns for plain
    attention one mask [b, 1, s, s], for a ring a mask for each of its steps.
    """
    length = documents.shape[1]
    places = [
        torch.from_numpy(ring_positions(length, layout.ring, rank)).to(documents.device)
        for rank in range(layout.ring)
    ]
    if layout.ring == 1:
        return _document_mask(documents, places[0], places[0])
    masks = []
    for step in range(layout.ring):
        queries, keys = places[ring_rank], places[(ring_rank - step) % layout.ring]
        if step > 0 and ring_rank >= step:
            keys = keys.chunk(2)[0]
        elif step > 0:
            queries = queries.chunk(2)[1]
        masks.append(_document_mask(documents, queries, keys))
    return masks


def _document_mask(documents: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    same = documents[:, queries].unsqueeze(2) == documents[:, keys].unsqueeze(1)
    return (same & (queries.unsqueeze(1) >= keys)).unsqueeze(1)
