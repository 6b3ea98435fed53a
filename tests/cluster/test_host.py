from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fivefold.cluster import host as machine


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has affinities")
def test_cores_are_those_that_this_process_may_use(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 4, 7})
    assert machine.cores() == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cores() == 4
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert machine.cores() == 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.cores() == 1  # half of one is still one


def test_the_limit_of_older_control_groups_counts_too(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cores() == 16
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("600000\n")
    assert machine.cores() == 6


def test_memory_is_no_more_than_the_control_group_may_have(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    whole = machine.memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes() == whole
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine.memory_bytes() == 1_000_000


def test_each_machine_has_a_file_of_its_own_in_the_cache(monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "node-1")
    first = machine.here_path()
    assert first.parent == Path("/somewhere/fivefold") and first.suffix == ".yaml"
    assert "node-1" not in str(first)
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "node-2")
    assert machine.here_path() != first
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert machine.here_path().parent == Path.home() / ".cache" / "fivefold"
