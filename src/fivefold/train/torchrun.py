"""A run whose processes torchrun started: how they find each other.

Any launcher that sets the same environment variables will do, on any number of nodes.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from fivefold.errors import UserError
from fivefold.train.failures import CUT_OFF, GRACE_S, describe, explain, status
from fivefold.train.launch import init_process_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def joined_by_torchrun() -> bool:
    """Whether torchrun, or anything that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def processes_of_torchrun() -> int:
    """How many processes were started, on all nodes."""
    return _number("WORLD_SIZE")


def check_world_size(layout_world_size: int) -> None:
    """UserError for a number of processes that the layout is not for."""
    started = processes_of_torchrun()
    if started != layout_world_size:
        raise UserError(
            f"the layout is for {layout_world_size} ranks, but {started} were started "
            f"(WORLD_SIZE={started}): start {layout_world_size} or choose a layout for {started}"
        )


def join(device: str, timeout_s: float = 300.0) -> None:
    """Make the default process group from torchrun's environment variables. Raises UserError if
    not all ranks have met at MASTER_ADDR:MASTER_PORT after `timeout_s` seconds, which is also how
    long a collective may take."""
    import torch

    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world_size:
        raise UserError(
            f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are numbered from 0 to "
            f"{world_size - 1}"
        )
    store = _meet(rank, world_size, timeout_s)
    local_rank = 0
    if device == "cuda":
        gpus = torch.cuda.device_count()
        local_rank = int(os.environ.get("LOCAL_RANK", rank % max(gpus, 1)))
        if local_rank >= gpus:
            raise UserError(
                f"rank {rank} is number {local_rank} of its machine (from 0), where {gpus} GPUs "
                f"are visible: start at most {gpus} processes there"
            )
    init_process_group(store, rank, world_size, device, local_rank, timeout_s)


def describe_here(rank: int, error: Exception) -> Exception:
    """An error of this process as `launch` would report one of its workers'."""
    failure = describe(rank, error)
    if failure.kind == CUT_OFF:
        # Another rank's failure, which is the one to read. Let torchrun end this process first.
        time.sleep(5 * GRACE_S)
    return explain(failure, status)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UserError(f"the environment variable {name} must be a whole number, not {text!r}")
    return int(text)


def _meet(rank: int, world_size: int, timeout_s: float) -> Store:
    """The store that the ranks share, once all have signed in."""
    from torch.distributed.distributed_c10d import PrefixStore

    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT must lie between 1 and 65535, not {port}")
    # torchrun's own process may hold the store; else rank 0 does, and if it has to give up it
    # does so last: the others can then still see who is missing.
    holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    give_up = time.monotonic() + timeout_s + (2 if holds_store else 0)
    try:
        if holds_store:
            store = _store("127.0.0.1", port, timeout_s, serve=True)
            _knock(host, port, give_up)  # is MASTER_ADDR this machine?
        else:
            _knock(host, port, give_up)
            store = _store(host, port, timeout_s, serve=False)
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"rank 0 cannot listen at {host}:{port}: another process has taken the port; "
                "set MASTER_PORT to a free one"
            ) from error
        raise UserError(
            f"rank {rank} found no rank 0 at {host}:{port} (MASTER_ADDR:MASTER_PORT) within "
            f"{timeout_s:g} s ({error}): check that the address is right and that rank 0 runs"
        ) from error

    # A restart by torchrun finds the old attempt's keys in the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"fivefold/attempt_{attempt}", store)
    keys = [f"rank_{other}" for other in range(world_size)]
    try:
        store.set(keys[rank], "here")
        store.wait(keys, timedelta(seconds=max(give_up - time.monotonic(), 1)))
    except RuntimeError as error:
        raise UserError(_who_is_missing(store, keys, f"{host}:{port}", timeout_s)) from error
    return store


def _store(host: str, port: int, timeout_s: float, serve: bool) -> Store:
    import torch.distributed as dist

    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # its error does not name the missing ranks
    )


def _knock(host: str, port: int, give_up: float) -> None:
    """Wait until something listens at the address. TCPStore would wait too, but twice as long as
    asked and with pages of warnings. Raises the last OSError at time `give_up`."""
    while True:
        try:
            patience_s = max(give_up - time.monotonic(), 0.1)
            return socket.create_connection((host, port), patience_s).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def _who_is_missing(store: Store, keys: list[str], address: str, timeout_s: float) -> str:
    try:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return f"rank 0 left {address} before all {len(keys)} ranks had joined; see its error"
    return (
        f"of {len(keys)} ranks (WORLD_SIZE) these did not join at {address} within "
        f"{timeout_s:g} s: {', '.join(missing)}; start them, or set WORLD_SIZE to the number of "
        "ranks that run"
    )
