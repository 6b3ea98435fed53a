from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.train import metrics
from fivefold.train.launch import launch
from fivefold.train.metrics import (
    MetricsFile,
    Reporter,
    StepMetrics,
    begin_peak_memory,
    check_tensorboard,
    peak_flops_per_s,
    peak_memory_bytes,
)
from fivefold.train.runfile import Run


def step_metrics(step: int, **changes: Any) -> StepMetrics:
    made = StepMetrics(
        step=step,
        loss=3.25,
        balance_loss=0.0,
        grad_norm=1.5,
        lr=1e-3,
        tokens=1000,
        seconds=0.5,
        tokens_per_s=2000.0,
        skipped=False,
    )
    return replace(made, **changes)


def make_run(tmp_path: Path, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "model": "config.json",
        "data": {"sequence_length": 8},
        "global_batch": 4,
        "steps": 5,
        "optimizer": {"lr": 1e-3},
        "folder": tmp_path,
    }
    return Run.model_validate(values | changes)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the file ----------------------------------------------------------------------------------


def write(path: Path, finished_steps: int, steps: list[int], loss: float = 3.25) -> None:
    file = MetricsFile(path, finished_steps)
    for step in steps:
        file.write(step_metrics(step, loss=loss))
    file.close()


def test_a_resumed_run_continues_the_file_without_a_repeated_or_missing_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    write(path, 0, [1, 2, 3, 4, 5], loss=4.0)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the run was killed
    write(path, 3, [4, 5, 6], loss=3.0)
    rows = read(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == [4.0, 4.0, 4.0, 3.0, 3.0, 3.0]


def test_a_new_run_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [1, 2, 3])
    write(path, 0, [1])
    assert [row["step"] for row in read(path)] == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_off_at_its_end_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')  # whole, but the line has no end
    write(path, 2, [3])
    assert [row["step"] for row in read(path)] == [1, 3]


def test_each_line_is_written_when_its_step_is_done_and_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(step_metrics(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    [line] = path.read_text().splitlines()
    file.close()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "balance_loss": 0.0,
        "grad_norm": None,
        "lr": 1e-3,
        "tokens": 1000,
        "seconds": 0.5,
        "tokens_per_s": 2000.0,
        "skipped": True,
    }


# --- the terminal ------------------------------------------------------------------------------


def report(run: Run, steps: list[StepMetrics], peak: float | None = None) -> None:
    reporter = Reporter(run, steps[0].step - 1, flops_per_step=10**12, peak_flops_per_s=peak)
    for each in steps:
        reporter.step(each)
    reporter.finish(123_000_000)
    reporter.close()


def test_a_line_every_log_every_steps_and_for_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = make_run(tmp_path, log_every=2)
    report(run, [step_metrics(step, seconds=step, loss=step) for step in range(1, 6)])
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines == [
        "step 2/5  loss 2.0000  norm 1.5  lr 0.001  667 tokens/s",  # 2000 tokens in 1 + 2 s
        "step 4/5  loss 4.0000  norm 1.5  lr 0.001  286 tokens/s",
        "step 5/5  loss 5.0000  norm 1.5  lr 0.001  200 tokens/s",
    ]
    assert summary.startswith("steps 1 to 5 in ")
    # The first step warms up: 4000 tokens in 2 + 3 + 4 + 5 s.
    assert summary.endswith("loss 5.0000, 286 tokens/s, peak memory 123 MB per rank")


def test_the_use_of_the_device_is_shown_where_its_peak_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    # 1e12 FLOPs in 0.5 s, of 8e12 a second
    report(make_run(tmp_path), [step_metrics(5, balance_loss=0.02)], peak=8e12)
    line, summary = capsys.readouterr().out.splitlines()
    assert line == (
        "step 5/5  loss 3.2500  balance 0.0200  norm 1.5  lr 0.001  2,000 tokens/s  MFU 25.0%"
    )
    assert summary.startswith("step 5 in ")


def test_skipped_steps_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = make_run(tmp_path, log_every=5)
    steps = [step_metrics(step, skipped=step in (2, 3)) for step in range(1, 6)]
    report(run, steps)
    assert "2 skipped: the gradient was not finite" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    report(make_run(tmp_path), [step_metrics(step) for step in range(1, 6)])
    shown = capsys.readouterr().out
    assert "step 5/5" in shown and "━" in shown and "2,000 tokens/s" in shown
    assert "steps 1 to 5 in" in shown


def test_nothing_is_written_without_out(tmp_path: Path) -> None:
    report(make_run(tmp_path), [step_metrics(5)])
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_that_is_not_installed_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    check_tensorboard(make_run(tmp_path))
    with pytest.raises(UserError, match="pip install tensorboard"):
        check_tensorboard(make_run(tmp_path, tensorboard=True, out=str(tmp_path)))


def test_tensorboard_gets_each_number_and_drops_steps_that_are_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 3)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            shown.append((name, value, step))

        def close(self) -> None:
            shown.append(("closed", 0, 0))

    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    report(make_run(tmp_path, tensorboard=True, out=str(tmp_path)), [step_metrics(3)])
    assert ("loss", 3.25, 3) in shown and ("tokens_per_s", 2000.0, 3) in shown
    assert shown[-1][0] == "closed"


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("AMD Instinct MI300X", "bf16", 1307e12),
        ("Some Other Device", "bf16", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(
    name: str, precision: str, peak: float | None
) -> None:
    assert peak_flops_per_s(name, precision) == peak


def test_peak_memory_is_in_bytes() -> None:
    held = bytearray(300_000_000)
    held[::4096] = b"x" * len(held[::4096])
    assert 3e8 < peak_memory_bytes() < 3e10


def test_the_peak_begins_anew_where_the_system_lets_it() -> None:
    held = bytearray(300_000_000)
    held[::4096] = b"x" * len(held[::4096])
    before = peak_memory_bytes()
    del held
    base = begin_peak_memory()
    after = peak_memory_bytes()
    if os.access("/proc/self/clear_refs", os.W_OK):
        assert after < before - 2e8 and abs(after - base) < 2e7
    else:
        assert after == before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take freed memory back")
def test_memory_that_was_freed_before_hides_nothing_that_is_taken_after() -> None:
    def grown_bytes() -> int:
        earlier = [bytearray(2000) for _ in range(50_000)]
        del earlier[:-1]  # the last one keeps the heap from shrinking by itself
        before = begin_peak_memory()
        later = [bytearray(2000) for _ in range(50_000)]
        return (peak_memory_bytes() - before) * bool(later)

    [grown] = launch(grown_bytes, 1)
    assert grown > 80_000_000
