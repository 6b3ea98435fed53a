from __future__ import annotations

import multiprocessing
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.train.launch import launch
from fivefold.train.torchrun import check_world_size, join, joined_by_torchrun
from tests.helpers import free_port


def launch_and_join(
    started: int, port: int, world_size: int, timeout_s: float
) -> list[tuple[int, float]]:
    """Launched workers that leave their process group and join as torchrun's environment says."""
    all_are_connected = multiprocessing.get_context("fork").Barrier(started)

    def leave_and_join() -> tuple[int, float]:
        rank = dist.get_rank()
        all_are_connected.wait()
        dist.destroy_process_group()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        assert joined_by_torchrun()
        join("cpu", timeout_s)
        sum_of_ranks = torch.tensor([float(rank)])
        dist.all_reduce(sum_of_ranks)
        return dist.get_rank(), sum_of_ranks.item()

    return launch(leave_and_join, started)


def test_ranks_join_through_the_environment() -> None:
    assert launch_and_join(3, free_port(), 3, timeout_s=30) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_missing_ranks_are_named() -> None:
    port = free_port()
    with pytest.raises(UserError) as caught:
        launch_and_join(2, port, 4, timeout_s=3)
    assert str(caught.value).startswith(
        f"of 4 ranks (WORLD_SIZE) these did not join at 127.0.0.1:{port} within 3 s: 2, 3;"
    )


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"^rank 0 cannot listen at 127.0.0.1:{port}: "):
            launch_and_join(1, port, 1, timeout_s=2)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_without_a_rank_0_is_named(host: str) -> None:
    port = free_port()

    def join_as_rank_1() -> None:
        os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR=host, MASTER_PORT=str(port))
        join("cpu", 1)

    start = time.monotonic()
    with pytest.raises(UserError, match=f"rank 1 found no rank 0 at {host}:{port} .* within 1 s"):
        launch(join_as_rank_1, 1)
    assert time.monotonic() - start < 10


def test_a_port_that_cannot_be_is_named() -> None:
    with pytest.raises(UserError, match="between 1 and 65535, not 99999"):
        launch_and_join(1, 99999, 1, timeout_s=2)


def test_a_world_size_that_is_not_the_layouts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_world_size(4)
    with pytest.raises(UserError, match="the layout is for 8 ranks, but 4 were started"):
        check_world_size(8)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(UserError, match="WORLD_SIZE must be a whole number, not 'many'"):
        check_world_size(8)


def test_without_torchruns_variables_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as some batch systems do
    assert not joined_by_torchrun()
