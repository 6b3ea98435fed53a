"""Field cases of split sequences: positions, packed documents, heads, and the ring's merge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.layout.notation import Layout, parse
from fivefold.model.layers import causal_attention
from fivefold.parallel.comm import Recorder
from fivefold.parallel.context.positions import context_positions
from fivefold.parallel.context.run import _merge, ring_attention
from fivefold.parallel.mesh import make_axes
from fivefold.train.data.samples import IGNORED, Batch, Samples
from fivefold.train.launch import launch
from fivefold.verify.parity import RankRecord, compare, record
from tests.parity.harness import (
    assert_parity,
    assert_within_limits,
    layout_for,
    make_trainer,
    one_process,
    random_samples,
    run,
    tiny,
    tokens_in_memory,
)

CONFIG = tiny("llama", num_hidden_layers=2)

# Positions


def test_positions_follow_the_tokens_of_a_zigzag_split() -> None:
    """19: 16 tokens on 2 ranks."""
    assert context_positions(16, 2, 0, 1, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert context_positions(16, 2, 1, 1, 0).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("layout", ["ring2", "ring2 ulysses2"])
def test_rotary_angles_start_again_with_each_packed_document(layout: str) -> None:
    """19: each rank's cosines are those of the places in their documents of the tokens it has."""
    samples = _packed(7)

    def work() -> tuple[Tensor, dict[str, int]]:
        trainer = make_trainer(CONFIG, layout_for(layout, CONFIG, samples), samples)
        (cosine, _), place = trainer._read(0)[0].angles, trainer.axes.coordinates
        return cosine[:, 0, 0, 0], place  # of the fastest pair: the cosine of the place itself

    places = np.concatenate([np.arange(7), np.arange(57)])
    degrees = parse(layout)
    for cosine, place in launch(work, degrees.world_size):
        held = context_positions(64, degrees.ring, place["ring"], degrees.ulysses, place["ulysses"])
        np.testing.assert_allclose(cosine, np.cos(places[held]), atol=1e-6)


# Packed documents


def _packed(first: int, changed_token: int = 0, kind: type[Samples] = Samples) -> Samples:
    """8 samples of two documents, `first` and 64 - `first` tokens long."""
    ids = np.random.default_rng(2).integers(1, 128, 8 * 64 + 1)
    ids[first - 1 :: 64] = 0
    ids[63::64] = 0
    if changed_token and first > 1:
        ids[:-1:64] = changed_token
    file = tokens_in_memory(ids, 128, f"{first} + {64 - first}, {changed_token}")
    global_batch = 16 if kind is ApartSamples else 8
    return kind(file, 64, global_batch, seed=0, isolate_documents=kind is Samples)


class ApartSamples(Samples):
    """The documents of `_packed` samples one by one, each at the start of its own row. What
    follows it counts nothing, and causal attention keeps it out of sight."""

    def __len__(self) -> int:
        return 16

    def read(self, ids: np.ndarray) -> Batch:
        whole = super().read(ids // 2)
        batch = Batch(*(np.full_like(x, 1) for x in (whole.tokens,) * 4))
        batch.labels[:] = IGNORED
        batch.documents[:], batch.positions[:] = 0, np.arange(64)
        for row, index in enumerate(ids):
            ends = np.flatnonzero(whole.tokens[row] == 0)
            start, end = (0, ends[0]) if index % 2 == 0 else (ends[0] + 1, 63)
            batch.tokens[row, : end - start + 1] = whole.tokens[row, start : end + 1]
            batch.labels[row, : end - start] = whole.labels[row, start:end]
        return batch


@pytest.mark.parametrize("first", [32, 7, 1])
@pytest.mark.parametrize(
    "layout", ["mb2", "ring2 mb4", "ring4 mb4", "ulysses2 mb4", "ring2 tp2 sp mb4"]
)
def test_packed_documents_train_as_they_would_apart(layout: str, first: int) -> None:
    """16: documents of 32 + 32, 7 + 57 and 1 + 63 tokens."""
    packed = _packed(first)
    one = one_process(CONFIG, _packed(first, kind=ApartSamples), steps=2)
    split = run(CONFIG, layout_for(layout, CONFIG, packed), packed, steps=2)
    assert_within_limits(compare(one, split), layout)


@pytest.mark.parametrize("layout", ["mb8", "ring2 mb8", "ring4 mb8", "ulysses2 mb8"])
def test_a_token_changes_outputs_of_its_own_document_only(layout: str) -> None:
    """16: of two documents of 32 tokens the first's first token is changed; exactly the first 32 of
    64 outputs change. In documents of 7 + 57, exactly 7."""

    def work(first: int) -> tuple[np.ndarray, np.ndarray]:
        outputs = []
        for changed_token in (5, 6):
            samples = _packed(first, changed_token)
            trainer = make_trainer(CONFIG, layout_for(layout, CONFIG, samples), samples)
            norm = trainer.stages[0].model.norm
            norm.register_forward_hook(lambda module, inputs, out: outputs.append(out.detach()))
            trainer.gradients(0)
        changed = (outputs[0] != outputs[1]).any(-1)  # [sequence, batch]
        place, degrees = trainer.axes.coordinates, trainer.layout
        held = context_positions(64, degrees.ring, place["ring"], degrees.ulysses, place["ulysses"])
        return held, changed.numpy()

    for first in (32, 7):
        changed = np.zeros((64, 8), bool)
        for held, part in launch(work, parse(layout).world_size, first):
            changed[held] = part
        assert (changed == (np.arange(64) < first)[:, None]).all()


# Heads


def test_fewer_kv_heads_than_ulysses_ranks() -> None:
    """94: 8 heads and 2 kv heads on 4 ranks: 2 query heads and a copy of one kv head a rank."""
    assert_parity(tiny("llama", num_key_value_heads=2, num_hidden_layers=2), "ulysses4 mb4")


def test_two_models_with_other_heads_in_one_process() -> None:
    """94: nothing global remembers the number of heads."""
    heads = [{"num_key_value_heads": 2}, {"num_attention_heads": 4}]
    configs = [tiny("llama", num_hidden_layers=2, **changes) for changes in heads]
    samples = random_samples(128)

    def work() -> list[RankRecord]:
        layout = layout_for("ulysses4 mb4", configs[0], samples)
        trainers = [make_trainer(config, layout, samples) for config in configs]
        for trainer in trainers:
            trainer.gradients(0)
        return [record(trainer, 1) for trainer in trainers]

    both = launch(work, 4)
    for config, split in zip(configs, zip(*both, strict=True), strict=True):
        assert_within_limits(compare(one_process(config, samples, 1), split), str(config))


# The ring


def test_the_merge_of_blocks_stays_finite() -> None:
    """21: blocks whose log-sum-exp are 0 and 200, in either order, and one without any key."""
    for lses, expected in [((0.0, 200.0), 2.0), ((200.0, 0.0), 1.0), ((200.0, -math.inf), 1.0)]:
        out, lse = torch.ones(1, 1, 1, 4), torch.tensor([[[lses[0]]]])
        _merge(out, lse, torch.full((1, 1, 1, 4), 2.0), torch.tensor([[[lses[1]]]]))
        assert out.tolist() == [[[[expected] * 4]]] and lse.item() == 200.0
    out, lse = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1)
    _merge(out, lse, torch.full((1, 1, 1, 4), 2.0), torch.zeros(1, 1, 1))
    assert out[0, 0, 0].tolist() == [1.5] * 4 and lse.item() == pytest.approx(math.log(2))


def _attention(length: int, dtype: torch.dtype, ring: int) -> list[Tensor]:
    """Output and gradients of q, k, v on this rank's positions, in fp32."""
    random = torch.Generator().manual_seed(0)
    shapes = [(length, 1, heads, 64) for heads in (8, 2, 2, 8)]
    whole = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    held = context_positions(length, ring, dist.get_rank(), 1, 0)
    q, k, v, grad = (x[held].requires_grad_() for x in whole)
    if ring == 1:
        out = causal_attention(q, k, v, None)
    else:
        axes = make_axes(Layout(ring=ring), dist.get_rank(), Recorder(), kv_heads=2)
        out = ring_attention(q, k, v, None, axes.ring)
    out.backward(grad.detach())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [x.detach().float() for x in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("length", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_the_error_of_the_ring_does_not_grow_with_its_size(length: int) -> None:
    """21: bf16, 8 heads and 2 kv heads: the error against fp32 on one device is at most 2.5 times
    that of bf16 on one device + 2e-3, for out, dq, dk and dv."""
    (exact,) = launch(_attention, 1, length, torch.float32, 1)
    (rounded,) = launch(_attention, 1, length, torch.bfloat16, 1)
    allowed = [2.5 * (a - b).abs().max() + 2e-3 for a, b in zip(exact, rounded, strict=True)]
    for ring in (2, 4, 8):
        for rank, parts in enumerate(launch(_attention, ring, length, torch.bfloat16, ring)):
            held = context_positions(length, ring, rank, 1, 0)
            for whole, part, limit in zip(exact, parts, allowed, strict=True):
                assert (whole[held] - part).abs().max() <= limit
