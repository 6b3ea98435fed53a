from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.train import launch as launch_module
from fivefold.train.failures import WorkerFailure, status
from fivefold.train.launch import launch

CALL = "all_reduce of 4,096 bytes over tp"


def sum_of_ranks(factor: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() * factor)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


# --- work that is done -------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_results_come_back_in_the_order_of_ranks(world_size: int) -> None:
    start = time.monotonic()
    results = launch(sum_of_ranks, world_size, 10)
    print(f"{world_size} workers: {time.monotonic() - start:.2f} s")
    total = 10 * world_size * (world_size - 1) / 2
    assert results == [(rank, total) for rank in range(world_size)]


def test_results_may_be_large_and_hold_tensors() -> None:
    results = launch(lambda: torch.full((500_000,), float(dist.get_rank())), 2)
    assert [(len(result), result.sum().item()) for result in results] == [
        (500_000, 0.0),
        (500_000, 500_000.0),
    ]


def test_two_launches_at_the_same_time_do_not_meet() -> None:
    results: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda f=factor: results.update({f: launch(sum_of_ranks, 3, f)}))
        for factor in (1, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {factor: [(rank, 3.0 * factor) for rank in range(3)] for factor in (1, 100)}


def test_a_parent_that_has_computed_with_threads_can_still_launch() -> None:
    torch.set_num_threads(2)
    parent = torch.ones(600, 600) @ torch.ones(600, 600)
    products = launch(lambda: (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item(), 2)
    assert products == [parent.sum().item()] * 2


def test_a_worker_computes_with_one_thread() -> None:
    torch.set_num_threads(2)
    assert launch(torch.get_num_threads, 1) == [1]


def test_a_worker_does_not_eat_what_is_typed() -> None:
    terminal, keyboard = os.pipe()
    os.write(keyboard, b"typed")
    stdin = os.dup(0)
    os.dup2(terminal, 0)
    try:
        assert launch(lambda: (os.read(0, 5), sys.stdin.read()), 1) == [(b"", "")]
        assert os.read(0, 5) == b"typed"
    finally:
        os.dup2(stdin, 0)
        for descriptor in (stdin, terminal, keyboard):
            os.close(descriptor)


def test_the_private_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert launch(lambda: len(list(tmp_path.iterdir())), 2) == [1, 1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_workers_can_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(launch_module, "_context", lambda device: spawn)
    assert launch(dist.get_rank, 2) == [0, 1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workers_on_gpus_have_a_process_group() -> None:
    assert launch(dist.get_backend, 1, device="cuda") == ["nccl"]


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"^1000 ranks need one GPU each, but \d+ are visible: use"):
        launch(sum_of_ranks, 1000, 1, device="cuda")


def test_a_run_without_workers_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1 worker, not 0"):
        launch(sum_of_ranks, 0, 1)


# --- failures ----------------------------------------------------------------------------------


def fail_on_rank_2(fail: Callable[[], object]) -> None:
    """All meet in an all_reduce; then rank 2 fails while the others wait for it in another."""
    rank = dist.get_rank()
    buffer = torch.ones(1024)
    status.coordinates = f"pp{rank // 2} tp{rank % 2}"
    status.step = 12
    status.doing = CALL
    dist.all_reduce(buffer)
    if rank == 2:
        fail()
    dist.all_reduce(buffer)


def failure_on_rank_2(fail: Callable[[], object], timeout_s: float = 60) -> WorkerFailure:
    start = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        launch(fail_on_rank_2, 4, fail, timeout_s=timeout_s)
    assert time.monotonic() - start < 10
    return caught.value


def raise_error(error: BaseException) -> None:
    raise error


def test_a_raising_worker_is_named_with_its_place_and_error() -> None:
    failure = failure_on_rank_2(lambda: raise_error(ValueError("loss is nan")))
    assert str(failure) == (
        f"rank 2 (pp1 tp0) failed in step 12 during {CALL}: ValueError: loss is nan"
    )
    assert failure.rank == 2
    assert "in raise_error" in failure.traceback


def test_a_killed_worker_is_named_though_it_could_not_report() -> None:
    failure = failure_on_rank_2(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert str(failure) == (
        f"rank 2 (pp1 tp0) was killed by signal 9 (Killed) in step 12 during {CALL}"
    )
    assert failure.traceback == ""


def test_a_worker_that_leaves_is_named_with_its_exit_code() -> None:
    failure = failure_on_rank_2(lambda: os._exit(3))
    assert str(failure).startswith("rank 2 (pp1 tp0) exited without a report (exit code 3) in")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop"), BaseException("b")])
def test_an_error_outside_exception_is_reported_too(error: BaseException) -> None:
    failure = failure_on_rank_2(lambda: raise_error(error))
    assert str(failure).endswith(f"{CALL}: {type(error).__name__}: {error}")


def test_an_error_that_another_rank_caused_does_not_hide_its_cause() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:12345")
        time.sleep(0.3)
        if dist.get_rank() == 1:
            raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")
        if dist.get_rank() == 2:
            raise ValueError("the cause")
        time.sleep(60)

    with pytest.raises(WorkerFailure, match=r"^rank 2 failed: ValueError: the cause$"):
        launch(fail, 4)


def test_a_result_that_cannot_be_sent_is_an_error_of_its_worker() -> None:
    with pytest.raises(WorkerFailure, match=r"^rank 0 failed: .*[Pp]ickle"):
        launch(lambda: threading.Lock(), 1)


def test_a_user_error_comes_out_with_its_own_sentence() -> None:
    with pytest.raises(UserError) as caught:
        launch(fail_on_rank_2, 4, lambda: raise_error(UserError("7 heads over tp 2: use 8")))
    assert str(caught.value) == "7 heads over tp 2: use 8"


def test_output_that_nobody_reads_is_no_failure_of_a_worker() -> None:
    """As in `fivefold train run.yaml | head`."""
    with pytest.raises(BrokenPipeError):
        launch(fail_on_rank_2, 4, lambda: raise_error(BrokenPipeError(32, "Broken pipe")))


def test_a_hang_shows_where_each_rank_stands_and_the_odd_one_first() -> None:
    def stall() -> None:
        status.step = 11
        status.doing = "forward"
        time.sleep(60)

    failure = failure_on_rank_2(stall, timeout_s=2)
    sentence, *standings = str(failure).splitlines()
    assert "in step 12 during all_reduce" in sentence
    assert "Timed out" in sentence
    assert standings == [
        "rank 2 (pp1 tp0) in step 11: forward",
        f"rank 0 (pp0 tp0), rank 1 (pp0 tp1), rank 3 (pp1 tp1) in step 12: {CALL}",
    ]


def test_a_hang_shows_the_rank_that_finished_early() -> None:
    def leave_early() -> None:
        if dist.get_rank() != 2:
            dist.barrier()

    with pytest.raises(WorkerFailure, match=r"\nrank 2: finished\nrank 0, rank 1: computing$"):
        launch(leave_early, 3, timeout_s=1)


def test_text_too_long_for_the_status_is_cut() -> None:
    def write() -> tuple[str, str, int | None]:
        status.doing = "é" * 300
        status.coordinates = "c" * 300
        status.step = 3
        status.step = None
        return status.doing, status.coordinates, status.step

    assert launch(write, 1) == [("é" * 128, "c" * 96, None)]


# --- ends --------------------------------------------------------------------------------------


def launch_and_sleep(pids: Path, errors: Path) -> None:
    """A parent of its own, as the command line is one: 2 workers that note their process ids."""
    os.setpgid(0, 0)
    # A shell's background job, as these tests may be, ignores the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = str(errors.parent)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)

    def work() -> None:
        (pids / str(os.getpid())).touch()
        time.sleep(60)

    try:
        launch(work, 2)
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def sleeping_run(tmp_path: Path) -> Iterator[tuple[Any, list[int]]]:
    pids = tmp_path / "pids"
    pids.mkdir()
    run = multiprocessing.get_context("fork").Process(
        target=launch_and_sleep, args=(pids, tmp_path / "errors")
    )
    run.start()
    wait_until(lambda: len(list(pids.iterdir())) == 2)
    try:
        yield run, [int(path.name) for path in pids.iterdir()]
    finally:
        run.kill()
        run.join()


def wait_until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs: an orphan that waits to be reaped (state Z) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_leaves_ctrl_c_to_its_parent() -> None:
    def interrupt_oneself() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "at work"

    assert launch(interrupt_oneself, 1) == ["at work"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_ends_all_workers_without_a_word(tmp_path: Path) -> None:
    with sleeping_run(tmp_path) as (run, workers):
        os.killpg(run.pid, signal.SIGINT)
        run.join(timeout=10)
        assert run.exitcode == 130
        assert not any(is_alive(pid) for pid in workers)
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of the death")
def test_no_worker_survives_a_killed_parent(tmp_path: Path) -> None:
    with sleeping_run(tmp_path) as (run, workers):
        assert all(is_alive(pid) for pid in workers)
        run.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in workers))
