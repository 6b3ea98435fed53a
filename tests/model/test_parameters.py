from __future__ import annotations

import torch

from fivefold.model.moe import Experts
from fivefold.model.parameters import deferred_weight_grads
from fivefold.model.transformer import MicroBatch, Stage, rotary_angles
from tests.parity.harness import tiny

CONFIG = tiny("qwen2_moe", tie_word_embeddings=True)


def stage() -> Stage:
    torch.manual_seed(0)
    made = Stage(CONFIG, range(CONFIG.num_layers), first=True, last=True)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return made


def micro_batch() -> MicroBatch:
    ids = torch.randint(CONFIG.vocab_size, (17, 2), generator=torch.Generator().manual_seed(0))
    return MicroBatch(
        tokens=ids[:-1],
        labels=ids[1:],
        angles=rotary_angles(CONFIG, torch.arange(16).unsqueeze(1)),
        mask=None,
        sequence_length=16,
        valid=torch.full((2,), 16.0),
        token_ids=ids[:-1],
        step=0,
    )


def test_no_weight_has_a_gradient_before_what_was_put_off_is_done() -> None:
    whole, split = stage(), stage()
    loss, balance = whole(micro_batch().tokens, micro_batch())
    torch.autograd.backward([loss, balance])
    loss, balance = split(micro_batch().tokens, micro_batch())
    later = []
    with deferred_weight_grads(later):
        torch.autograd.backward([loss, balance])
    assert all(p.grad is None for p in split.parameters())
    with torch.no_grad():
        for work in later:
            work()
    for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


def test_the_input_has_its_gradient_at_once() -> None:
    experts = Experts(4, 8, 16)
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(6, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(experts(x, [1, 0, 3, 2]).sum(), x)
    later = []
    with deferred_weight_grads(later):
        experts(x, [1, 0, 3, 2]).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert len(later) == 2 and experts.up_proj.grad is None
