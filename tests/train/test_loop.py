"""Whole training runs, by real processes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from fivefold.cli import main
from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.layout.notation import parse
from fivefold.model.counts import count_parameters
from fivefold.model.huggingface.load import load_config
from fivefold.plan.engines import ENGINES, Job
from fivefold.plan.estimate import estimate
from fivefold.report.timeline import save_run
from fivefold.train import checkpoint, loop
from fivefold.train.failures import WorkerFailure
from fivefold.train.launch import launch
from fivefold.train.learning_rate import learning_rate
from fivefold.train.loop import train
from fivefold.train.prepare import prepare_run
from fivefold.train.runfile import Run, load_run
from fivefold.train.start import choose_start
from fivefold.train.trainer import StepResult, Trainer
from fivefold.verify.plan_vs_run import train_and_compare
from tests.helpers import refusal
from tests.plan import cpu
from tests.report.test_timeline import read as read_timeline

MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 257,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DENSE = {key: value for key, value in MIXTURE.items() if "expert" not in key and "moe" not in key}
DENSE["model_type"] = "qwen3"


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 100)
    return {
        "model": DENSE,
        "data": {
            "files": [str(tmp_path / "text.txt")],
            "sequence_length": 16,
            "cache": str(tmp_path / "cache"),
        },
        "layout": "dp2",
        "global_batch": 4,
        "steps": 6,
        "optimizer": {"lr": 1e-3},
        "out": str(tmp_path / "out"),
        "device": "cpu",
        "folder": tmp_path,
    }


def make(values: dict[str, Any], **changes: Any) -> Run:
    return Run.model_validate(values | changes)


def metrics(values: dict[str, Any]) -> list[dict]:
    text = Path(values["out"], "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(values: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in metrics(values)]


def checkpoints(values: dict[str, Any]) -> list[int]:
    return [saved.step for saved in checkpoint.find(Path(values["out"], "checkpoints"))[0]]


# --- what a run shows and writes ---------------------------------------------------------------


def test_a_run_shows_its_steps_and_writes_them(
    values: dict[str, Any], capfd: pytest.CaptureFixture
) -> None:
    run = make(values, steps=3, log_every=2)
    train(run)
    shown = capfd.readouterr().out
    rows = metrics(values)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["loss"] == pytest.approx(math.log(257), abs=0.1)
    for i, row in enumerate(rows):
        assert row["tokens"] == 64
        assert row["lr"] == learning_rate(i, run)
        assert row["tokens_per_s"] == pytest.approx(64 / row["seconds"])
    assert re.findall(r"^step (\d+)/3 ", shown, re.MULTILINE) == ["2", "3"]
    assert f"loss {rows[1]['loss']:.4f}" in shown
    assert re.search(r"^steps 1 to 3 in .* tokens/s, peak memory .* MB per rank$", shown, re.M)
    assert "dp2 ga2: 2 devices = dp 2" in shown
    assert "64 tokens: 4 sequences of 16" in shown
    assert "cpu, gloo, fp32" in shown

    copy = Path(values["out"], "run.yaml")
    assert load_run(copy).model_dump() == run.model_dump()
    assert sorted(os.listdir(values["out"])) == ["metrics.jsonl", "run.yaml"]


def run_file(values: dict[str, Any], **changes: Any) -> Path:
    path = Path(values["folder"], "run.yaml")
    keys = {key: value for key, value in (values | changes).items() if key != "folder"}
    path.write_text(yaml.safe_dump(keys))
    return path


def test_a_run_ends_with_a_comparison_with_its_plan(
    values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    layout = "tp2 pp2 dp2 ep2"
    cluster = cpu.write(tmp_path)
    assert (
        main(["train", str(run_file(values, model=MIXTURE, layout=layout, cluster=cluster))]) == 0
    )
    shown = capfd.readouterr().out
    report = json.loads(Path(values["out"], "report.json").read_text())
    assert 1 < report["imbalance"] <= 2  # of 2 expert ranks
    assert f"in the last micro-batch: {report['imbalance']:.2f}x (max" in " ".join(shown.split())
    engine, machine = ENGINES["fivefold"], load_cluster(cluster, 8)
    imbalance = report["imbalance"]
    job = Job(load_config(MIXTURE), machine, 16, 4, "fp32", engine, imbalance=imbalance)
    planned = estimate(job, parse(report["layout"]))
    assert report["step_s"]["predicted"] == pytest.approx(planned.step_time_s)
    assert report["memory"]["predicted_bytes"] == pytest.approx(planned.peak_memory_bytes)
    even = estimate(replace(job, imbalance=1.0), planned.layout)
    assert planned.peak_memory_bytes > even.peak_memory_bytes
    assert report["ledger"] and not report["ledger_differences"]
    assert "Measured bytes match the plan exactly on every rank (last step)." in shown
    assert report["steps"] == 5  # of 6: the first warms up
    measured = [row["measured_s"] for row in report["seconds"] if row["part"] != "other"]
    assert sum(measured) == pytest.approx(report["step_s"]["measured"])
    predicted = [row["predicted_s"] for row in report["seconds"] if row["part"] != "data"]
    assert sum(predicted) == pytest.approx(report["step_s"]["predicted"])
    by_part = {row["part"]: row["measured_s"] for row in report["seconds"]}
    assert min(by_part[part] for part in ("compute", "dp", "tp", "ep", "bubble", "optimizer")) > 0
    assert by_part["cp"] == by_part["world"] == 0
    timed = metrics(values)[1:]
    assert report["step_s"]["measured"] == pytest.approx(
        sum(row["seconds"] for row in timed) / len(timed), rel=0.05
    )
    assert len(report["ranks"]) == 8
    assert 0 < report["memory"]["measured_bytes"] < 1e9
    assert 0 < report["memory"]["predicted_bytes"] < 1e9
    assert re.search(r"^bubble \(waiting for a stage\) +\d.*\d.*%$", shown, re.MULTILINE)


def test_a_cluster_that_cannot_compute_as_the_run_does_is_rejected_before_the_run_starts(
    values: dict[str, Any],
) -> None:
    text = refusal(train_and_compare, make(values, cluster="0.05TFLOPS,8GB,0.01TB/s:8x2GB/s"))
    assert "has no matrix products in fp32: it has bf16" in text
    assert not Path(values["out"]).exists()


@pytest.mark.parametrize(("steps", "shown"), [(1, {1}), (4, {2, 3}), (2, {2})])
def test_a_timeline_has_the_steps_after_the_first_of_all_ranks(
    steps: int, shown: set[int], values: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.pftrace"
    train(
        make(values, steps=steps, layout="pp2 tp2", timeline=str(file), timeline_steps=2), save_run
    )
    slices = read_timeline(file)
    names = {f"rank {rank}: pp{rank // 2} tp{rank % 2}" for rank in range(4)}
    assert {each.place[0] for each in slices} == names
    for name in names:
        own = {each.name for each in slices if each.place == (name, "compute")}
        assert {each for each in own if each.startswith("step")} == {f"step {n}" for n in shown}
        assert {"data", "optimizer", "wait: tp all_reduce", "wait: pp receive"} <= own
        actions = [each for each in slices if each.place[0] == name and "micro" in each.name]
        assert len(actions) == 8 * len(shown)  # both passes of 4 micro-batches
    sent = sorted(each.flows for each in slices if each.name == "pp send")
    received = sorted(each.flows for each in slices if each.name == "pp receive")
    assert sent == received and len(sent) == 16 * len(shown)


def test_nothing_is_written_without_out(values: dict[str, Any], tmp_path: Path) -> None:
    train(make(values, out=None, steps=1))
    assert sorted(os.listdir(tmp_path)) == ["cache", "text.txt"]


@pytest.mark.parametrize(
    ("layout", "a_rank"),
    [
        ("tp2", None),
        ("pp2", None),
        ("dp4 zero3 ep4", None),
        pytest.param("dp4 zero3", None, marks=pytest.mark.slow),
        pytest.param("dp2", "281,344 parameters", marks=pytest.mark.slow),
    ],
)
def test_the_parameter_count_is_that_of_the_whole_model_in_every_layout(
    layout: str, a_rank: str | None, values: dict[str, Any], capfd: pytest.CaptureFixture
) -> None:
    train(make(values, model=MIXTURE, layout=layout, steps=1, out=None))
    shown = capfd.readouterr().out
    counts = count_parameters(load_config(MIXTURE))
    assert counts.total == 264_832 + 2 * 129 * 64  # TINY-M, whose vocabulary is 128
    assert f"{counts.total:,} parameters, {counts.active:,} active per token" in shown
    [held] = re.findall(r"^rank +(.*)$", shown, re.MULTILINE)
    if a_rank is not None:
        assert held == a_rank
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", held)]
    assert numbers[-1] >= counts.total / 4


# --- stopping and going on ---------------------------------------------------------------------


def test_a_resumed_run_is_the_run_that_was_never_broken(
    values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    whole = values | {"out": str(tmp_path / "whole")}
    train(make(whole))
    # As a kill in the save of step 4 leaves it: metrics up to there, the checkpoint of step 2.
    train(make(values, checkpoint={"every": 2, "keep": 9}))
    for step in (4, 6):
        shutil.rmtree(Path(values["out"], "checkpoints", f"step-{step:06d}"))
    text = Path(values["out"], "metrics.jsonl").read_text().splitlines(keepends=True)
    Path(values["out"], "metrics.jsonl").write_text("".join(text[:4]))
    capfd.readouterr()

    train(make(values, checkpoint={"every": 4, "resume": True}))
    shown = capfd.readouterr().out
    assert "resuming after step 2 (128 tokens), trained with layout dp2 ga2" in shown
    assert "note:" not in shown
    assert "steps 3 to 6 in" in shown
    assert [row["step"] for row in metrics(values)] == [1, 2, 3, 4, 5, 6]
    assert losses(values) == losses(whole)  # to the bit
    assert checkpoints(values) == [4, 6]

    train(make(values, checkpoint={"resume": True}))
    assert "step-000006 is after step 6, and the run has 6 steps" in capfd.readouterr().out


def test_a_run_resumes_in_a_pipeline(values: dict[str, Any]) -> None:
    train(make(values, layout="pp2", steps=2, checkpoint={"every": 2}))
    schedule = {"decay": "constant"}
    more = make(
        values, layout="pp2 dp2", steps=4, lr_schedule=schedule, checkpoint={"resume": True}
    )
    train(more)
    assert [row["step"] for row in metrics(values)] == [1, 2, 3, 4]
    assert [row["lr"] for row in metrics(values)][2:] == [1e-3, 1e-3]


def test_the_newest_checkpoints_are_kept(values: dict[str, Any]) -> None:
    train(make(values, layout="dp1", steps=7, checkpoint={"every": 2, "keep": 2}))
    assert checkpoints(values) == [6, 7]


@pytest.fixture
def halfway(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run of 1,000 steps, of which 500 are done and saved."""
    schedule = {"warmup_steps": 100, "decay": "cosine", "final_fraction": 0.1}
    values |= {"steps": 1000, "optimizer": {"lr": 3e-4}, "lr_schedule": schedule}
    values["checkpoint"] = {"resume": True}
    run = make(values)
    assert learning_rate(500, run) == pytest.approx(1.8844e-4, rel=1e-4)
    prepared = prepare_run(run)
    saved = checkpoint.Saved(
        folder=Path(values["out"], "checkpoints", "step-000500"),
        step=500,
        tokens=32_000,
        layout="tp2",
        learning_rate=learning_rate(500, run),
        identity=checkpoint.identity(prepared.config, prepared.samples),
    )
    monkeypatch.setattr(checkpoint, "find", lambda folder: ([saved], []))
    monkeypatch.setattr(checkpoint, "check_resumable", lambda *args: None)
    return values


@pytest.mark.parametrize("layout", ["dp1", "dp4", "tp2 pp2"])
def test_the_learning_rate_follows_the_step_in_any_layout(
    layout: str, halfway: dict[str, Any], capsys: pytest.CaptureFixture
) -> None:
    start = choose_start(prepare_run(make(halfway, layout=layout)))
    assert start is not None and start.step == 500
    assert "note:" not in capsys.readouterr().out


def test_a_learning_rate_that_would_jump_is_told(
    halfway: dict[str, Any], capsys: pytest.CaptureFixture
) -> None:
    choose_start(prepare_run(make(halfway, steps=2000)))
    note = capsys.readouterr().out.splitlines()[-1]
    assert note.startswith(
        "note: the learning rate resumes at 0.00027153; the checkpoint's run would have used "
        "0.00018844"
    )


# --- what is refused ---------------------------------------------------------------------------


def test_a_folder_with_checkpoints_is_not_trained_over(values: dict[str, Any]) -> None:
    train(make(values, layout="dp1", steps=1, checkpoint={"every": 1}))
    before = metrics(values)
    assert "add --resume to continue that run" in refusal(train, make(values))
    other = make(values, seed=1, checkpoint={"resume": True})
    assert "seed was 0 and is now 1" in refusal(train, other)
    assert metrics(values) == before


def test_resume_without_a_checkpoint_starts_with_the_first_step(
    values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    partial = tmp_path / "out" / "checkpoints" / ".step-000001.0123abcd"
    partial.mkdir(parents=True)
    train(make(values, layout="dp1", steps=1, checkpoint={"every": 1, "resume": True}))
    shown = capfd.readouterr().out
    assert f"ignored {partial}: an interrupted save left it" in shown
    assert "there is no checkpoint in" in shown
    assert checkpoints(values) == [1]
    assert not partial.exists()


def test_an_out_that_cannot_be_written_is_refused(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(train, make(values, out=str(tmp_path / "file" / "out")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "does not allow it" in refusal(train, make(values))
    assert not (tmp_path / "out").exists()


def test_a_disk_too_small_for_the_checkpoints_is_refused(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    assert "12 bytes per parameter" in refusal(train, make(values, checkpoint={"every": 1}))
    assert not (tmp_path / "out").exists()


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_run_without_finite_gradients_stops_after_ten_steps(values: dict[str, Any]) -> None:
    optimizer = {"lr": 1e38, "clip": None}
    told = refusal(train, make(values, steps=20, optimizer=optimizer))
    skipped = [row["step"] for row in metrics(values) if row["skipped"]]
    assert len(skipped) == 10
    assert f"not finite in steps {skipped[0]} to {skipped[-1]}" in told
    assert "smaller optimizer.lr (it is 1e+38)" in told
    assert metrics(values)[-1]["grad_norm"] is None


def test_a_rank_that_fails_is_named_with_its_place_and_step(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def fail(self: Trainer, number: int, lr: float) -> StepResult:
        if number == 2 and dist.get_rank() == 1:
            raise ValueError("the disk has gone")
        return step(self, number, lr)

    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(WorkerFailure) as failed:
        train(make(values))
    assert str(failed.value) == "rank 1 (dp1) failed in step 3: ValueError: the disk has gone"
    assert [row["step"] for row in metrics(values)] == [1, 2]


# --- under torchrun ----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_joined(run: Run, port: int, world_size: int) -> None:
    """In a launched worker: leave its process group, train as if torchrun had started it."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    train(run)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # for launch to destroy


def test_processes_of_torchrun_train_alike_and_share_a_start(
    values: dict[str, Any], tmp_path: Path
) -> None:
    whole = values | {"out": str(tmp_path / "whole")}
    train(make(whole, steps=4))
    run = make(values, layout="mb1", steps=4, checkpoint={"every": 2, "keep": 5})  # dp is derived
    launch(train_joined, 2, run, free_port(), 2)
    assert losses(values) == losses(whole)

    shutil.rmtree(Path(values["out"], "checkpoints", "step-000004"))
    resume = make(values, steps=4, checkpoint={"resume": True})
    launch(train_joined, 2, resume, free_port(), 2)
    assert losses(values) == losses(whole)
    with pytest.raises(UserError, match="add --resume"):
        launch(train_joined, 2, run, free_port(), 2)
    with pytest.raises(UserError, match="the layout is for 4 ranks, but 2 were started"):
        launch(train_joined, 2, make(values, layout="dp4"), free_port(), 2)


def test_ranks_that_read_other_data_are_told(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.txt").write_text("Whether 'tis nobler in the mind to suffer.\n" * 100)
    other = make(values, data=values["data"] | {"files": [str(tmp_path / "other.txt")]})
    prepare = loop.prepare_samples
    monkeypatch.setattr(
        loop, "prepare_samples", lambda run: prepare(other if dist.get_rank() == 1 else run)
    )
    with pytest.raises(UserError, match="ranks 0 and 1 read different data"):
        launch(train_joined, 2, make(values), free_port(), 2)


@pytest.mark.slow
def test_torchrun_starts_a_run(values: dict[str, Any], tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    del values["folder"]
    run_file.write_text(yaml.safe_dump(values | {"layout": "tp2"}))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), "-m", "fivefold", "train", str(run_file)]
    source = Path(loop.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert "steps 1 to 6 in" in done.stdout
    assert len(metrics(values)) == 6
