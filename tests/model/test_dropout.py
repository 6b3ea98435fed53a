"""A dropout mask depends on the token and the place in the model alone (field case 28)."""

from __future__ import annotations

import torch

from fivefold.model.dropout import Dropout, keep_mask

SALT = (123, 456)


def test_the_share_of_dropped_elements_is_the_probability() -> None:
    for p in (0.1, 0.5, 0.9):
        keep = keep_mask(torch.arange(2000).view(500, 4), 256, SALT, p)
        assert abs(1 - keep.float().mean().item() - p) < 0.003


def test_masks_of_tokens_features_and_sites_are_independent() -> None:
    keep = keep_mask(torch.arange(4000), 64, SALT, 0.5).float() * 2 - 1
    other = keep_mask(torch.arange(4000), 64, (7, 8), 0.5).float() * 2 - 1
    neighbours = (keep[1:] * keep[:-1]).mean()
    features = (keep[:, 1:] * keep[:, :-1]).mean()
    for correlation in (neighbours, features, (keep * other).mean()):
        assert abs(correlation.item()) < 0.01


def test_a_part_of_the_tokens_gets_its_part_of_the_mask() -> None:
    whole = keep_mask(torch.arange(64).view(16, 4), 32, SALT, 0.5)
    part = keep_mask(torch.arange(64).view(16, 4)[4:9, 1:], 32, SALT, 0.5)
    assert torch.equal(part, whole[4:9, 1:])


def test_the_backward_pass_drops_what_the_forward_pass_dropped() -> None:
    x = torch.ones(8, 2, 16, requires_grad=True)
    y = Dropout(0.5, seed=0).apply(x, torch.arange(16).view(8, 2), step=3, site="0.mlp")
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_steps_and_sites_and_seeds_draw_anew() -> None:
    x, ids = torch.ones(64, 1, 64), torch.arange(64).view(64, 1)
    base = Dropout(0.5, seed=0).apply(x, ids, 0, "0.mlp")
    assert torch.equal(base, Dropout(0.5, seed=0).apply(x, ids, 0, "0.mlp"))
    for other in (
        Dropout(0.5, seed=1).apply(x, ids, 0, "0.mlp"),
        Dropout(0.5, seed=0).apply(x, ids, 1, "0.mlp"),
        Dropout(0.5, seed=0).apply(x, ids, 0, "0.attention"),
    ):
        assert 0.4 < (base == other).float().mean().item() < 0.6
