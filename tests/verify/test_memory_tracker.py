"""The tracker sees what is allocated, with values and without, and agrees with the measure."""

from __future__ import annotations

import pytest
import torch

from fivefold.layout.notation import parse
from fivefold.model.config import ModelConfig
from fivefold.verify.memory_tracker import MemoryTracker
from fivefold.verify.state_memory import measure
from fivefold.verify.trace import ShapeTrainer, fake_world, fsdp_without_values, track_step
from tests.parallel.dry import SEQUENCE_LENGTH, dry_trainer, tiny_dense, tiny_mixture


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_counts_once_and_as_long_as_a_tensor_has_it(device: str) -> None:
    with MemoryTracker(device) as tracker:
        a = torch.zeros(1000, device=device)
        view = a.view(10, 100)[2:]
        assert tracker.now == 4000
        b = a + 1
        del a
        assert tracker.now == 8000
        del view
        assert tracker.now == 4000
        b.add_(1)
        assert (tracker.now, tracker.peak) == (4000, 8000)
        tracker.name("weights", [b])
    kinds = {kind: size for kind, size in tracker.peak_by_kind().items() if size}
    assert kinds == {"weights": 4000, "temporary": 4000}


def test_what_autograd_saves_stays_until_the_backward_pass() -> None:
    x = torch.zeros(1000, requires_grad=True)
    with MemoryTracker("cpu") as tracker:
        y = (x.exp() * 2).sum()
        assert tracker.now == 4000 + 4  # exp keeps its result
        y.backward()
        del y
        assert tracker.now == 4000  # the gradient of x


def test_storages_that_are_resized_count_with_their_new_size() -> None:
    with MemoryTracker("meta") as tracker:
        a = torch.empty(1000, device="meta")
        a.untyped_storage().resize_(0)
        assert tracker.now == 0
        a.untyped_storage().resize_(4000)
        assert (tracker.now, tracker.peak) == (4000, 4000)


def peaks(config: ModelConfig, text: str, precision: str, length: int, real: bool):
    """Peak by kind of rank 0, with values on the CPU or with shapes alone."""
    layout = parse(text)
    with fake_world(0, layout.world_size), fsdp_without_values(not real):
        if real:
            trainer = dry_trainer(config, layout, 0, precision, length)
        else:
            trainer = ShapeTrainer(config, layout, length, precision, 0)
        tracker = MemoryTracker("cpu" if real else "meta")
        track_step(trainer, tracker)
        return tracker.peak_by_kind()


SAME = [
    ("dense", "ga2"),
    ("dense", "tp2 ga2"),
    ("dense", "tp2 sp pp2 ga4"),
    ("dense", "pp2 vpp2 ga4 recompute=full"),
    ("dense", "dp2 zero1 ga2"),
    ("dense", "dp2 zero2 ga2 tp2 sp"),
    ("dense", "dp2 zero3 ga2"),
]


@pytest.mark.parametrize(("model", "text"), SAME, ids=[t for _, t in SAME])
def test_values_make_no_difference(model: str, text: str) -> None:
    """In fp32 and without communication that gloo copies for, a CPU takes what a GPU takes; but its
    attention takes nothing inside, and a dry run's echo holds on to what it copies a while."""
    config = tiny_dense(num_key_value_heads=12)
    length = 16 * SEQUENCE_LENGTH
    real = peaks(config, text, "fp32", length, real=True)
    shapes = peaks(config, text, "fp32", length, real=False)
    for kind in ("weights", "gradients", "optimizer"):
        assert shapes[kind] == real[kind]
    assert sum(shapes.values()) == pytest.approx(sum(real.values()), rel=0.02)


@pytest.mark.parametrize("text", ["dp2 ga2", "tp2 sp dp2 zero1 ga2", "dp2 zero3 ga2"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_states_after_a_step_are_those_that_the_measure_finds(model: str, text: str) -> None:
    layout = parse(text)
    config = tiny_dense() if model == "dense" else tiny_mixture()
    with fake_world(0, layout.world_size):
        trainer = dry_trainer(config, layout, 0, "bf16")
        tracker = MemoryTracker("cpu")
        track_step(trainer, tracker)
        found, now = measure(trainer), tracker.now_by_kind()
    for kind in ("weights", "gradients", "optimizer"):
        assert now[kind] == getattr(found, kind)


# Field cases, on real small runs


def activations(config: ModelConfig, text: str, length: int = 256) -> dict[str, int]:
    return peaks(config, text, "fp32", length, real=True)


def test_case_58_activations_of_1f1b_do_not_grow_with_the_number_of_micro_batches() -> None:
    """But for their tokens, labels and places (8 bytes each), and one count each."""
    config, length = tiny_dense(), 256
    kept = [
        activations(config, f"pp2 ga{m}", length)["activations"] - m * (24 * length + 4)
        for m in (4, 8, 16)
    ]
    assert kept[0] == kept[1] == kept[2]
    two, four, eight = (
        activations(config, f"pp2 ga{m} schedule=gpipe")["activations"] for m in (2, 4, 8)
    )
    assert eight - four == pytest.approx(2 * (four - two), rel=0.01)


def test_case_59_scores_of_the_vocabulary_are_on_the_last_stage_alone() -> None:
    small, large = (tiny_dense(vocab_size=size) for size in (256, 4096))
    scores = 4 * 256 * (4096 - 256)
    for rank_of_stage, share in ((0, 0.0), (1, 1.0)):
        growth = 0
        for config, sign in ((small, -1), (large, 1)):
            layout = parse("pp2 ga4")
            with fake_world(rank_of_stage, 2):
                trainer = dry_trainer(config, layout, rank_of_stage, "fp32", 256)
                tracker = MemoryTracker("cpu")
                track_step(trainer, tracker)
                kinds = tracker.peak_by_kind()
                growth += sign * (kinds["activations"] + kinds["temporary"])
        assert growth == pytest.approx(share * scores, abs=0.05 * scores)


def test_case_62_full_recomputation_keeps_the_hidden_states_and_sp_divides_them() -> None:
    length, hidden = 512, 48
    few, many = (tiny_dense(num_hidden_layers=layers) for layers in (4, 8))
    for text, parts in (("recompute=full", 1), ("tp2 sp recompute=full", 2)):
        grown = [activations(c, text, length)["activations"] for c in (few, many)]
        assert (grown[1] - grown[0]) / 4 == 4 * length * hidden / parts


@pytest.mark.parametrize("zero", ["", "dp2 zero3 "])
def test_case_64_recomputation_saves_what_the_plan_says(zero: str) -> None:
    """Without and with FSDP2."""
    layers, length, hidden = 16, 1024, 48
    config = tiny_dense(num_hidden_layers=layers)
    none, selective, full = (
        activations(config, f"{zero}recompute={mode}", length)
        for mode in ("none", "selective", "full")
    )
    inputs = layers * 4 * length * hidden
    one_layer = none["activations"] / layers
    everything = full["activations"] + full["temporary"]
    assert inputs < full["activations"] < 1.1 * inputs
    assert everything < inputs + 3 * one_layer
    assert full["activations"] < selective["activations"] < none["activations"]
