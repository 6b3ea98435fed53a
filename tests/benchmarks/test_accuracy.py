from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks import accuracy, pages, plots, published, spread
from benchmarks.measurements import MEASUREMENTS, read
from benchmarks.ranking import Sweep, ranking, sweeps
from benchmarks.scores import Scored, figures, score
from fivefold.plan import intervals

ROOT = Path(__file__).resolve().parents[2]
ROWS = list(csv.DictReader(MEASUREMENTS.open(encoding="utf-8")))
KEYS = {"rows", "clusters", "median_abs_error", "p90_abs_error", "bias"}


def few(tmp_path: Path, rows: list[dict[str, str]]) -> Path:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def of(*prefixes: str) -> list[dict[str, str]]:
    return [row for row in ROWS if row["id"].rsplit("-", 1)[0] in prefixes]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[accuracy.Report, list[Scored]]:
    """A report of sources that have times, memory, dense models and mixtures."""
    path = few(tmp_path_factory.mktemp("small"), of("SIMUMAX", "ZB", "ZOO", "MLPERF"))
    return accuracy.report(path)


# --- figures -------------------------------------------------------------------------------------


def test_a_cluster_counts_once_by_the_median_of_its_rows():
    errors = [("a", 0.1), ("a", -0.2), ("a", 0.9), ("b", -0.3), ("c", 0.05)]
    result = figures(errors)
    assert (result["rows"], result["clusters"]) == (5, 3)
    assert result["median_abs_error"] == pytest.approx(0.2)
    assert result["p90_abs_error"] == pytest.approx(np.percentile([0.2, 0.3, 0.05], 90))
    assert result["bias"] == pytest.approx(0.05)


def test_no_rows_have_no_figures():
    assert figures([]) == {
        "rows": 0, "clusters": 0, "median_abs_error": None, "p90_abs_error": None, "bias": None
    }  # fmt: skip


def test_the_json_form_has_its_keys(small):
    result, rows = small
    assert {"time", "memory", "by", "ranking", "worst", "skipped"} == set(result)
    assert set(result["time"]) == set(result["memory"]) == KEYS
    assert set(result["by"]) == {
        "source", "generation", "gpu", "model", "split", "precision", "trust"
    }  # fmt: skip
    for groups in result["by"].values():
        for each in groups.values():
            assert set(each["time"]) == set(each["memory"]) == KEYS
    assert result["time"]["rows"] == sum(row.case.step_s is not None for row in rows)
    assert len(rows) + len(result["skipped"]) == len(of("SIMUMAX", "ZB", "ZOO", "MLPERF"))
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_rows_of_a_group_add_up(small):
    result, _ = small
    for part in ("source", "generation", "gpu", "model", "precision", "trust"):
        total = sum(each["time"]["rows"] for each in result["by"][part].values())
        assert total == result["time"]["rows"], part


def test_the_worst_rows_are_the_worst_and_have_a_reason(small):
    result, rows = small
    worst = [abs(np.log1p(row["error"])) for row in result["worst"]["time"]]
    assert worst == sorted(worst, reverse=True)
    assert len(worst) == 10
    all_errors = [abs(np.log1p(r.step_error)) for r in rows if r.step_error is not None]
    assert worst[0] == max(all_errors)
    assert all(row["reason"] for row in result["worst"]["time"])


def test_a_run_that_was_measured_apart_is_named_as_such(tmp_path):
    (row,) = [row for row in ROWS if row["id"] == "KORTH-004"]
    twice = [row, {**row, "id": "KORTH-104", "metric_value": "30"}]
    result, _ = accuracy.report(few(tmp_path, twice))
    assert "runs of this layout took 13.8 to 30 s" in result["worst"]["time"][0]["reason"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("GB200 NVL72", "Blackwell"), ("H800", "Hopper"), ("A800-80GB SXM", "Ampere"),
     ("MI355X", "CDNA"), ("V100-32GB SXM3", "Volta"), ("TPU v5p", "other")],
)  # fmt: skip
def test_generations(gpu, name):
    assert accuracy.generation(gpu) == name


# --- odd files -----------------------------------------------------------------------------------

ODD = ["", "0", "-1", "nan", "inf", "1e400", "abc", "  ", "3", "0.5", "yes", "9" * 40, "1,024"]


@pytest.mark.parametrize("seed", range(3))
def test_no_row_ends_the_program(tmp_path, seed):
    chance = random.Random(seed)
    rows = []
    for _ in range(60):
        row = dict(chance.choice(ROWS))
        for _ in range(chance.choice([1, 2, 4])):
            row[chance.choice(list(row))] = chance.choice(ODD)
        rows.append(row)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, scored = accuracy.report(few(tmp_path, rows))
        accuracy.as_text(result)
    json.dumps(result, allow_nan=False)
    assert len(scored) + len(result["skipped"]) == 60


def test_other_sources_models_and_gpus_are_predicted(tmp_path):
    (row,) = [row for row in ROWS if row["id"].startswith("MPT-")][:1]
    new = {**row, "id": "NEW-1", "gpu": "MI300X", "model_name": "Own-9B", "cluster": ""}
    unknown = {**row, "id": "NEW-2", "gpu": "TPU v5p"}
    memory = {**row, "id": "NEW-3", "metric_name": "peak_memory", "metric_value": "60"}
    memory |= {"also_step_time_s": "", "global_batch": ""}
    result, scored = accuracy.report(few(tmp_path, [new, unknown, memory]))
    assert scored[0].case.cluster == "Own-9B | MI300X"
    assert result["skipped"] == [{"id": "NEW-2", "reason": "the catalogue has no TPU v5p"}]
    assert (result["time"]["rows"], result["memory"]["rows"]) == (1, 1)
    assert result["by"]["trust"]["C"]["time"]["rows"] == 1


def test_a_row_whose_prediction_fails_does_not_take_the_others_with_it(monkeypatch):
    cases = read()[0][:20]
    together, bad = accuracy.score.__globals__["_together"], cases[7].id

    def failing(some):
        if any(case.id == bad for case in some):
            raise ValueError("odd")
        return together(some)

    monkeypatch.setitem(accuracy.score.__globals__, "_together", failing)
    scored, failed = score(cases)
    assert failed == [(bad, "no prediction: odd")]
    assert [each.case.id for each in scored] == [case.id for case in cases if case.id != bad]


def test_an_empty_file_has_a_report(tmp_path):
    result, scored = accuracy.report(few(tmp_path, []))
    assert scored == []
    assert "no job was measured in two layouts" in accuracy.as_text(result)


def test_the_program_runs_as_a_plain_script_from_the_repository_root(tmp_path):
    path = few(tmp_path, of("KORTH"))
    done = subprocess.run(
        [sys.executable, "benchmarks/accuracy.py", "--measurements", str(path), "--json"],
        cwd=ROOT, capture_output=True, text=True, env={"PATH": "/usr/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["time"]["rows"] == 2


def test_a_file_that_is_not_there_is_said(capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["--measurements", "none.csv"])
    assert "there is no file none.csv" in capsys.readouterr().err


# --- ranking -------------------------------------------------------------------------------------


def test_the_regret_is_what_following_the_plan_costs():
    sweep = Sweep("s", (("a", 10.0, 12.0), ("b", 11.0, 11.0), ("c", 15.0, 14.0)))
    assert sweep.chosen[0] == "b"
    assert sweep.regret == pytest.approx(0.1)
    assert not sweep.found


def test_a_prediction_within_a_percent_counts_as_found():
    assert Sweep("s", (("a", 10.0, 11.05), ("b", 11.0, 11.0))).found


def test_a_sweep_has_rows_of_one_job_program_and_release_in_several_layouts(small):
    _, rows = small
    for sweep in sweeps(rows):
        assert len({layout for layout, _, _ in sweep.rows}) == len(sweep.rows) > 1
    names = [sweep.name for sweep in sweeps(rows) if sweep.name.startswith("ZB")]
    assert len(names) == 3  # three numbers of micro-batches, three schedules each
    assert ranking(rows)["mean_regret"] >= 0


def test_releases_are_sweeps_of_their_own(tmp_path):
    (row,) = [row for row in ROWS if row["id"] == "DGXC-119"]
    other = {**row, "id": "DGXC-999", "pp": "8"}
    newer = {**other, "notes": row["notes"].replace("tag v25.02", "tag v25.05")}
    assert len(sweeps(accuracy.report(few(tmp_path, [row, other]))[1])) == 1
    assert sweeps(accuracy.report(few(tmp_path, [row, newer]))[1]) == []


# --- intervals and the measured step -------------------------------------------------------------


def points(errors: dict[str, list[float]]) -> list[spread.Point]:
    return [
        spread.Point(cluster, cluster, f"layout {i}", "gpu", ("all",), error)
        for cluster, several in errors.items()
        for i, error in enumerate(several)
    ]


def test_an_interval_holds_what_it_should_of_clusters_it_has_not_seen():
    random_errors = np.random.default_rng(1).normal(0, 0.1, 400)
    rows = points({f"c{i}": [float(error)] for i, error in enumerate(random_errors)})
    kind = spread.known(rows)["kinds"]["all"]
    assert np.log(kind["low"]) == pytest.approx(-0.128, abs=0.02)  # a normal's 10 % quantile
    held = spread.held_out(rows, rows, lambda row: row.cluster)
    assert np.mean([inside for _, inside in held]) == pytest.approx(spread.COVERAGE, abs=0.02)


def test_a_cluster_of_many_rows_does_not_set_the_interval():
    rows = points({"many": [0.5] * 500} | {f"c{i}": [0.001 * i] for i in range(20)})
    assert np.log(spread.known(rows)["kinds"]["all"]["high"]) < 0.05


def test_a_kind_of_few_clusters_has_no_interval_of_its_own():
    rows = [
        spread.Point(f"c{i}", "p", "l", "gpu", ("rare" if i < 3 else "usual", "all"), 0.0)
        for i in range(20)
    ]
    assert set(spread.known(rows)["kinds"]) == {"usual", "all"}


def test_the_shared_error_is_told_from_the_layouts_own():
    random_errors = np.random.default_rng(2)
    errors = {
        f"p{i}": list(random_errors.normal(0, 0.1) + random_errors.normal(0, 0.03, 6))
        for i in range(300)
    }
    shared, own = spread.shared_and_own(points(errors))
    assert shared == pytest.approx(0.1, rel=0.15)
    assert own == pytest.approx(0.03, rel=0.15)


def test_a_measured_step_helps_where_errors_are_shared(small):
    _, rows = small
    result = spread.sharpened(rows)
    assert result["after"]["median_abs_error"] < result["before"]["median_abs_error"]


# --- the page ------------------------------------------------------------------------------------


def test_plots_are_drawn_of_any_rows(small):
    _, rows = small
    for canvas in (
        plots.predicted_against_measured(rows),
        plots.predicted_against_measured(rows, memory=True),
        plots.error_histogram(rows),
        plots.error_histogram([]),
        plots.predicted_against_measured([]),
    ):
        assert canvas.svg().startswith("<svg")
        assert "nan" not in canvas.svg()


def test_published_layouts_are_legal_and_compared():
    each = next(iter(published.compared()))
    assert each.published is not None and each.ours is not None
    assert each.published.layout.tp == 8 and each.published.layout.pp == 16
    assert each.verdict


@pytest.mark.slow
def test_the_page_shows_what_the_program_says_today():
    result, rows = accuracy.report()
    as_unseen = score([spread.unseen(row.case) for row in rows])[0]
    page = accuracy.PAGE.read_text(encoding="utf-8")
    made = accuracy.blocks(result, rows, as_unseen)
    for name, content in made.items():
        assert pages.block(page, name) == content, f"{name}: run accuracy.py --write"
    assert set(re.findall(r"<!-- begin: (\S+) -->", page)) == {*made, "halves", "published", "gpu"}
    assert yaml.safe_load(intervals.ERRORS.read_text()) == spread.errors_file(rows, as_unseen)
