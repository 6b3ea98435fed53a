from __future__ import annotations

import copy
from typing import Any

import pytest

from fivefold.report.plan_report import MORE, plan_report
from fivefold.report.plan_tables import (
    layouts_table,
    memory_table,
    messages_table,
    neighbours_table,
    seconds_table,
    traffic_table,
)
from fivefold.report.text import format_seconds
from tests.helpers import line_with, printed

GIGA = 10**9


def ledger_row(split: str, op: str, sent: float, **changes: Any) -> dict[str, Any]:
    row = {
        "split": split,
        "phase": "forward",
        "op": op,
        "group_size": 8,
        "payload_bytes": sent,
        "calls": 1,
        "wire_bytes": sent,
        "tier": "nvlink",
        "time_s": 0.5,
        "exposed_s": 0.25,
        "stage": 0,
    }
    return row | changes


def stage(layers: int, weights: float) -> dict[str, Any]:
    return {
        "layers": [layers // 2] * 2,
        "in_flight": 4,
        "memory_bytes": {"weights": weights, "activations": 9.5 * GIGA},
    }


def layout(text: str = "tp8 sp pp2 dp4", **changes: Any) -> dict[str, Any]:
    return {
        "layout": text,
        "meaning": "64 devices",
        "devices": 64,
        "step_time_s": 7.921,
        "step_time_low_s": 7.3,
        "step_time_high_s": 8.6,
        "tokens_per_s_per_device": 1234.5,
        "model_flops_per_s_per_device": 4e14,
        "mfu": 0.412,
        "mfu_full_attention": 0.455,
        "bubble_fraction": 0.053,
        "peak_memory_bytes": 71.4 * GIGA,
        "peak_memory_low_bytes": 70 * GIGA,
        "peak_memory_high_bytes": 73 * GIGA,
        "worst_stage": 1,
        "verdict": "fits",
        "memory_bytes": {"weights": 20.0 * GIGA, "activations": 9.5 * GIGA},
        "seconds": {"compute": 6.0, "exposed_tp": 0.5, "slowed": -1e-9, "bubble": 0.4},
        "stages": [stage(40, 19.0 * GIGA), stage(40, 20.0 * GIGA)],
        "ledger": [
            ledger_row("tp", "all_gather", 75 * GIGA),
            ledger_row("tp", "all_gather", 21 * GIGA),
            ledger_row("dp", "reduce_scatter", 3 * GIGA, tier="network"),
            ledger_row("pp", "send", 1 * GIGA, tier="network"),
        ],
        "placement": {"tp": "nvlink", "dp": "network", "pp": "network"},
        "training_hours": None,
        "device_hours": None,
        "why": [{"split": "pp", "text": "PP 2: without it a device needs 1,204 GB, and has 80."}],
        **changes,
    }


def neighbour(change: str, verdict: str, **changes: Any) -> dict[str, Any]:
    return {
        "change": change,
        "layout": "tp4",
        "verdict": verdict,
        "step_time_s": 8.0,
        "step_time_ratio": 1.25,
        "peak_memory_bytes": 96.2 * GIGA,
        "reason": None,
        **changes,
    }


def answer(**changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "name": "llama",
            "total_params": 70_553_706_496,
            "active_params": 70_553_706_496,
            "flops_per_token": 4.4e11,
        },
        "cluster": {
            "name": "dgx-h100",
            "devices": 64,
            "device": "H100",
            "memory_bytes": 80 * GIGA,
            "tiers": [
                {"name": "nvlink", "devices": 8, "bandwidth_bytes_per_s": 450e9},
                {"name": "network", "devices": 64, "bandwidth_bytes_per_s": 50e9},
            ],
        },
        "job": {
            "global_batch": 1024,
            "sequence_length": 4096,
            "global_batch_tokens": 4194304,
            "precision": "bf16",
            "engine": "megatron",
            "memory_limit_bytes": 80 * GIGA,
            "checkpoint_bytes": 988 * GIGA,
            "loading_bytes": 40 * GIGA,
            "measured": [
                {
                    "layout": "tp8",
                    "step_time_s": 9.3,
                    "predicted_step_time_s": 8.0,
                    "ratio": 1.1625,
                }
            ],
            "measured_factor": 1.08,
        },
        "search": {
            "layouts": 1000,
            "legal": 500,
            "fit": 100,
            "seconds": 0.123,
            "skipped": 7,
            "near": 0.005,
        },
        "layouts": [layout(), layout("tp4 sp pp4 dp4", step_time_s=8.1, verdict="tight")],
        "best_found": None,
        "order": {
            "tiers": {"tp": "nvlink", "cp": "nvlink", "dp": "network", "pp": "network"},
            "text": "From the inner tier out: TP > DP > PP, not the usual.",
        },
        "neighbours": [
            neighbour("tp / 2", "no"),
            neighbour("tp x 2", "illegal", reason="tp 16 does not divide 8 heads"),
        ],
        "changes": [{"text": "With twice the global batch a token takes 0.98 x as long."}],
        "nothing_fits": None,
        "notes": ["sequence length 4,096 tokens, since --seq is not given"],
        **changes,
    }


def test_the_report_has_every_part_and_the_most_important_come_first():
    text = " ".join(printed(*plan_report(answer(), details=True)).split())
    parts = (
        "70.6 B parameters, 440 BFLOP per token",
        "nvlink 450 GB/s within 8, network 50 GB/s within 64",
        "measured tp8: 9.30 s; predicted: 8.00 s",
        "All predicted times are multiplied by 1.080.",
        "1,000 layouts, 500 legal, 7 skipped by a bound, 100 found to fit; 0.12 s",
        "The simplest of them comes first.",
        "Why PP 2: without it a device needs 1,204 GB",
        "Traffic of a device on pipeline rank 0 per step",
        "TP > DP > PP, not the usual",
        "Memory of a device by pipeline rank, GB",
        "The peak is expected between 70.0 GB and 73.0 GB. 80.0 GB is available.",
        "Messages of a device on pipeline rank 0 per step",
        "Where the step goes",
        "With full attention the first layout reaches 45.5%.",
        "One change away",
        "What would change the result With twice the global batch",
        "A checkpoint takes 988 GB. To read the weights, a node needs 40.0 GB of host memory.",
        "note: sequence length",
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), text


def test_details_are_left_out_until_they_are_wanted():
    text = printed(*plan_report(answer()))
    assert "Where the step goes" not in text and "One change away" not in text
    assert " ".join(MORE.split()) in " ".join(text.split())
    assert "--details" not in printed(*plan_report(answer(), details=True))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_report_is_whole_at_every_width(width):
    narrow, wide = (
        printed(*plan_report(answer(), details=True), width=each) for each in (width, 400)
    )
    assert max(map(len, narrow.splitlines())) <= width
    assert "…" not in narrow
    for cell in ("7.92 s (7.30-8.60)", "1,234", "41.2%", "71.4 GB", "all-gather", "500 ms"):
        assert narrow.count(cell) == wide.count(cell)


def test_each_layout_has_a_line_with_interval_verdict_and_bubble():
    text = printed(layouts_table(answer()))
    assert line_with(text, "tp8 sp") == (
        "1 tp8 sp pp2 dp4 7.92 s (7.30-8.60) 1,234 41.2% 71.4 GB fits 5.3%"
    )
    assert "tight" in line_with(text, "tp4 sp")


def test_device_hours_are_shown_when_the_training_has_a_length():
    rows = [layout(device_hours=123456.0)]
    text = printed(layouts_table(answer(layouts=rows)))
    assert "device-" in text and line_with(text, "tp8").endswith("123,456")


def test_layouts_on_fewer_devices_say_on_how_many():
    text = printed(layouts_table(answer(layouts=[layout(), layout("tp4", devices=32)])))
    assert line_with(text, "tp4").startswith("2 tp4 32 7.92 s")


def test_a_given_layout_is_compared_with_the_best():
    best = layout("tp4 pp2 dp8", step_time_s=7.0)
    text = printed(layouts_table(answer(layouts=[layout()], best_found=best)))
    assert line_with(text, "tp8 sp").startswith("given ")
    assert line_with(text, "tp4 pp2").startswith("best ")


def test_memory_has_a_column_per_pipeline_rank_and_the_fullest_is_marked():
    text = printed(memory_table(layout()))
    assert line_with(text, "pipeline rank") == "pipeline rank 0 (peak)"
    assert line_with(text, "layers") == "layers 2 x 20 2 x 20"
    assert line_with(text, "weights") == "weights 19.0 20.0"
    assert line_with(text, "total") == "total 28.5 29.5"


def test_of_many_stages_the_ends_and_the_fullest_are_shown():
    stages = [stage(2, GIGA * (30.0 if rank == 5 else 1.0)) for rank in range(32)]
    table = memory_table(layout(stages=stages, worst_stage=5))
    headers = [str(column.header) for column in table.columns]
    assert headers == ["pipeline rank", "0", "..", "4", "5\n(peak)", "6", "..", "31"]


def test_traffic_is_shown_by_split_with_shares_largest_first():
    text = printed(traffic_table(layout(), answer()["order"]))
    assert line_with(text, "TP") == "TP (sp) nvlink 2 48.0 GB 96.0 GB 96.0% 1.00 s 500 ms"
    assert line_with(text, "DP") == "DP network 1 3.00 GB 3.00 GB 3.0% 500 ms 250 ms"
    assert line_with(text, "total") == "total 4 100 GB 2.00 s 1.00 s"
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["TP", "DP", "PP"]


def test_messages_are_shown_by_operation_with_calls_and_bytes_per_call():
    text = printed(messages_table(layout()))
    assert line_with(text, "TP") == "TP (sp) all-gather forward 8 2 48.0 GB 96.0 GB nvlink"
    assert line_with(text, "PP") == "PP send forward 8 1 1.00 GB 1.00 GB network"


def test_in_the_sums_what_is_gathered_inside_a_tp_group_counts_as_tp():
    ring = ledger_row("cp", "send", 20 * GIGA)
    rows = [*layout()["ledger"], ring, ledger_row("ep", "all_gather", 1 * GIGA)]
    text = printed(traffic_table(layout(ledger=rows), answer()["order"]))
    assert [line.split()[0] for line in text.splitlines()[2:6]] == ["TP", "CP", "DP", "PP"]
    assert "97.0 GB" in line_with(text, "TP")
    assert "20.0 GB" in line_with(text, "CP")


def test_a_neighbour_that_leaves_too_little_free_is_tight():
    row = {**answer()["neighbours"][0], "verdict": "tight", "peak_memory_bytes": 82 * GIGA}
    assert line_with(printed(neighbours_table([row])), "tp / 2").endswith("82.0 GB tight")


def test_a_neighbour_costs_time_or_does_not_fit_or_is_illegal():
    text = printed(neighbours_table(answer()["neighbours"]))
    assert line_with(text, "tp / 2") == "tp / 2 +25.0% 96.2 GB does not fit"
    assert line_with(text, "tp x 2") == "tp x 2 - - tp 16 does not divide 8 heads"


def test_names_are_no_markup():
    changed = copy.deepcopy(answer())
    changed["model"]["name"] = "[red]x[/red]"
    changed["cluster"]["name"] = "[/]"
    changed["layouts"][0]["layout"] = "[bold]tp8[/bold]"
    changed["layouts"][0]["ledger"][0]["tier"] = "[blink]tier"
    changed["neighbours"][1]["reason"] = "[/bold] is no layout"
    changed["notes"] = ["[dim]a[/dim]"]
    text = printed(*plan_report(changed, details=True))
    for name in ("[red]x[/red]", "[/]:", "[bold]tp8[/bold]", "[blink]tier", "[/bold] is", "[dim]a"):
        assert name in text


def test_what_else_helps_is_listed_when_nothing_fits():
    shortage = {
        "text": ["Nothing fits 8 devices.", "States alone are 1,300 GB."],
        "helps": [
            {"change": "LoRA", "peak_memory_bytes": 20 * GIGA, "fits": True, "layout": None},
            {"change": "host", "peak_memory_bytes": 99 * GIGA, "fits": False, "layout": "tp8"},
        ],
    }
    text = printed(*plan_report(answer(layouts=[], nothing_fits=shortage)))
    assert "Nothing fits 8 devices.\n" in text
    assert line_with(text, "LoRA") == "LoRA 20.0 GB fits"
    assert line_with(text, "host") == "host 99.0 GB OVER tp8"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (7.921, "7.92 s"),
        (123.4, "123 s"),
        (0.9996, "1.00 s"),
        (0.312, "312 ms"),
        (4.5e-5, "45.0 us"),
        (1e-9, "0.00 us"),
    ],
)
def test_seconds_have_three_digits(seconds, text):
    assert format_seconds(seconds) == text


def test_the_parts_of_a_step_are_named_and_tiny_ones_left_out():
    lines = [" ".join(line.split()) for line in printed(seconds_table(layout())).splitlines()[2:]]
    assert lines[:2] == ["compute 6.00 s 75.7%", "TP, exposed 500 ms 6.3%"]
    assert lines[2:] == ["bubble (waiting for a stage) 400 ms 5.0%", "", "step 7.92 s"]
