"""Field cases of silently wrong numbers: losses, gradients, norms and weights that depend on the
layout. Numbers in docstrings are those of the cases."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.layout.notation import parse
from fivefold.model import transformer
from fivefold.model.loss import cross_entropy
from fivefold.model.moe import MoE
from fivefold.model.transformer import Layer
from fivefold.parallel.comm import Recorder
from fivefold.parallel.tensor.run import join_vocabulary
from fivefold.train.data.samples import IGNORED, Batch, Samples
from fivefold.train.launch import launch
from fivefold.train.trainer import StepResult, Trainer
from fivefold.verify.parity import assemble, compare, record, weight_pieces
from tests.parity.harness import (
    TINY_D,
    TINY_M,
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

QK_NORM_D = tiny("qwen3", num_hidden_layers=2)
TIED_D = tiny("llama", tie_word_embeddings=True)

# The loss and its denominator


@pytest.mark.parametrize(
    "layout",
    [
        "dp8",
        "dp4 ring2",
        "dp2 ring4",
        "ulysses2 dp4",
        "ring2 ulysses2 dp2",
        pytest.param("ring8 mb2", marks=pytest.mark.slow),
        pytest.param("dp4 ulysses2 zero3", marks=pytest.mark.slow),
    ],
)
def test_context_parallelism_does_not_scale_the_gradients(layout: str) -> None:
    """1: loss or gradients off by the context-parallel degree."""
    steps = 3 if layout in ("dp4 ring2", "ulysses2 dp4") else 1
    assert_parity(tiny("llama", num_hidden_layers=2), layout, steps=steps)


@pytest.mark.parametrize("layout", ["ring8", "ulysses8"])
def test_a_loss_of_one_a_token_is_one_whatever_the_number_of_ranks(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1: 8 ranks of a sequence with 100 valid tokens each and a loss of 1.0 a token: 1.0, not 0.125
    and not 8; and the gradient is that of the mean."""

    def loss_of_one(logits: Tensor, labels: Tensor, first_id: int, join) -> Tensor:
        assert len(labels) in (100, 800)
        mean = logits.float().mean(-1)
        return ((1.0 + mean - mean.detach()) * (labels != IGNORED)).sum()

    monkeypatch.setattr(transformer, "cross_entropy", loss_of_one)
    config = tiny("llama", num_hidden_layers=1)
    samples = random_samples(128, global_batch=1, sequence_length=800)
    one, split = (
        run(config, layout_for(text, config, samples), samples, steps=1) for text in ("dp1", layout)
    )
    assert [rank.results[0].loss for rank in split] == [1.0] * 8
    assert_within_limits(compare(one, split), layout)


class UnevenSamples(Samples):
    """Even samples have 10 valid labels, odd ones 100; the label says what a token's loss is."""

    def read(self, ids: np.ndarray) -> Batch:
        batch = super().read(ids)
        batch.labels[ids % 2 == 1] = 1
        batch.labels[ids % 2 == 0, :10] = 2
        batch.labels[ids % 2 == 0, 10:] = IGNORED
        return batch


@pytest.mark.parametrize("layout", ["dp1 ga2", "dp2", "ring2 mb2", "pp2 ga2"])
def test_the_loss_is_the_mean_over_all_valid_tokens(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3: 10 tokens of mean loss 2.0 and 100 of 1.0 are (20 + 100) / 110, not 1.5."""

    def loss_is_the_label(logits: Tensor, labels: Tensor, first_id: int, join) -> Tensor:
        return (labels * (labels != IGNORED)).sum() + 0.0 * logits.sum()

    monkeypatch.setattr(transformer, "cross_entropy", loss_is_the_label)
    config = tiny("llama", num_hidden_layers=2)
    stream = tokens_in_memory(np.ones(201), 128, "two samples")
    samples = UnevenSamples(stream, sequence_length=100, global_batch=2, seed=0)
    for rank in run(config, layout_for(layout, config, samples), samples, steps=1):
        assert rank.results[0].loss == pytest.approx(120 / 110, rel=1e-12)
        assert rank.results[0].tokens == 110


class MaskedSamples(Samples):
    """A random share of each sample's labels is ignored, in one sample all but one."""

    def read(self, ids: np.ndarray) -> Batch:
        batch = super().read(ids)
        for labels, index in zip(batch.labels, ids, strict=True):
            random = np.random.default_rng(int(index))
            keep = 1 if index % 8 == 3 else random.integers(1, len(labels))
            labels[random.permutation(len(labels))[keep:]] = IGNORED
        return batch


@pytest.mark.parametrize("layout", ["dp1 ga4", "dp4 ga1", "dp2 ga2", "dp2 ring2 ga2", "pp2 ga2"])
@pytest.mark.parametrize("model", [TINY_D, TINY_M], ids=["dense", "mixture"])
def test_uneven_numbers_of_valid_tokens_weigh_right(layout: str, model) -> None:
    """3: with random label masks, losses and gradients are those of one process."""
    assert_parity(model, layout, random_samples(128, kind=MaskedSamples), steps=1)


def _cross_entropy_of_two_halves() -> tuple[float, list[float]]:
    from fivefold.parallel.mesh import make_axes

    tp = make_axes(parse("tp2"), dist.get_rank(), Recorder(), kv_heads=2).tp
    logits = torch.tensor([[0.0, 1.0], [2.0, 3.0]][tp.index]).unsqueeze(0).requires_grad_()
    label = torch.tensor([3])
    loss = cross_entropy(logits * 1, label, 2 * tp.index, lambda x, op: join_vocabulary(x, op, tp))
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad[0].tolist()


def test_the_loss_over_a_split_vocabulary_sees_all_of_it() -> None:
    """14: logits [0, 1, 2, 3] on two ranks, label 3. Logits are never gathered here, so there is no
    other way to feed the loss."""
    (loss, left), (other_loss, right) = launch(_cross_entropy_of_two_halves, 2)
    assert loss == other_loss == pytest.approx(0.44019, abs=1e-5)
    assert left + right == pytest.approx([0.0321, 0.0871, 0.2369, -0.3561], abs=1e-4)


# Gradient norms


def _norm_of(trainer: Trainer, squares: dict[str, float]) -> float:
    """The gradient norm that a step takes when only these parameters have a gradient, whose squared
    norms are given."""
    gradients = trainer.gradients

    def made_up(step: int):
        sums, parameters = gradients(step)
        for x in parameters:
            x.grad.fill_(math.sqrt(squares.get(x.name, 0.0) / x.parameter.numel()))
        return sums, parameters

    trainer.gradients = made_up
    result = trainer.step(0, lr=0.0)
    return result.grad_norm * result.tokens


@pytest.mark.parametrize("layout", ["mb4", "tp2 mb4", "tp4 mb4", "tp2 sp dp2 zero2 mb4"])
def test_replicated_parameters_count_once_in_the_norm(layout: str) -> None:
    """5: squared norms of 16 in sharded parameters and 9 in replicated ones are a norm of 5.0,
    whatever tp; not 5.831 (tp2) or 7.211 (tp4)."""
    models = [
        (QK_NORM_D, "model.layers.1.self_attn.q_norm.weight"),
        (TINY_M, "model.layers.1.mlp.gate.weight"),
    ]

    def work() -> list[float]:
        norms = []
        for config, replicated in models:
            samples = random_samples(config.vocab_size)
            trainer = make_trainer(config, layout_for(layout, config, samples), samples)
            sharded = "model.layers.1.self_attn.q_proj.weight"
            norms.append(_norm_of(trainer, {sharded: 16.0, replicated: 9.0}))
        return norms

    for norms in launch(work, parse(layout).world_size):
        assert norms == pytest.approx([5.0, 5.0], rel=1e-6)


def test_the_norm_is_right_for_large_matrices() -> None:
    """PyTorch's fp32 norm of 3 million elements is off by 3e-4 on CPUs; in 8 parts by less, so that
    the norm would depend on the layout."""

    def work() -> tuple[float, float]:
        config = tiny("llama", num_hidden_layers=1, vocab_size=50257)
        samples = random_samples(config.vocab_size, global_batch=1)
        trainer = make_trainer(config, layout_for("dp1", config, samples), samples)
        _, parameters = trainer.gradients(0)
        squares = sum(float(x.grad.double().square().sum()) for x in parameters)
        result = trainer.step(0, lr=0.0)
        return result.grad_norm * result.tokens, math.sqrt(squares)

    ((taken, exact),) = launch(work, 1)
    assert taken == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("model", "layout"), [(QK_NORM_D, "tp2"), (TINY_M, "tp4 mb2")])
def test_the_norm_under_tensor_parallelism_is_that_of_one_process(model, layout: str) -> None:
    """5, with q/k norm and with a mixture. (MLA is not among the models.)"""
    assert_parity(model, layout, steps=1)


@pytest.mark.parametrize("layout", ["pp2 mb4", "pp2 dp2 zero1 mb4", "pp4 mb4"])
def test_a_tied_embedding_counts_once_in_the_norm_and_stays_the_same_on_both_stages(
    layout: str,
) -> None:
    """6: a squared norm of 800 in the tied matrix alone is 28.284, not 40.0; after 5 steps both
    copies are identical to the last bit, and those of one process."""

    def work() -> float:
        samples = random_samples(TIED_D.vocab_size)
        trainer = make_trainer(TIED_D, layout_for(layout, TIED_D, samples), samples)
        return _norm_of(trainer, {"model.embed_tokens.weight": 800.0})

    norms = launch(work, parse(layout).world_size)
    assert norms == pytest.approx([28.284271] * len(norms), rel=1e-6)
    assert_parity(TIED_D, layout, steps=5)


# Gradients


@pytest.mark.parametrize("layout", ["dp8", "dp8 ep2", "dp8 ep8", "dp4 tp2 ep4"])
def test_expert_gradients_do_not_grow_with_the_expert_parallel_degree(layout: str) -> None:
    """8: gradients of experts are divided by the same number as all others."""
    split = assert_parity(TINY_M, layout, steps=1)
    (reference,) = one_process(TINY_M, random_samples(128), 1)
    whole, _ = assemble([rank.gradients for rank in split])
    experts = [name for name in whole if ".experts." in name]
    assert len(experts) == 3 * TINY_M.num_layers
    for name in experts:
        norm = np.linalg.norm(whole[name])
        assert norm == pytest.approx(np.linalg.norm(reference.gradients[name].values), rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2 ep2", "dp4 ep4"])
def test_what_is_upstream_of_the_experts_gets_its_whole_gradient(layout: str) -> None:
    """9: router, embedding and first attention, whose gradients come back through the experts of
    all ranks."""
    split = assert_parity(TINY_M, layout, steps=1)
    whole, _ = assemble([rank.gradients for rank in split])
    (reference,) = one_process(TINY_M, random_samples(128), 1)
    names = ["model.embed_tokens.weight"]
    names += [f"model.layers.0.{n}.weight" for n in ("mlp.gate", "self_attn.q_proj")]
    for name in names:
        np.testing.assert_allclose(whole[name], reference.gradients[name].values, atol=1e-5)
        assert np.abs(whole[name]).max() > 0


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (2, "tp2 sp mb2"),
        pytest.param(8, "tp2 sp", marks=pytest.mark.slow),
        pytest.param(8, "tp4 sp", marks=pytest.mark.slow),
    ],
)
def test_norm_weights_do_not_drift_apart_under_megatron_sequence_parallelism(
    layers: int, layout: str
) -> None:
    """10: after 10 steps every replicated tensor, q and k norms too, is the same on all ranks."""
    assert_parity(tiny("qwen3", num_hidden_layers=layers), layout, steps=10)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_vocabulary_that_tp_does_not_divide(tp: int) -> None:
    """13, 127 tokens: the matrices have exactly the rows of the vocabulary, nothing is padded."""
    config = tiny("llama", num_hidden_layers=2, vocab_size=127)
    split = assert_parity(config, f"tp{tp} mb4")
    weights, _ = assemble([rank.weights for rank in split])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights[name].shape == (127, 64) and np.isfinite(weights[name]).all()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_large_vocabulary_that_tp_does_not_divide(tp: int) -> None:
    """13, 50,257 tokens and 20 steps."""
    assert_parity(tiny("llama", num_hidden_layers=2, vocab_size=50257), f"tp{tp} mb4", steps=20)


@pytest.fixture
def no_main_loss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transformer, "cross_entropy", lambda logits, *_: 0.0 * logits.sum())
    yield


def test_the_balance_loss_weighs_the_same_in_every_layout(no_main_loss: None) -> None:
    """22: coefficient 1e-2 and no main loss: router gradients are those of one process, and not
    zero. The statistics are taken over each sequence (fivefold.model.moe says so)."""
    config = tiny("qwen3_moe", router_aux_loss_coef=0.01, num_hidden_layers=2)
    samples = random_samples(128)
    texts = [
        "mb1 ga8",
        "mb2 ga4",
        "dp4 mb2",
        "tp2 mb2",
        "tp2 sp mb2",
        "ring2 mb2",
        "pp2 mb2",
        "dp4 ep4",
    ]
    runs = [run(config, layout_for(text, config, samples), samples, steps=1) for text in texts]
    routers = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]
    assert all(np.abs(runs[0][0].gradients[name].values).max() > 1e-6 for name in routers)
    for text, split in zip(texts[1:], runs[1:], strict=True):
        assert_within_limits(compare(runs[0], split), text)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ring2 mb2", "ulysses2 ring2 mb2"])
def test_training_on_with_context_parallelism_ends_at_the_same_loss(layout: str) -> None:
    """32: the same gradients (see 1), and after 200 steps the same loss on samples not seen before,
    within the difference of two seeds."""
    random = np.random.default_rng(1)
    step = random.integers(1, 4, 150_000)  # each token tells much about the next
    file = tokens_in_memory(np.cumsum(step) % 127 + 1, 128, "walk")
    config = tiny("llama", num_hidden_layers=2)

    def last_loss(text: str, seed: int) -> float:
        samples = Samples(file, 64, 8, seed)
        layout = layout_for(text, config, samples)
        results = run(config, layout, samples, steps=200)[0].results
        return float(np.mean([result.loss for result in results[-20:]]))

    one, other_seed = last_loss("mb2", 0), last_loss("mb2", 1)
    assert one < 3.0  # it has learnt: a random guess is 4.85
    assert abs(last_loss(layout, 0) - one) <= max(abs(other_seed - one), 1e-3)


# Sharded and uneven models


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dp2 zero2", "dp2 zero3", "dp4 dp_replicate2 zero2"])
def test_experts_that_some_micro_batches_do_not_use(layout: str, precision: str) -> None:
    """33: with 4 tokens a micro-batch most experts have none in one and some in another."""
    samples = random_samples(128, sequence_length=4)

    def work(text: str):
        loads = []
        trainer = make_trainer(TINY_M, layout_for(text, TINY_M, samples), samples, precision)
        layer = trainer.stages[0].model.layers["0"]
        assert isinstance(layer, Layer) and isinstance(layer.mlp, MoE)
        layer.mlp.experts.register_forward_pre_hook(lambda module, inputs: loads.append(inputs[1]))
        return record(trainer, 1), np.array(loads)

    (one, _), *_ = launch(work, 1, "mb2")
    split, loads = zip(*launch(work, parse(layout).world_size, layout), strict=True)
    for of_rank in loads:
        used = (of_rank > 0).sum(0)
        assert ((used > 0) & (used < len(of_rank))).any()
    comparison = compare([one], split)
    if precision == "fp32":
        assert_within_limits(comparison, layout)
    else:  # products are rounded to 8 bits
        assert comparison.grad_norm_rel_diff < 1e-2 and comparison.max_grad_rel_diff < 0.1
        assert not comparison.differing_replicas


@pytest.mark.parametrize(
    ("layers", "layout"),
    [(7, "pp2"), (10, "pp3"), (10, "pp2 vpp2 mb2"), (7, "pp4 layers=3,2,1,1")],
)
def test_every_layer_is_trained_once_where_stages_do_not_divide_them(
    layers: int, layout: str
) -> None:
    """44: layers that stages do not divide are shared out unevenly, and none is dropped."""
    config = tiny("llama", num_hidden_layers=layers)
    split = assert_parity(config, layout, steps=2)
    held = [name for rank in split for name in rank.weights if "input_layernorm" in name]
    assert sorted(held) == sorted(f"model.layers.{i}.input_layernorm.weight" for i in range(layers))


@pytest.mark.parametrize(
    "layout", ["dp1", "tp2", "tp4", "pp2", "dp4 ep4", "dp4 zero3", "tp2 sp etp2 dp2 ep2 zero2"]
)
@pytest.mark.parametrize("vocab_size", [128, 127])
def test_first_weights_have_the_same_bits_in_every_layout(layout: str, vocab_size: int) -> None:
    """29, with a vocabulary that tp divides or not; and 105: the parameters on all ranks, each
    counted once, are 264,832."""
    config = tiny("qwen3_moe", vocab_size=vocab_size)
    samples = random_samples(vocab_size)

    def work(text: str):
        return weight_pieces(make_trainer(config, layout_for(text, config, samples), samples))

    reference, _ = assemble(launch(work, 1, "dp1"))
    weights, differing = assemble(launch(work, parse(layout).world_size, layout))
    assert not differing and weights.keys() == reference.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(values, reference[name], name)
    expected = 264_832 - 2 * 64 * (128 - vocab_size)
    assert sum(values.size for values in weights.values()) == expected


@pytest.mark.parametrize("layout", ["dp2 zero3", "dp4 zero1"])
def test_a_tied_embedding_under_fsdp_is_one_parameter_of_the_optimizer(layout: str) -> None:
    """104: it is wrapped once, trained once and registered once."""
    samples = random_samples(TIED_D.vocab_size)

    def work() -> tuple[int, int]:
        trainer = make_trainer(TIED_D, layout_for(layout, TIED_D, samples), samples)
        for step in range(2):
            trainer.step(step, lr=1e-3)
        groups = trainer.optimizer.torch.param_groups
        entries = [id(p) for group in groups for p in group["params"]]
        return len(entries), len(set(entries))

    layer_weights = 9
    expected = 1 + 4 * layer_weights + 1  # embedding, layers, final norm
    world_size = parse(layout).world_size
    assert launch(work, world_size) == [(expected, expected)] * world_size
    assert_parity(TIED_D, layout, steps=2)


# Decisions that all ranks have to take together


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2 ep2", "dp2 zero3", "ring2"])
def test_a_gradient_that_is_infinite_on_one_rank_makes_all_skip_the_step(layout: str) -> None:
    """91 (and 30): whether a step counts follows from a number that all ranks share."""
    samples = random_samples(TINY_M.vocab_size)

    def work() -> tuple[list[StepResult], bool, bool]:
        trainer = make_trainer(TINY_M, layout_for(layout, TINY_M, samples), samples)
        before = weight_pieces(trainer)
        gradients = trainer.gradients

        def with_infinity(step: int):
            sums, parameters = gradients(step)
            if step == 0 and dist.get_rank() == 1:
                parameters[-1].grad.view(-1)[0] = math.inf
            return sums, parameters

        trainer.gradients = with_infinity
        skipped = trainer.step(0, lr=1e-3)
        unchanged = _same(before, weight_pieces(trainer)) and not trainer.optimizer.torch.state
        taken = trainer.step(1, lr=1e-3)
        return [skipped, taken], unchanged, _same(before, weight_pieces(trainer))

    for results, unchanged_by_the_skipped, unchanged_by_the_next in launch(work, 2):
        assert [result.skipped for result in results] == [True, False]
        assert unchanged_by_the_skipped and not unchanged_by_the_next


def _same(before, after) -> bool:
    return all(np.array_equal(piece.values, after[name].values) for name, piece in before.items())


def test_data_that_do_not_divide_over_the_ranks_leave_none_waiting() -> None:
    """90: ranks with 10, 10, 9 and 10 samples to read. The order of the samples goes on from one
    epoch to the next, so all ranks take the same steps and no sample is left out: step 10 of 4
    samples lies in both epochs."""
    config = tiny("llama", num_hidden_layers=2)
    ids = np.random.default_rng(0).integers(1, 128, 39 * 64 + 1)
    samples = Samples(tokens_in_memory(ids, 128, "39 samples"), 64, global_batch=4, seed=0)
    seen = np.concatenate([samples.ids(step) for step in range(10)])
    assert len(samples) == 39 and sorted(set(seen[:39])) == list(range(39))
    assert_parity(config, "dp4", samples, steps=11)
