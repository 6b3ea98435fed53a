from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.train.data.samples import Samples, data_hash
from fivefold.train.data.tokens import TokenFile, open_tokens

END = 0


def token_file(folder: Path, ids: list[int]) -> TokenFile:
    np.array(ids, np.uint16).tofile(folder / "tokens.bin")
    header = {
        "vocab_size": 1000,
        "eos_id": END,
        "tokens": len(ids),
        "documents": ids.count(END),
        "dtype": "uint16",
        "tokenizer_spec": "bytes",
        "key": "",
    }
    (folder / "tokens.json").write_text(json.dumps(header))
    return open_tokens(folder)


def numbered(folder: Path, samples: int, length: int = 4) -> TokenFile:
    """A stream that has just `samples` samples, without an end of a document."""
    return token_file(folder, list(range(1, samples * length + 2)))


def unread(samples: int) -> TokenFile:
    """A stream of `samples` samples of 4 tokens whose tokens are never read."""
    return TokenFile(Path(), 1000, END, samples * 4 + 1, 1, "uint16", "bytes", "")


# What is in a sample


def test_a_sample_is_a_window_and_its_labels_are_the_next_tokens(tmp_path: Path):
    samples = Samples(numbered(tmp_path, 3), 4, 1, seed=0)
    batch = samples.read(np.array([2, 0]))
    assert batch.tokens.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert batch.labels.tolist() == [[10, 11, 12, 13], [2, 3, 4, 5]]
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        assert type(array) is np.ndarray and array.dtype == np.int64 and array.shape == (2, 4)


def test_all_samples_together_predict_every_token_but_the_first_once(tmp_path: Path):
    stream = numbered(tmp_path, 5)
    samples = Samples(stream, 4, 1, seed=0)
    labels = samples.read(np.arange(len(samples))).labels
    assert labels.ravel().tolist() == stream.ids[1:].tolist()


def test_isolated_documents_are_told_apart(tmp_path: Path):
    ids = [5, END, 6, 7, 8, END, END, 9, 3]  # documents of 2, 4, 1 and more tokens
    samples = Samples(token_file(tmp_path, ids), 8, 1, seed=0, isolate_documents=True)
    batch = samples.read(np.array([0]))
    assert batch.tokens.tolist() == [[5, END, 6, 7, 8, END, END, 9]]
    assert batch.labels.tolist() == [[END, -100, 7, 8, END, -100, -100, 3]]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, 1, 2, 3]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 0]]


def test_positions_start_anew_where_a_sample_cuts_into_a_document(tmp_path: Path):
    samples = Samples(
        token_file(tmp_path, [1, 2, 3, END, 4, 5, END, 6, 7]), 2, 1, 0, isolate_documents=True
    )
    batch = samples.read(np.arange(4))
    assert batch.tokens.tolist() == [[1, 2], [3, END], [4, 5], [END, 6]]
    assert batch.documents.tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]
    assert batch.positions.tolist() == [[0, 1], [0, 1], [0, 1], [0, 0]]
    assert batch.labels.tolist() == [[2, 3], [END, -100], [5, END], [-100, 7]]


def test_documents_that_are_not_isolated_are_one_text(tmp_path: Path):
    samples = Samples(token_file(tmp_path, [5, END, 6, 7, END]), 4, 1, seed=0)
    batch = samples.read(np.array([0]))
    assert batch.labels.tolist() == [[END, 6, 7, END]]
    assert batch.documents.tolist() == [[0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]]


@given(st.lists(st.integers(0, 3), min_size=7, max_size=60))
def test_documents_and_positions_agree_with_a_walk_through_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int]
):
    stream = token_file(tmp_path_factory.mktemp("stream"), ids)
    samples = Samples(stream, 6, 1, seed=0, isolate_documents=True)
    batch = samples.read(np.arange(len(samples)))
    for row in range(len(samples)):
        document = position = 0
        for column in range(6):
            token = ids[row * 6 + column]
            label = -100 if token == END else ids[row * 6 + column + 1]
            assert batch.documents[row, column] == document
            assert batch.positions[row, column] == position
            assert batch.labels[row, column] == label
            document, position = (document + 1, 0) if token == END else (document, position + 1)


# Which samples, in which order


def numbers(samples: Samples, steps: range) -> list[int]:
    return [i for step in steps for i in samples.ids(step).tolist()]


def test_every_epoch_has_every_sample_once_and_its_own_order():
    # 10 samples, 4 a step: five steps are two epochs, and the tail of the first is not dropped.
    samples = Samples(unread(10), 4, 4, seed=1)
    seen = numbers(samples, range(15))
    epochs = [seen[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert all(one != next_one for one, next_one in pairwise(epochs))


def test_an_epoch_longer_than_the_cached_orders_comes_back_the_same():
    samples = Samples(unread(5), 4, 5, seed=1)
    first = samples.ids(0).tolist()
    numbers(samples, range(20))
    assert samples.ids(0).tolist() == first


def test_the_order_is_that_of_the_seed_on_every_machine():
    samples = Samples(unread(10), 4, 10, seed=7)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, 3]))).permutation(10)
    assert samples.ids(3).tolist() == order.tolist()
    assert samples.ids(3).tolist() != Samples(unread(10), 4, 10, seed=8).ids(3).tolist()


def test_changing_the_ids_of_a_step_does_not_change_the_order():
    samples = Samples(unread(10), 4, 10, seed=7)
    before = samples.ids(0).tolist()
    samples.ids(0)[:] = 0
    assert samples.ids(0).tolist() == before


@given(resumed_at=st.integers(0, 12), global_batch=st.integers(1, 7))
def test_a_resumed_run_sees_what_the_uninterrupted_one_would(resumed_at: int, global_batch: int):
    whole = numbers(Samples(unread(7), 4, global_batch, seed=3), range(13))
    before = numbers(Samples(unread(7), 4, global_batch, seed=3), range(resumed_at))
    after = numbers(Samples(unread(7), 4, global_batch, seed=3), range(resumed_at, 13))
    assert before + after == whole


@st.composite
def splits(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Two ways (dp, micro_batch, accumulation) to make up the same global batch."""
    factors = draw(st.lists(st.sampled_from([2, 3, 5]), max_size=5))

    def split() -> tuple[int, int, int]:
        parts = [1, 1, 1]
        for factor in factors:
            parts[draw(st.integers(0, 2))] *= factor
        return parts[0], parts[1], parts[2]

    return [split(), split()]


@given(splits=splits(), step=st.integers(0, 20), seed=st.integers(0, 3))
def test_every_split_of_the_batch_trains_on_the_same_samples(
    splits: list[tuple[int, int, int]], step: int, seed: int
):
    global_batch = int(np.prod(splits[0]))
    samples = Samples(unread(global_batch + 3), 4, global_batch, seed)
    for dp, micro_batch, accumulation in splits:
        ranks = [samples.ids_for(step, rank, dp, micro_batch, accumulation) for rank in range(dp)]
        assert {ids.shape for ids in ranks} == {(accumulation, micro_batch)}
        together = Counter(np.concatenate([ids.ravel() for ids in ranks]).tolist())
        assert together == Counter(samples.ids(step).tolist())


# Field cases: what other systems got wrong


def test_the_global_batch_stays_when_dp_changes():
    samples = Samples(unread(20), 4, 8, seed=0)
    want = sorted(samples.ids(1).tolist())
    for dp, accumulation in ((1, 4), (2, 2), (4, 1)):
        ranks = [samples.ids_for(1, rank, dp, 2, accumulation) for rank in range(dp)]
        assert sorted(np.concatenate(ranks, axis=None).tolist()) == want


def test_a_split_that_does_not_make_up_the_global_batch_is_an_error():
    with pytest.raises(ValueError, match="cannot reshape"):
        Samples(unread(50), 4, 37, seed=0).ids_for(0, 0, 4, 2, 4)


def test_no_rank_runs_out_of_batches_before_another():
    # 39 samples on 4 ranks: dealt out by rank, one of them would have 9 and the others 10.
    samples = Samples(unread(39), 4, 4, seed=0)
    for step in range(25):
        shapes = [samples.ids_for(step, rank, 4, 1, 1).shape for rank in range(4)]
        assert shapes == [(1, 1)] * 4
    assert Counter(numbers(samples, range(39))) == Counter(list(range(39)) * 4)


def test_a_set_smaller_than_the_data_parallel_ranks_is_refused():
    with pytest.raises(UserError, match=r"13 tokens, 3 samples of 4, fewer than .* 4: an epoch"):
        Samples(unread(3), 4, 4, seed=0)


def test_zero_steps_are_an_error_with_the_numbers():
    with pytest.raises(UserError, match=r"13 tokens, 3 samples .* of 8: .* batch of 3 works"):
        Samples(unread(3), 4, 8, seed=0)


def test_a_tail_is_neither_dropped_nor_doubled_over_three_epochs():
    samples = Samples(unread(10), 4, 4, seed=0)
    thirty = numbers(samples, range(8))[:30]
    assert Counter(thirty) == Counter(list(range(10)) * 3)
    tails = [set(thirty[i + 8 : i + 10]) for i in (0, 10, 20)]
    assert len(set(map(frozenset, tails))) > 1, "the same samples are last in every epoch"


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_fewer_tokens_than_a_sample_are_an_error_with_the_numbers(tokens: int):
    stream = TokenFile(Path(), 1000, END, tokens, 1, "uint16", "bytes", "")
    with pytest.raises(UserError, match=rf"{tokens} tokens, fewer than one sample of 4 \+ 1"):
        Samples(stream, 4, 1, seed=0)


def test_model_parallel_peers_hash_the_same_and_data_parallel_ranks_differently(tmp_path: Path):
    stream = numbered(tmp_path, 12)

    def rank_hashes(dp_rank: int) -> list[str]:
        # Each rank opens and reads for itself; tp, cp and pp peers have the same dp rank.
        samples = Samples(open_tokens(stream.path), 4, 8, seed=5)
        return [data_hash(samples.read(ids)) for ids in samples.ids_for(2, dp_rank, 2, 2, 2)]

    by_rank = [rank_hashes(dp_rank) for dp_rank in (0, 1, 0, 1)]  # tp2 x dp2
    assert by_rank[0] == by_rank[2] and by_rank[1] == by_rank[3]
    assert len(set(by_rank[0] + by_rank[1])) == 4


def test_the_hash_sees_every_part_of_a_batch(tmp_path: Path):
    samples = Samples(numbered(tmp_path, 3), 4, 1, seed=0)
    batch = samples.read(np.array([0, 1]))
    want = data_hash(batch)
    assert data_hash(samples.read(np.array([0, 1]))) == want
    assert data_hash(samples.read(np.array([1, 0]))) != want
    for field in dataclasses.fields(batch):
        other = getattr(batch, field.name).copy()
        other[1, 3] += 1
        assert data_hash(dataclasses.replace(batch, **{field.name: other})) != want
