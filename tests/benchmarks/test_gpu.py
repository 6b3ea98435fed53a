"""What of benchmarks/gpu.py needs no GPU: what fits, what is planned, the table; and a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, pages
from benchmarks.gpu import CASES, Case, Row, allocated_bytes, as_markdown, most_layers, plan
from fivefold.cluster.load import load_cluster
from fivefold.train.launch import launch

ROOT = Path(__file__).resolve().parents[2]
H100 = load_cluster("dgx-h100", 1)


def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    told = capsys.readouterr()
    assert (told.out, len(told.err.splitlines())) == ("", 1) and "none is visible" in told.err


def test_it_runs_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--cluster" in done.stdout


def test_as_many_layers_are_trained_as_fit() -> None:
    dense = next(case for case in CASES if case.model == "llama-3.1-8b")
    layers = most_layers(dense, H100)
    assert layers is not None and 2 < layers < 32  # 8B weights and their state take 145 GB
    room = gpu.ROOM * H100.device.memory_bytes
    assert plan(dense, layers, H100).peak_memory_bytes <= room
    assert plan(dense, layers + 1, H100).peak_memory_bytes > room
    small = next(case for case in CASES if case.model == "llama-3.2-1b")
    assert most_layers(small, H100) == 16  # all
    tiny = load_cluster("989TFLOPS,8GB,3.35TB/s:8x450GB/s,50GB/s", 1)
    assert most_layers(dense, tiny) is None


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model} {c.layout}")
def test_every_case_can_be_planned_on_a_large_gpu(case: Case) -> None:
    layers = most_layers(case, H100)
    assert layers is not None
    planned = plan(case, layers, H100)
    assert 0.01 < planned.step_time_s < 60
    assert 0 < allocated_bytes(planned) < planned.peak_memory_bytes
    if "recompute" in case.layout:
        kept = Case(case.model, case.sequence_length, case.layout.replace(" recompute=full", ""))
        assert allocated_bytes(planned) < allocated_bytes(plan(kept, layers, H100))


def test_the_table_shows_the_errors() -> None:
    rows = [
        Row("m", 2, "mb1", 4096, 2.0, 2.2, 10e9, 9e9),
        Row("m", 2, "mb2", 4096, 1.0, 0.7, 10e9, 10e9),
    ]
    table = as_markdown(rows, H100)
    assert "| m | 2 | `mb1` | 4,096 | 2.000 s | 2.200 s | +10.0% | 10.0 GB | 9.0 GB | -10.0% |" in (
        table.splitlines()
    )
    assert "error is 20.0% of the step time and 5.0% of the allocated memory" in table


def test_the_page_has_a_place_for_it() -> None:
    page = gpu.PAGE.read_text(encoding="utf-8")
    assert pages.block(pages.with_block(page, "gpu", "new"), "gpu") == "new"


def test_a_case_is_trained_by_the_real_trainer(tmp_path: Path, monkeypatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
    data = json.loads((gpu.PUBLISHED / "llama-3.2-1b.json").read_text())
    (tmp_path / "small.json").write_text(
        json.dumps(data | small | {"num_attention_heads": 4, "num_key_value_heads": 2})
    )
    monkeypatch.setattr(gpu, "PUBLISHED", tmp_path)
    case = Case("small", 32, "mb1 ga2 recompute=full")
    [(seconds, peak)] = launch(gpu.train, 1, case, 2, str(tmp_path), "cpu")
    assert len(seconds) == gpu.STEPS and min(seconds) > 0 and peak == 0
