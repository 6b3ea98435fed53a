from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from fivefold.calibrate import grid, run
from fivefold.calibrate.points import point_of
from fivefold.calibrate.run import calibrate
from fivefold.calibrate.steps import SPLITS
from fivefold.cli import main
from fivefold.cluster.load import devices_of, load_cluster
from fivefold.train.launch import launch
from tests.calibrate.tiny import TINY, shrink_steps
from tests.helpers import free_port, refusal


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of this machine, as 2 processes see it on the tiny grid."""
    path = tmp_path_factory.mktemp("calibrated") / "new" / "here.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "CPU", TINY)
        shrink_steps(patch)
        done = calibrate(str(path), 2, quick=False)
    assert done is not None and done.path == path
    layers_and_heads = 2 * len(TINY.blocks)
    assert {part: len(of) for part, of in done.errors.items()} == {
        "forward": layers_and_heads, "backward": layers_and_heads
    }  # fmt: skip
    return path


def test_the_file_is_a_cluster_that_can_be_planned_for(written: Path) -> None:
    cluster = load_cluster(str(written), 4)
    assert cluster.num_devices == 4 and devices_of(str(written)) == 2
    assert cluster.cpu is not None and cluster.cpu.cores == len(os.sched_getaffinity(0))
    assert cluster.device.peak_flops("fp32") > 1e8
    assert cluster.cpu.forward.operation > 0 and set(cluster.cpu.calls) == set(SPLITS)
    assert cluster.cpu.message_s("all_reduce", 2, 1000).busy > 0


def test_something_of_every_kind_is_measured(written: Path) -> None:
    points = [point_of(record) for record in yaml.safe_load(written.read_text())["points"]]
    kinds = {point.what for point in points}
    assert kinds == {
        "launch", "product", "grouped", "attention", "attention_block", "light", "memory", "host",
        "optimizer", "layer", "mixture", "embedding", "head", "message", "step", "outside",
        "larger_step", "growth",
    }  # fmt: skip
    assert {p.sizes["op"] for p in points if p.what == "message"} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows", "shift",
        "send", "barrier",
    }  # fmt: skip
    for point in points:
        assert 0 < point.wall_s < 10 and 0 < point.cpu_s < 10, point


def test_a_point_is_there_once(written: Path) -> None:
    records = yaml.safe_load(written.read_text())["points"]
    names = [tuple(r[k] for k in r if k not in ("wall_s", "cpu_s")) for r in records]
    assert len(names) == len(set(names))


def test_a_plan_for_here_is_made_with_the_file_and_its_number_of_processes(
    written: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("fivefold.cluster.host.here_path", lambda: written)
    model = "examples/models/first-run.json"
    assert main(["plan", model, "--here", "--engine", "fivefold", "--seq", "256"]) == 0
    assert "here: 2 x " in capsys.readouterr().out


def test_here_and_another_cluster_are_refused() -> None:
    from fivefold.cli.plan import PlanOptions, plan

    options = PlanOptions(model="llama-3.1-8b", cluster="dgx-h100", here=True)
    assert "--cluster dgx-h100" in refusal(plan, options)


def test_processes_of_torchrun_join_and_rank_0_writes(tmp_path: Path) -> None:
    path, port = tmp_path / "joined.yaml", free_port()
    all_are_connected = multiprocessing.get_context("fork").Barrier(2)

    def leave_and_join() -> bool:
        rank = dist.get_rank()
        all_are_connected.wait()
        dist.destroy_process_group()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")  # 2 nodes
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        grid.CPU = replace(TINY, products=TINY.products[:1], blocks=TINY.blocks[:1])
        wrote = calibrate(str(path), None, quick=False) is not None
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        # A worker leaves a process group at its end.
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return wrote

    assert launch(leave_and_join, 2) == [True, False]
    cluster = load_cluster(str(path), 2)
    assert [tier.name for tier in cluster.system] == ["between nodes"]
    assert devices_of(str(path)) == 2


# --- what cannot be done -----------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 1000])
def test_a_number_of_processes_that_cannot_be_is_refused(processes: int) -> None:
    told = refusal(calibrate, None, processes, quick=True)
    assert told == f"--processes must lie between 1 and 256, not {processes}"


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delattr("fivefold.calibrate.measure.measure_locally")
    assert "must end in .yaml" in refusal(calibrate, "here.txt", None, quick=True)
    (tmp_path / "folder.yaml").mkdir()
    assert "is a folder" in refusal(calibrate, str(tmp_path / "folder.yaml"), None, quick=True)
    file = tmp_path / "file"
    file.write_text("")
    told = refusal(calibrate, str(file / "here.yaml"), None, quick=True)
    assert "(Not a directory): name another with --out" in told or "(File exists)" in told


def test_without_torch_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda _: None)
    assert "pip install 'fivefold[train]'" in refusal(calibrate, None, None, quick=True)


def test_torchruns_processes_are_taken_and_no_other_number(monkeypatch) -> None:
    where = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    told = refusal(calibrate, None, 8, quick=True)
    assert told == "torchrun started 4 processes and --processes says 8: leave it out"
