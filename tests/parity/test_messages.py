"""Field cases of messages: empty ones, schedules under random delays, and who reads what."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.layout.actions import Action
from fivefold.layout.notation import Layout, parse
from fivefold.parallel import comm
from fivefold.parallel.comm import Recorder
from fivefold.parallel.expert.run import AllToAllDispatcher
from fivefold.parallel.mesh import make_axes
from fivefold.train.data.samples import IGNORED, Batch, Samples, data_hash
from fivefold.train.failures import WorkerFailure
from fivefold.train.launch import launch
from fivefold.verify.parity import RankRecord, compare, record
from tests.parity.harness import (
    TINY_D,
    assert_within_limits,
    layout_for,
    make_trainer,
    one_process,
    random_samples,
    run,
)

# Empty messages


@pytest.mark.parametrize(
    "counts",
    [
        [[0, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]],
        [[0, 0, 0, 0]] * 4,
        [[1, 0, 2, 0], [0, 0, 0, 0], [3, 1, 0, 1], [0, 7, 0, 0]],
    ],
)
def test_tokens_reach_experts_and_come_back_when_most_ranks_send_nothing(counts) -> None:
    """93: an all-to-all with these splits, and the gradient through it."""

    def work():
        rank = dist.get_rank()
        axes = make_axes(Layout(dp=4, ep=4), rank, Recorder(), kv_heads=4)
        dispatcher = AllToAllDispatcher(axes)
        rows = torch.arange(sum(counts[rank]) * 2.0).view(-1, 2) + 100 * rank
        rows.requires_grad_()
        travelling = dispatcher.dispatch(rows, torch.tensor(counts[rank]))
        arrived, local_counts, trip = dispatcher.finish_dispatch(travelling)
        factor = rank + 1.0
        back = dispatcher.combine(arrived * factor, trip)
        back.sum().backward()
        assert rows.grad is not None
        return arrived.detach(), local_counts, rows.detach(), back.detach(), rows.grad

    results = launch(work, 4)
    sent = [result[2].split(count) for result, count in zip(results, counts, strict=True)]
    for rank, (arrived, local_counts, rows, back, grad) in enumerate(results):
        assert local_counts == [sum(count[rank] for count in counts)]
        assert torch.equal(arrived, torch.cat([parts[rank] for parts in sent]))
        expert = torch.arange(4.0).repeat_interleave(torch.tensor(counts[rank])).unsqueeze(1)
        assert torch.equal(back, rows * (expert + 1))
        assert torch.equal(grad, (expert + 1).expand_as(rows))


@pytest.mark.parametrize("counts", [[0, 0, 3, 0], [0, 0, 0, 0], [2, 1, 0, 4]])
def test_rows_are_gathered_and_summed_when_ranks_have_none(counts: list[int]) -> None:
    """93: an all-gather with zero rows, and its reverse."""

    def work():
        rank = dist.get_rank()
        axis = make_axes(Layout(tp=4), rank, Recorder(), kv_heads=4).tp
        gathered = comm.all_gather_rows(torch.full((counts[rank], 2), float(rank)), axis, counts)
        return gathered, comm.reduce_scatter_rows(gathered * (rank + 1), axis, counts)

    whole = torch.arange(4.0).repeat_interleave(torch.tensor(counts)).unsqueeze(1).expand(-1, 2)
    for rank, (gathered, summed) in enumerate(launch(work, 4)):
        assert torch.equal(gathered, whole)
        assert torch.equal(summed, torch.full((counts[rank], 2), rank * 10.0))


def test_a_group_of_one_sends_nothing() -> None:
    """93."""

    def work():
        recorder = Recorder()
        axis = make_axes(Layout(), 0, recorder, kv_heads=4).tp
        x = torch.arange(6.0).view(3, 2)
        results = [
            comm.all_reduce(x.clone(), axis),
            comm.all_gather(x, axis),
            comm.reduce_scatter(x, axis),
            comm.all_to_all(x, axis),
            comm.all_to_all_rows(x, axis, [3], [3], 3),
            comm.all_gather_rows(x, axis, [3]),
            comm.reduce_scatter_rows(x, axis, [3]),
        ]
        return all(torch.equal(x, result) for result in results), list(recorder.ledger)

    assert launch(work, 1) == [(True, [])]


# Schedules

MICRO_BATCHES = (1, 2, 3, 4, 5, 8)
SLEEP_S = 0.05


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ("pp4 schedule=gpipe", ()),
        ("pp4 schedule=1f1b", ()),
        ("pp4 vpp2", (1, 2, 3, 5)),
        ("pp4 vpp2 schedule=zb-v", ()),
        pytest.param("pp4 schedule=zb-h1", (), marks=pytest.mark.slow),
        pytest.param("pp4 vpp2 schedule=bfs", (), marks=pytest.mark.slow),
        pytest.param("pp4 vpp2 schedule=dualpipe-v", (1, 2, 3, 4, 5), marks=pytest.mark.slow),
        pytest.param("pp2 vpp2 schedule=dualpipe-v", (1, 2, 3), marks=pytest.mark.slow),
        pytest.param("pp2 vpp4 schedule=bfs", (), marks=pytest.mark.slow),
    ],
)
def test_a_schedule_finishes_right_whenever_its_ranks_come(
    schedule: str, refused: tuple[int, ...]
) -> None:
    """95: 4 stages and 1, 2, 3, 4, 5, 8 micro-batches, with a sleep of 0 to 50 ms on each rank
    before each action; or refused before anything starts."""
    for micro_batches in refused:
        with pytest.raises(UserError, match=r"the nearest that work|micro-batches or more, not"):
            layout_for(schedule, TINY_D, random_samples(128, micro_batches))
    allowed = [m for m in MICRO_BATCHES if m not in refused]

    def work() -> list[RankRecord]:
        sleeps = random.Random(dist.get_rank())
        records = []
        for micro_batches in allowed:
            samples = random_samples(128, micro_batches)
            trainer = make_trainer(TINY_D, layout_for(schedule, TINY_D, samples), samples)
            trainer.pipeline.before = lambda action: time.sleep(sleeps.uniform(0, SLEEP_S))
            records.append(record(trainer, 1))
        return records

    by_rank = launch(work, parse(schedule).pp)
    for micro_batches, split in zip(allowed, zip(*by_rank, strict=True), strict=True):
        one = one_process(TINY_D, random_samples(128, micro_batches), 1)
        assert_within_limits(compare(one, split), f"{schedule}, {micro_batches} micro-batches")


class RaggedSamples(Samples):
    """Sequences of 32, 64 and 16 tokens in turn, filled up to 64."""

    filler = 1

    def read(self, ids: np.ndarray) -> Batch:
        batch = super().read(ids)
        for row, index in enumerate(ids):
            end = (32, 64, 16)[index % 3]
            batch.tokens[row, end:], batch.labels[row, end:] = self.filler, IGNORED
        return batch


class OtherwiseFilled(RaggedSamples):
    filler = 2


@pytest.mark.parametrize(
    "schedule",
    ["pp2", "pp2 schedule=zb-h1", "pp2 vpp2 schedule=zb-v", "pp2 vpp2 schedule=dualpipe-v"],
)
def test_micro_batches_of_sequences_of_several_lengths_are_filled_up(schedule: str) -> None:
    """96: each micro-batch is one sequence, of 32, 64 or 16 tokens; with what it is filled up does
    not matter."""
    samples = random_samples(128, kind=RaggedSamples)
    split = run(TINY_D, layout_for(schedule, TINY_D, samples), samples, steps=2)
    one = one_process(TINY_D, random_samples(128, kind=OtherwiseFilled), steps=2)
    assert_within_limits(compare(one, split), schedule)


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("pp2 schedule=zb-h1", [2, 2]),
        ("pp2 vpp2 schedule=zb-v", [4, 4]),
        ("pp2 vpp2 schedule=dualpipe-v", [5, 5]),
    ],
)
def test_more_micro_batches_hold_no_more(schedule: str, held: list[int]) -> None:
    """58: what a rank keeps at once of micro-batches, by looking at what the program keeps."""

    def work() -> list[int]:
        peaks = []
        for micro_batches in (4, 8):
            samples = random_samples(128, micro_batches)
            trainer = make_trainer(TINY_D, layout_for(schedule, TINY_D, samples), samples)
            pipeline, kept = trainer.pipeline, [0]

            def look(action: Action, pipeline=pipeline, kept=kept) -> None:
                now = pipeline._now
                begins = action.kind == "F"
                kept.append(len(now.in_flight) + len(now.deferred_weight_grads) + begins)

            pipeline.before = look
            trainer.gradients(0)
            peaks.append(max(kept))
            assert not (pipeline._now.in_flight or pipeline._now.deferred_weight_grads)
            assert not (pipeline._now.arriving or pipeline._now.handed_over)
        return peaks

    assert launch(work, 2) == [[peak, peak] for peak in held]


# Data

READ: list[tuple[list[int], str]] = []


class WatchedSamples(Samples):
    """Writes down what is read."""

    def read(self, ids: np.ndarray) -> Batch:
        batch = super().read(ids)
        READ.append((ids.tolist(), data_hash(batch)))
        return batch


@pytest.mark.parametrize("layout", ["tp2 dp2", "ring2 dp2", "ulysses2 dp2", "pp2 dp2"])
def test_ranks_of_one_model_replica_read_the_same_samples_and_others_read_others(
    layout: str,
) -> None:
    """99: the same hash inside a model-parallel group, other samples across DP, and all of them
    together the global batch."""
    samples = random_samples(128, kind=WatchedSamples)

    def work():
        trainer = make_trainer(TINY_D, layout_for(layout, TINY_D, samples), samples)
        trainer.gradients(0)
        return trainer.axes.coordinates["dp"], READ

    by_replica: dict[int, list] = {}
    for replica, read in launch(work, 4):
        by_replica.setdefault(replica, []).append(read)
    assert all(first == second for first, second in by_replica.values())
    ids = [[i for batch, _ in reads[0] for i in batch] for reads in by_replica.values()]
    assert len(ids) == 2 and sorted(ids[0] + ids[1]) == sorted(samples.ids(0).tolist())


# A rank that does not answer


def wait_for_a_sleeper() -> None:
    axes = make_axes(Layout(dp=2), dist.get_rank(), Recorder(), kv_heads=1)
    if dist.get_rank() == 1:
        time.sleep(30)
    comm.all_reduce(torch.ones(4), axes.dp)


def test_the_time_limit_of_a_run_holds_in_every_group() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerFailure):
        launch(wait_for_a_sleeper, 2, timeout_s=3)
    assert time.monotonic() - began < 20


# Sums of all sizes


def sum_of_many() -> list[bytes]:
    axis = make_axes(Layout(dp=3), dist.get_rank(), Recorder(), kv_heads=1).dp
    generator = torch.Generator().manual_seed(dist.get_rank())
    sums = []
    for size in (1, 1000, comm.LARGE // 4, comm.LARGE + 1):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(size, generator=generator).to(dtype)
            every = [torch.empty_like(x) for _ in range(3)]
            dist.all_gather(every, x)
            total = comm.all_reduce(x, axis)
            expected = torch.stack(every).double().sum(0)
            limit = 1e-6 if dtype == torch.float32 else 1e-2
            assert (total.double() - expected).abs().max() <= limit * expected.abs().max()
            sums.append(total.view(torch.uint8).numpy().tobytes())
    return sums


def test_all_ranks_get_the_same_bits_of_a_sum_of_any_size() -> None:
    first, *others = launch(sum_of_many, 3)
    assert all(other == first for other in others)
