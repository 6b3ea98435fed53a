from __future__ import annotations

from typing import Any

from fivefold.report.plan_vs_run_tables import beside_report
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
    shown = printed(*beside_report(report()))
    assert "a step on pipeline rank 1, mean of 9 steps" in " ".join(shown.split())
    assert line_with(shown, "compute") == "compute 50.0 ms 60.0 ms 60.0%"
    assert line_with(shown, "DP, exposed") == "DP, exposed 10.0 ms 20.0 ms 20.0%"
    assert line_with(shown, "bubble") == "bubble: waiting for a stage 20.0 ms 15.0 ms 15.0%"
    assert line_with(shown, "other") == "other 5.00 ms -"
    assert line_with(shown, "a step  ") == "a step 90.0 ms 100 ms"
    assert line_with(shown, "memory") == "memory of a rank, at most 80.0 MB 90.0 MB"
    assert "Every rank sent what the plan says, to the byte, in the last step." in shown
    assert "calibrate" not in shown


def test_how_uneven_the_routing_was_is_told_where_experts_are_spread() -> None:
    assert "busiest" not in printed(*beside_report(report()))
    told = "the busiest expert rank had 1.50 times the mean's tokens"
    assert f"{told}; the plan beside the run is made for that." in " ".join(
        printed(*beside_report(report(imbalance=1.5))).split()
    )
    assert f"{told}." in " ".join(printed(*beside_report(unplanned(imbalance=1.5))).split())


def test_parts_that_neither_side_has_are_left_out() -> None:
    shown = printed(*beside_report(report()))
    assert all(words not in shown for words in ("TP", "last rank", "reading data"))


def test_without_a_cluster_the_run_stands_alone_and_it_says_what_would_help() -> None:
    shown = printed(*beside_report(unplanned(steps=1)))
    assert "a step on all ranks, one step" in " ".join(shown.split())
    assert line_with(shown, "compute") == "compute - 60.0 ms 60.0%"
    assert line_with(shown, "memory") == "memory of a rank, at most - 90.0 MB"
    assert "`fivefold calibrate` measures this machine" in shown


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
    shown = printed(*beside_report(report(ledger_differences=[row])))
    line = "rank 3: tp forward all_reduce of 4,096 bytes over 2: 0 calls predicted, 1 measured"
    assert line in shown
    assert "The last step did not send what the plan says." in shown
    assert "to the byte" not in shown


def test_one_process_has_no_messages_to_compare() -> None:
    shown = printed(*beside_report(report(ledger=[])))
    assert "sent" not in shown


def test_on_a_gpu_it_says_whose_clock_was_read() -> None:
    assert "Times are the host's" in printed(*beside_report(report(device="cuda")))
