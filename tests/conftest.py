"""What all tests share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
from hypothesis import settings

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
