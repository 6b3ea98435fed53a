from __future__ import annotations

from typing import Any

from fivefold.report.plan_vs_run_tables import plan_vs_run_report
from tests.helpers import line_with, printed

PARTS = ("compute", "dp", "tp", "world", "bubble", "optimizer", "data", "other")


def report(**changes: Any) -> dict[str, Any]:
    measured = {"compute": 0.06, "dp": 0.02, "bubble": 0.015, "optimizer": 0.005}
    predicted = {"compute": 0.05, "dp": 0.01, "bubble": 0.02, "optimizer": 0.005, "other": 0.005}
    made = {
        "device": "cpu",
        "cluster": "here.yaml",
        "pp_rank": 1,
        "steps": 9,
        "imbalance": None,
        "step_s": {"predicted": 0.09, "measured": 0.1},
        "seconds": [
            {
                "part": part,
                "predicted_s": None if part == "data" else predicted.get(part, 0.0),
                "measured_s": None if part == "other" else measured.get(part, 0.0),
            }
            for part in PARTS
        ],
        "memory": {"predicted_bytes": 80e6, "measured_bytes": 90_000_000},
        "ledger": [{"split": "dp"}],
        "ledger_differences": [],
    }
    return made | changes


def unplanned(**changes: Any) -> dict[str, Any]:
    """Of a run for which no cluster is known."""
    made = report(cluster=None, pp_rank=None)
    for row in made["seconds"]:
        row["predicted_s"] = None
    made["step_s"]["predicted"] = made["memory"]["predicted_bytes"] = None
    return made | changes


def test_what_was_planned_stands_beside_what_was() -> None:
    shown = printed(*plan_vs_run_report(report()))
    assert "Time per step: pipeline rank 1, mean of 9 steps" in " ".join(shown.split())
    assert line_with(shown, "compute") == "compute 50.0 ms 60.0 ms 60.0%"
    assert line_with(shown, "DP, exposed") == "DP, exposed 10.0 ms 20.0 ms 20.0%"
    assert line_with(shown, "bubble") == "bubble (waiting for a stage) 20.0 ms 15.0 ms 15.0%"
    assert line_with(shown, "other") == "other 5.00 ms -"
    assert line_with(shown, "step  ") == "step 90.0 ms 100 ms"
    assert line_with(shown, "memory") == "peak memory per rank 80.0 MB 90.0 MB"
    assert "Measured bytes match the plan exactly on every rank (last step)." in shown
    assert "calibrate" not in shown


def test_how_uneven_the_routing_was_is_told_where_experts_are_spread() -> None:
    assert "imbalance" not in printed(*plan_vs_run_report(report()))
    told = "Expert imbalance in the last micro-batch: 1.50x (max/mean tokens per rank)."
    planned = " ".join(printed(*plan_vs_run_report(report(imbalance=1.5))).split())
    assert f"{told} The prediction uses this value." in planned
    unpredicted = " ".join(printed(*plan_vs_run_report(unplanned(imbalance=1.5))).split())
    assert told in unpredicted and "prediction" not in unpredicted


def test_parts_that_neither_side_has_are_left_out() -> None:
    shown = printed(*plan_vs_run_report(report()))
    assert all(words not in shown for words in ("TP", "last rank", "reading data"))


def test_without_a_cluster_the_run_stands_alone_and_it_says_what_would_help() -> None:
    shown = printed(*plan_vs_run_report(unplanned(steps=1)))
    assert "Time per step: all ranks, 1 step" in " ".join(shown.split())
    assert line_with(shown, "compute") == "compute - 60.0 ms 60.0%"
    assert line_with(shown, "memory") == "peak memory per rank - 90.0 MB"
    assert "Run `fivefold calibrate` to measure this machine:" in shown


def test_a_message_that_the_plan_does_not_know_is_named() -> None:
    row = {
        "pp_rank": 0,
        "rank": 3,
        "split": "tp",
        "phase": "forward",
        "op": "all_reduce",
        "payload_bytes": 4096.0,
        "group_size": 2,
        "predicted_calls": 0,
        "measured_calls": 1.0,
    }
    shown = printed(*plan_vs_run_report(report(ledger_differences=[row])))
    line = (
        "rank 3: TP forward all-reduce of 4,096 bytes over 2 ranks: 0 calls predicted, 1 measured"
    )
    assert line in shown
    assert "Measured bytes differ from the plan (last step)." in shown
    assert "exactly" not in shown


def test_one_process_has_no_messages_to_compare() -> None:
    shown = printed(*plan_vs_run_report(report(ledger=[])))
    assert "bytes" not in shown


def test_on_a_gpu_it_says_whose_clock_was_read() -> None:
    assert "Times are host times" in printed(*plan_vs_run_report(report(device="cuda")))
