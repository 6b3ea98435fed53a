"""What all tests share."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Tests and the workers that they start share few cores. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about the program.
settings.register_profile("fivefold", deadline=None)
settings.load_profile("fivefold")


@pytest.fixture(autouse=True)
def no_worker_outlives_its_test() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture(autouse=True)
def nobody_has_measured_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whether it was does not show in a test."""
    nowhere = tmp_path_factory.getbasetemp() / "not-measured.yaml"
    monkeypatch.setattr("fivefold.verify.plan_vs_run.here_path", lambda: nowhere)
