"""Checkpoints, by real processes: what is saved in one layout is loaded in another."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fivefold.errors import UserError
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.legality import check
from fivefold.layout.notation import Layout, parse, stated
from fivefold.model.config import ModelConfig
from fivefold.model.counts import count_parameters, parameter_shapes
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.comm import Recorder
from fivefold.train import checkpoint
from fivefold.train.checkpoint import saving
from fivefold.train.checkpoint.dcp import read_metadata
from fivefold.train.checkpoint.pieces import pieces as held_pieces
from fivefold.train.data import Samples, open_tokens
from fivefold.train.failures import WorkerFailure
from fivefold.train.launch import launch
from fivefold.train.runfile import Optimizer
from fivefold.train.trainer import StepResult, Trainer

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 127,  # no tp divides it
    "tie_word_embeddings": False,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "router_aux_loss_coef": 0.02,
}
TIED = DENSE | {"tie_word_embeddings": True}

LAYOUTS = ("dp1", "tp2", "pp2", "pp4", "dp4 ep4", "tp2 ep2", "dp4 zero3", "ring2")
LR = 1e-3

State = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token folder of random tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    ids = np.random.default_rng(0).integers(0, 127, 20_000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(ids.tobytes())
    header = {
        "vocab_size": 127,
        "eos_id": 0,
        "tokens": len(ids),
        "documents": 1,
        "dtype": "uint16",
        "tokenizer_spec": "bytes",
        "key": "random",
    }
    (folder / "tokens.json").write_text(json.dumps(header))
    return folder


def make_samples(tokens: Path, global_batch: int = 8, length: int = 16) -> Samples:
    return Samples(open_tokens(tokens), length, global_batch, seed=0)


def make_layout(text: str, config: ModelConfig, samples: Samples) -> Layout:
    layout = with_global_batch(parse(text), samples.global_batch, stated(text))
    check(layout, config, samples.sequence_length)
    return layout


def run_ranks(
    text: str,
    values: dict[str, Any],
    samples: Samples,
    work: Callable[[Trainer], Any],
) -> list[Any]:
    """The results of `work`, called with a trainer on each rank of a layout."""
    config = load_config(values)
    layout = make_layout(text, config, samples)

    def worker() -> Any:
        trainer = Trainer(
            config,
            layout,
            samples,
            Optimizer(lr=LR, eps=1e-6),
            "fp32",
            0,
            dist.get_rank(),
            Recorder(),
            torch.device("cpu"),
        )
        return work(trainer)

    return launch(worker, layout.world_size)


def steps(trainer: Trainer, first: int, last: int) -> list[StepResult]:
    return [trainer.step(step, LR) for step in range(first, last)]


def save(trainer: Trainer, step: int, folder: Path) -> None:
    checkpoint.save(trainer, step, step * 128, LR, folder)


def newest(folder: Path) -> checkpoint.Saved:
    return checkpoint.find(folder)[0][-1]


Pieces = dict[str, tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]


def pieces(trainer: Trainer) -> Pieces:
    """Whole shape, offset and values of all that this rank holds."""
    return {
        name: (piece.shape, piece.offset, piece.local.numpy().copy())
        for name, piece in held_pieces(trainer).items()
    }


def whole(ranks: list[Pieces]) -> State:
    """The tensors that the ranks hold together; their copies must be equal."""
    state: State = {}
    for held in ranks:
        for name, (shape, offset, values) in held.items():
            full = state.setdefault(name, np.full(shape, np.nan, np.float32))
            place = [slice(a, a + n) for a, n in zip(offset, values.shape, strict=True)]
            part = full[(*place, ...)]
            known = ~np.isnan(part)
            assert np.array_equal(part[known], values[known]), f"copies of {name} differ"
            part[...] = values
    for name, values in state.items():
        assert not np.isnan(values).any(), f"{name} is not whole"
    return state


def assert_same_bits(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def assert_parity(
    ours: State, reference: State, losses: list[float], expected: list[float]
) -> None:
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert ours.keys() == reference.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], reference[name], rtol=0, atol=1e-5, err_msg=name)


# --- in another layout -------------------------------------------------------------------------


def train_and_save(text: str, values: dict, samples: Samples, folder: Path, last: int) -> State:
    """Train `last` steps, save, and return what was saved."""

    def work(trainer: Trainer) -> Pieces:
        steps(trainer, 0, last)
        save(trainer, last, folder)
        return pieces(trainer)

    return whole(run_ranks(text, values, samples, work))


def unbroken(values: dict, samples: Samples, last: int) -> tuple[State, list[float]]:
    def work(trainer: Trainer) -> tuple[list[float], Pieces]:
        return [result.loss for result in steps(trainer, 0, last)], pieces(trainer)

    [(losses, held)] = run_ranks("dp1", values, samples, work)
    return whole([held]), losses


def check_targets(
    values: dict,
    samples: Samples,
    root: Path,
    sources: tuple[str, ...],
    targets: tuple[str, ...],
    first: int = 5,
    last: int = 10,
) -> None:
    """Save after step `first` in each source, resume in each target: what is loaded has the saved
    bits, and the steps after it are those of a single run that was never broken."""
    folders = {source: root / source.replace(" ", "-") for source in sources}
    saved = {
        source: train_and_save(source, values, samples, folder, first)
        for source, folder in folders.items()
    }
    reference, losses = unbroken(values, samples, last)

    def work(trainer: Trainer) -> list[tuple[Pieces, Pieces, list[float]]]:
        resumed = []
        for folder in folders.values():
            found = newest(folder)
            checkpoint.check_resumable(found, trainer.config, trainer.samples)
            checkpoint.load(trainer, found)
            before = pieces(trainer)
            results = steps(trainer, found.step, last)
            resumed.append((before, pieces(trainer), [result.loss for result in results]))
        return resumed

    for target in targets:
        ranks = run_ranks(target, values, samples, work)
        for i, source in enumerate(sources):
            assert_same_bits(whole([rank[i][0] for rank in ranks]), saved[source])
            after = whole([rank[i][1] for rank in ranks])
            assert_parity(after, reference, ranks[0][i][2], losses[first:])
            assert after["model.norm.weight.step"] == last


def test_a_mixture_resumes_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    sources, targets = ("tp2 ep2", "dp4 zero3"), ("dp2 ep2 pp2",)
    check_targets(MIXTURE, make_samples(tokens), tmp_path, sources, targets, 2, 4)


def test_tied_embeddings_resume_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    check_targets(TIED, make_samples(tokens), tmp_path, ("tp2",), ("pp2 dp2 zero1",), 2, 4)


def test_two_copies_of_a_tied_embedding_on_one_rank_resume_alike(
    tokens: Path, tmp_path: Path
) -> None:
    text = "pp2 vpp2 schedule=zb-v"
    check_targets(TIED, make_samples(tokens), tmp_path, ("dp1", text), (text,), 2, 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_layout_resumes_in_every_other(tokens: Path, tmp_path: Path) -> None:
    check_targets(MIXTURE, make_samples(tokens), tmp_path, LAYOUTS, LAYOUTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_layout_with_tied_embeddings_resumes_in_every_other(
    tokens: Path, tmp_path: Path
) -> None:
    values = MIXTURE | {"tie_word_embeddings": True}
    check_targets(values, make_samples(tokens), tmp_path, LAYOUTS, LAYOUTS, 2, 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_dense_layout_resumes_in_every_other(tokens: Path, tmp_path: Path) -> None:
    layouts = (
        "dp1",
        "tp2 sp",
        "tp4 dp2 zero2",
        "tp8",  # more ranks than kv heads
        "pp2 vpp2 tp2",
        "dp4 dp_replicate2 zero3",
        "ulysses2 ring2 zero3",
        "tp2 dp3 zero3",
    )
    samples = make_samples(tokens, global_batch=12)
    check_targets(DENSE, samples, tmp_path, layouts, layouts, 2, 4)


@pytest.mark.slow
def test_the_shared_expert_resumes_where_ranks_have_no_part_of_it(
    tokens: Path, tmp_path: Path
) -> None:
    values = MIXTURE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 32}
    del values["head_dim"]
    layouts = ("tp2", "dp4 zero3", "tp2 dp4 ep4 zero3")  # its gate has one row for 4 ranks
    check_targets(values, make_samples(tokens), tmp_path, layouts, layouts, 2, 4)


def test_the_same_layout_goes_on_with_the_same_bits(tokens: Path, tmp_path: Path) -> None:
    def work(trainer: Trainer) -> tuple[Any, ...]:
        results = steps(trainer, 0, 2)
        save(trainer, 2, tmp_path)
        results += steps(trainer, 2, 4)
        return results, pieces(trainer)

    def resume(trainer: Trainer) -> tuple[Any, ...]:
        checkpoint.load(trainer, newest(tmp_path))
        return steps(trainer, 2, 4), pieces(trainer)

    samples = make_samples(tokens)
    first = run_ranks("tp2 sp ep2", MIXTURE, samples, work)
    second = run_ranks("tp2 sp ep2", MIXTURE, samples, resume)
    assert first[0][0][2:] == second[0][0]
    assert_same_bits(whole([rank[1] for rank in first]), whole([rank[1] for rank in second]))


def load_and_save_again(
    text: str, values: dict, samples: Samples, folder: Path, again: Path
) -> State:
    def work(trainer: Trainer) -> Pieces:
        found = newest(folder)
        checkpoint.load(trainer, found)
        save(trainer, found.step, again)
        return pieces(trainer)

    return whole(run_ranks(text, values, samples, work))


@pytest.mark.parametrize(
    "sizes", [(8, 3, 1), pytest.param((8, 16, 3, 1, 8), marks=pytest.mark.slow)]
)
def test_zero_shards_load_into_any_number_of_ranks(
    sizes: tuple[int, ...], tokens: Path, tmp_path: Path
) -> None:
    samples = make_samples(tokens, global_batch=48 if 16 in sizes else 24, length=8)
    texts = [f"dp{n} zero3" if n > 1 else "dp1" for n in sizes]
    saved = train_and_save(texts[0], DENSE, samples, tmp_path / "0", last=1)
    for i, text in enumerate(texts[1:], start=1):
        loaded = load_and_save_again(text, DENSE, samples, tmp_path / str(i - 1), tmp_path / str(i))
        assert_same_bits(loaded, saved)


def test_optimizer_state_is_there_before_the_first_step(tokens: Path, tmp_path: Path) -> None:
    saved = train_and_save("dp1", DENSE, make_samples(tokens), tmp_path, last=1)
    moments = [name for name in saved if ".exp_avg" in name]
    assert len(moments) == 2 * len(parameter_shapes(load_config(DENSE)))
    for name in moments:
        assert saved[name].any(), name

    def work(trainer: Trainer) -> dict[str, np.ndarray]:
        checkpoint.load(trainer, newest(tmp_path))
        state = {}
        for stage in trainer.stages.values():
            for name, _ in stage.named_parameters():
                for key, value in trainer.optimizer.state(name).items():
                    state[f"{name}.{key}"] = value.numpy().copy()
        return state

    [state] = run_ranks("dp1", DENSE, make_samples(tokens), work)
    for name, values in state.items():
        assert np.array_equal(values, saved[name]), name


# --- what is in the folder ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["pp4", pytest.param("pp2 vpp2", marks=pytest.mark.slow)])
def test_all_pipeline_stages_are_in_the_checkpoint_once(
    text: str, tokens: Path, tmp_path: Path
) -> None:
    config = load_config(TIED)
    run_ranks(text, TIED, make_samples(tokens), lambda trainer: save(trainer, 1, tmp_path))
    metadata = read_metadata(newest(tmp_path).folder)
    tables: dict[str, Any] = metadata.state_dict_metadata
    found = {name: tuple(table.size) for name, table in tables.items()}
    shapes = parameter_shapes(config)
    assert {name: found[name] for name in shapes} == shapes
    assert len(found) == 4 * len(shapes)
    weights_and_moments = sum(
        int(np.prod(chunk.sizes)) * 4
        for name, table in tables.items()
        if not name.endswith(".step")
        for chunk in table.chunks
    )
    assert weights_and_moments == 12 * count_parameters(config).total
    files = sum(path.stat().st_size for path in newest(tmp_path).folder.iterdir())
    assert weights_and_moments < files < 1.5 * weights_and_moments


def test_ranks_that_disagree_on_a_weight_are_told(tokens: Path, tmp_path: Path) -> None:
    def work(trainer: Trainer) -> str:
        if dist.get_rank() == 1:
            trainer.stages[0].model.norm.weight.data[5] += 1
        with pytest.raises(RuntimeError) as told:
            save(trainer, 1, tmp_path)
        return str(told.value)

    answers = run_ranks("dp2", DENSE, make_samples(tokens), work)
    assert answers == ["no checkpoint was made: ranks 0 and 1 hold different model.norm.weight"] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_by_all_ranks_and_leaves_the_old_checkpoint(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def work(trainer: Trainer) -> str:
        save(trainer, 1, tmp_path)
        if dist.get_rank() == 1:
            monkeypatch.setattr(filesystem, "_write_files_from_queue", no_space)
        with pytest.raises(UserError) as told:
            save(trainer, 2, tmp_path)
        return str(told.value)

    answers = run_ranks("dp2 zero3", DENSE, make_samples(tokens), work)
    message = f"rank 1 cannot write the checkpoint to {tmp_path}: No space left on device"
    assert answers == [message] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_folder_that_nodes_do_not_share_is_told(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = saving._complete

    def without_the_other_nodes_file(aside: Path, saved: checkpoint.Saved) -> str | None:
        (aside / "__1_0.distcp").unlink()
        return complete(aside, saved)

    monkeypatch.setattr(saving, "_complete", without_the_other_nodes_file)
    with pytest.raises(UserError, match=r"1 files of the checkpoint, such as __1_0\.distcp, are"):
        run_ranks("dp2", DENSE, make_samples(tokens), lambda trainer: save(trainer, 1, tmp_path))
    assert list(tmp_path.iterdir()) == []


def make_checkpoints(folder: Path, numbers: list[int]) -> None:
    """Folders that look like checkpoints."""
    for step in numbers:
        path = folder / f"step-{step:06d}"
        path.mkdir(parents=True)
        facts = {
            "format": 1,
            "step": step,
            "tokens": 0,
            "layout": "dp1",
            "learning_rate": LR,
            "identity": {},
        }
        (path / "checkpoint.json").write_text(json.dumps(facts))


def test_only_complete_checkpoints_are_found_and_the_newest_are_kept(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, [5, 10, 999_999, 1_000_000])
    (tmp_path / ".step-000015.0123abcd").mkdir()
    (tmp_path / "step-000020").mkdir()  # without its facts
    (tmp_path / "notes").mkdir()
    complete, partial = checkpoint.find(tmp_path)
    assert [saved.step for saved in complete] == [5, 10, 999_999, 1_000_000]
    assert [path.name for path in partial] == [".step-000015.0123abcd", "step-000020"]
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-1000000",
        "step-999999",
    ]
    assert checkpoint.find(tmp_path / "nowhere") == ([], [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"step": 5}', "is damaged"),
        ('{"format": 1, "step": 5}', "is damaged"),
        ('{"format": 99}', "it has format 99, and this version reads format 1"),
    ],
)
def test_facts_that_cannot_be_read_are_told(tmp_path: Path, text: str, reason: str) -> None:
    make_checkpoints(tmp_path, [5])
    (tmp_path / "step-000005" / "checkpoint.json").write_text(text)
    with pytest.raises(UserError, match=reason) as told:
        checkpoint.find(tmp_path)
    assert "step-000005" in str(told.value)


# --- a run that differs, a checkpoint that is damaged ------------------------------------------


@pytest.fixture(scope="module")
def saved(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> checkpoint.Saved:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks("dp1", DENSE, make_samples(tokens), lambda trainer: save(trainer, 5, folder))
    return newest(folder)


def test_a_run_that_differs_is_refused_by_what_differs(
    saved: checkpoint.Saved, tokens: Path
) -> None:
    samples = make_samples(tokens)
    checkpoint.check_resumable(saved, load_config(DENSE), samples)
    other_file = replace(samples.token_file, key="other")
    for values, other, told in [
        (DENSE | {"hidden_size": 128}, samples, "model.hidden_size was 64 and is now 128"),
        (
            DENSE | {"tie_word_embeddings": True},
            samples,
            "tied_embeddings was false and is now true",
        ),
        (MIXTURE, samples, "model.moe was null"),
        (DENSE, replace(samples, seed=1), "seed was 0 and is now 1"),
        (DENSE, replace(samples, global_batch=16), "global_batch was 8 and is now 16"),
        (DENSE, replace(samples, sequence_length=64), "sequence_length was 16 and is now 64"),
        (
            DENSE,
            replace(samples, token_file=other_file),
            "the data files or the tokenizer",
        ),
    ]:
        with pytest.raises(UserError) as refused:
            checkpoint.check_resumable(saved, load_config(values), other)
        assert told in str(refused.value) and "\n" not in str(refused.value)


def damaged(saved: checkpoint.Saved, folder: Path, change: Callable[[Any], None]) -> Any:
    """A copy of a checkpoint whose table of pieces was changed."""
    folder.mkdir()
    for path in saved.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return replace(saved, folder=folder)


def assert_not_loaded(bad: checkpoint.Saved, tokens: Path, reason: str) -> None:
    def work(trainer: Trainer) -> None:
        checkpoint.load(trainer, bad)

    with pytest.raises(UserError, match=reason):
        run_ranks("dp2", DENSE, make_samples(tokens), work)


def test_a_checkpoint_without_moments_is_refused(
    saved: checkpoint.Saved, tokens: Path, tmp_path: Path
) -> None:
    def forget(metadata: Any) -> None:
        for name in list(metadata.state_dict_metadata):
            if ".exp_avg" in name:
                del metadata.state_dict_metadata[name]

    bad = damaged(saved, tmp_path / "step-000005", forget)
    lacking = 2 * len(parameter_shapes(load_config(DENSE)))
    with pytest.raises(UserError, match=f"lacks {lacking} tensors, such as .*exp_avg"):
        checkpoint.check_resumable(bad, load_config(DENSE), make_samples(tokens))
    assert_not_loaded(bad, tokens, "there is no .*exp_avg")


def test_a_tensor_that_lacks_a_part_is_refused(
    saved: checkpoint.Saved, tokens: Path, tmp_path: Path
) -> None:
    def forget_half(metadata: Any) -> None:
        [chunk] = metadata.state_dict_metadata["lm_head.weight"].chunks
        chunk.sizes = torch.Size([60, 64])

    bad = damaged(saved, tmp_path / "step-000005", forget_half)
    assert_not_loaded(bad, tokens, "a part of lm_head.weight is missing")


def test_a_checkpoint_that_was_cut_short_is_refused(
    saved: checkpoint.Saved, tokens: Path, tmp_path: Path
) -> None:
    bad = damaged(saved, tmp_path / "step-000005", lambda metadata: None)
    os.truncate(bad.folder / "__0_0.distcp", 100_000)
    assert_not_loaded(bad, tokens, "cannot read the checkpoint")
    for size in (0, 10, 1000):
        os.truncate(bad.folder / ".metadata", size)
        with pytest.raises(UserError, match="cannot be read"):
            checkpoint.check_resumable(bad, load_config(DENSE), make_samples(tokens))


class Trap:
    """What a hostile checkpoint holds: code that runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_no_code_of_a_checkpoint_is_run(
    saved: checkpoint.Saved, tokens: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"

    def set_trap(metadata: Any) -> None:
        metadata.planner_data = Trap(mark)

    bad = damaged(saved, tmp_path / "table", set_trap)
    with pytest.raises(UserError, match="which does not belong there"):
        checkpoint.check_resumable(bad, load_config(DENSE), make_samples(tokens))

    def trap_a_tensor(metadata: Any) -> None:
        name = "model.norm.weight"
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        [index] = [index for index in metadata.storage_data if index.fqn == name]
        info = metadata.storage_data.pop(index)
        bytes_index = type(index)(name)
        metadata.storage_data[bytes_index] = replace(info, offset=end, length=len(trap))

    trap = pickle.dumps(Trap(mark))
    end = (saved.folder / "__0_0.distcp").stat().st_size
    bad = damaged(saved, tmp_path / "tensor", trap_a_tensor)
    with (bad.folder / "__0_0.distcp").open("ab") as shard:
        shard.write(trap)
    assert_not_loaded(bad, tokens, "there is no model.norm.weight of shape")

    def point_outside(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, relative_path="../outside")

    bad = damaged(saved, tmp_path / "outside", point_outside)
    with pytest.raises(UserError, match=r"it points out of its folder, to \.\./outside"):
        checkpoint.check_resumable(bad, load_config(DENSE), make_samples(tokens))
    assert not mark.exists()


def test_a_disk_without_room_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(DENSE)
    size = 12 * count_parameters(config).total
    free = 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free}))
    folder = tmp_path / "out" / "checkpoints"
    free = 3 * size
    checkpoint.check_room(folder, config, keep=2, saves=10)
    free = 3 * size - 1
    checkpoint.check_room(folder, config, keep=2, saves=2)
    with pytest.raises(UserError, match=r"^3 checkpoints of .* set checkpoint.keep to 1$"):
        checkpoint.check_room(folder, config, keep=2, saves=10)
    make_checkpoints(folder, [5])
    checkpoint.check_room(folder, config, keep=2, saves=10)
    free = 0
    with pytest.raises(UserError, match=r"^2 checkpoints of .* make room"):
        checkpoint.check_room(folder, config, keep=2, saves=10)
    assert list((tmp_path / "out").iterdir()) == [folder]


# --- killed while saving -----------------------------------------------------------------------


def kill_while_saving(tokens: Path, folder: Path, arm: Callable[[int, float], None]) -> None:
    """Save after steps 1 and 2, keeping one. Before the second save `arm` is called, with the rank
    and the seconds that the first save took, to have a rank killed."""

    def work(trainer: Trainer) -> None:
        steps(trainer, 0, 1)
        began = time.monotonic()
        save(trainer, 1, folder)
        took_s = time.monotonic() - began
        steps(trainer, 1, 2)
        arm(dist.get_rank(), took_s)
        save(trainer, 2, folder)
        if dist.get_rank() == 0:
            checkpoint.prune(folder, keep=1)
        time.sleep(5)  # the kill is sure to come

    with pytest.raises(WorkerFailure, match="killed by signal 9"):
        run_ranks("dp2 zero1", DENSE, make_samples(tokens), work)


def assert_resumes(tokens: Path, folder: Path, states: dict[int, State]) -> int:
    complete, _ = checkpoint.find(folder)
    found = complete[-1]

    def work(trainer: Trainer) -> Pieces:
        checkpoint.check_resumable(found, trainer.config, trainer.samples)
        checkpoint.load(trainer, found)
        return pieces(trainer)

    assert_same_bits(whole(run_ranks("dp1", DENSE, make_samples(tokens), work)), states[found.step])
    return found.step


@pytest.fixture(scope="module")
def states(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, State]:
    """The true states after steps 1 and 2."""

    def work(trainer: Trainer) -> list[Pieces]:
        held = []
        for step in (0, 1):
            steps(trainer, step, step + 1)
            held.append(pieces(trainer))
        return held

    ranks = run_ranks("dp2 zero1", DENSE, make_samples(tokens), work)
    return {i + 1: whole([rank[i] for rank in ranks]) for i in (0, 1)}


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "rank", "survivor"),
    [
        ("_write_files_from_queue", 1, 1),
        ("_complete", 0, 1),
        ("rename", 0, 1),
        ("prune", 0, 2),
        ("rmtree", 0, 2),
    ],
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(
    moment: str,
    rank: int,
    survivor: int,
    tokens: Path,
    tmp_path: Path,
    states: dict[int, State],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: dict[str, Any] = {
        "_write_files_from_queue": filesystem,
        "_complete": saving,
        "rename": os,
        "rmtree": shutil,
    }

    def arm(own_rank: int, took_s: float) -> None:
        if own_rank == rank:
            monkeypatch.setattr(places.get(moment, checkpoint), moment, die)

    kill_while_saving(tokens, tmp_path, arm)
    assert assert_resumes(tokens, tmp_path, states) == survivor
    partial = checkpoint.find(tmp_path)[1]
    # The first rank, when it survives, clears up.
    assert len(partial) == (0 if rank == 1 or moment == "prune" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [False, True])
def test_kills_at_random_moments_of_a_save_leave_a_complete_checkpoint(
    everyone: bool, tokens: Path, tmp_path: Path, states: dict[int, State]
) -> None:
    survivors = []
    for i, part in enumerate(np.random.default_rng(0).uniform(0, 1.5, 10).tolist()):

        def arm(rank: int, took_s: float, part: float = part) -> None:
            if everyone or rank == 1:
                kill_later(part * took_s)

        folder = tmp_path / str(i)
        kill_while_saving(tokens, folder, arm)
        survivors.append(assert_resumes(tokens, folder, states))
    print(survivors)
    assert set(survivors) <= {1, 2} and 1 in survivors


def kill_later(after_s: float) -> None:
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(after_s)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)
