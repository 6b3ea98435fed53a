from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.measurements import MEASUREMENTS, case, read
from fivefold.errors import UserError

ROWS = {row["id"]: row for row in csv.DictReader(MEASUREMENTS.open(encoding="utf-8"))}


def changed(name: str, **cells: str) -> dict[str, str]:
    return {**ROWS[name], **cells}


def test_nearly_all_rows_are_read_and_the_others_have_a_reason():
    cases, skipped = read()
    assert len(cases) + len(skipped) == len(ROWS)
    assert len(skipped) <= 18
    assert all(reason and "cannot be read" not in reason for _, reason in skipped)


def test_a_row_is_read_as_it_stands():
    row = case(ROWS["KORTH-004"])
    assert str(row.choices[0]) == "tp8 sp pp8 vpp3 ga64 recompute=selective"
    assert row.step_s == 13.75
    assert (row.trust, row.kind) == ("A", "dense")


def test_what_a_row_leaves_blank_stays_open():
    row = case(changed("KORTH-004", micro_batch="", recompute=""))
    assert {layout.micro_batch for layout in row.choices} == {1, 2, 4, 8}
    assert row.choices[0].recompute == "none"
    assert len({layout.recompute for layout in row.choices}) > 1


def test_tokens_a_second_are_a_step_time():
    row = case(ROWS["MB-106"])
    tokens = row.job.global_batch * row.job.sequence_length
    assert row.step_s == pytest.approx(tokens / (1712 * 256))
    assert row.step_s == pytest.approx(76.5607, rel=1e-4)


def test_memory_is_of_the_kind_and_in_the_unit_that_its_source_prints():
    row = case(ROWS["SIMUMAX-001"])
    assert row.memory_bytes == pytest.approx(66.55 * 2**30)
    assert row.printed_memory == "allocated"
    assert case(ROWS["BLOOM-001"]).printed_memory == "device"
    assert case(ROWS["BLOOM-001"]).memory_bytes == pytest.approx(47e9)
    assert case(ROWS["ZB-019"]).memory_bytes == pytest.approx(39 * 2**30)


def test_memory_alone_needs_no_batch():
    row = case(changed("MCMOE-010", global_batch=""))
    assert row.step_s is None
    assert row.memory_bytes == 199.5e9


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "TPU v5p"}, "the catalogue has no TPU v5p"),
        ({"n_layers": "nan"}, "n_layers 'nan' is no number"),
        ({"n_layers": "1e12"}, "must be from 1 to 10000"),
        ({"hidden": ""}, "hidden is not given"),
        ({"seq_len": "-5"}, "seq_len is -5"),
        ({"global_batch": ""}, "global_batch is not given"),
        ({"tp": "7"}, "tp 7 x pp 8 x cp 1 does not divide 64 GPUs"),
        ({"pp": "64", "tp": "1", "n_layers": "32"}, "pp 64 is more than the 32 layers"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is not known"),
        ({"precision": "FP32"}, "the precision FP32 is not known"),
        ({"precision": "NVFP4"}, "has no matrix products in nvfp4"),
        ({"metric_value": "fast"}, "step_time 'fast' is no number"),
        ({"metric_value": "0"}, "step_time is 0"),
        ({"metric_name": "loss", "also_step_time_s": ""}, "no step time and no memory"),
        ({"pipeline_schedule": "V-Half"}, "the schedule v-half is not known"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_with_the_reason(cells, reason):
    with pytest.raises(UserError, match=reason.replace("(", r"\(")):
        case(changed("KORTH-004", **cells))


def test_experts_that_cannot_be_spread_so_are_refused():
    with pytest.raises(UserError, match="ep 24 x etp 1 does not divide"):
        case(changed("DGXC-335", ep="24"))


def test_a_file_without_some_columns_is_read_as_far_as_it_says(tmp_path: Path):
    path = tmp_path / "few.csv"
    columns = [name for name in ROWS["KORTH-004"] if name not in ("vpp", "notes", "cluster", "etp")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(ROWS["KORTH-004"])
        file.write("short,row\n")
    cases, skipped = read(path)
    assert [row.cluster for row in cases] == ["GPT-175B | A100-80GB SXM"]
    assert [name for name, _ in skipped] == ["short"]
