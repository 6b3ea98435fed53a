from __future__ import annotations

import copy
from typing import Any

import pytest

from fivefold.report.plan_tables import (
    format_seconds,
    layouts_table,
    neighbours_table,
    plan_report,
    seconds_table,
    stages_table,
    traffic_table,
)
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


def test_the_report_fits_in_100_columns_and_has_every_part():
    text = printed(*plan_report(answer()))
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "70.6 B parameters; 440 BFLOP",
        "8 over nvlink at 450 GB/s, then 64 over network at 50 GB/s",
        "1,000 layouts, 500 legal, 7 ruled out by a bound, 100 seen to fit; 0.12 s",
        "measured tp8: 9.30 s, predicted 8.00 s",
        "all times are predicted 1.080 x as long",
        "its limit is 80.0",
        "A checkpoint takes 988 GB; reading the weights, 40.0 GB of a node's memory.",
        "MFU counts causal attention",
        "the first has 45.5%",
        "TP > DP > PP, not the usual",
        "without it a device needs 1,204 GB",
        "With twice the global batch",
        "note: sequence length",
    ):
        assert part in text, text


def test_each_layout_has_a_line_with_interval_verdict_and_bubble():
    text = printed(layouts_table(answer()))
    assert line_with(text, "tp8 sp") == (
        "1 tp8 sp pp2 dp4 7.92 s (7.30-8.60) 1,234 41.2% 71.4 GB fits 5.3%"
    )
    assert "tight" in line_with(text, "tp4 sp")


def test_gpu_hours_are_shown_when_the_training_has_a_length():
    rows = [layout(device_hours=123456.0)]
    text = printed(layouts_table(answer(layouts=rows)))
    assert "GPU-hours" in text and line_with(text, "tp8").endswith("123,456")


def test_layouts_on_fewer_devices_say_on_how_many():
    text = printed(layouts_table(answer(layouts=[layout(), layout("tp4", devices=32)])))
    assert line_with(text, "tp4").startswith("2 tp4 32 7.92 s")


def test_the_layout_that_was_asked_about_stands_beside_the_best():
    best = layout("tp4 pp2 dp8", step_time_s=7.0)
    text = printed(layouts_table(answer(layouts=[layout()], best_found=best)))
    assert line_with(text, "tp8 sp").startswith("asked ")
    assert line_with(text, "tp4 pp2").startswith("best ")


def test_the_worst_stage_is_marked():
    text = printed(stages_table(layout()))
    assert line_with(text, "worst") == "1 2 x 20 4 20.0 9.5 29.5 worst"


def test_of_many_stages_the_ends_and_the_worst_are_shown():
    stages = [stage(2, GIGA * (30.0 if rank == 5 else 1.0)) for rank in range(32)]
    text = printed(stages_table(layout(stages=stages, worst_stage=5)))
    ranks = [line.split()[0] for line in text.splitlines()[2:]]
    assert ranks == ["0", "1", "..", "4", "5", "6", "..", "30", "31"]


def test_traffic_is_shown_by_split_with_shares_largest_first():
    text = printed(traffic_table(layout(), answer()["order"]))
    assert line_with(text, "TP", "all-gather") == (
        "TP (sp) all-gather, forward 8 96.0 GB 96.0% nvlink 1.00 s 500 ms"
    )
    assert line_with(text, "DP", "in all") == "DP in all 3.00 GB 3.0% network 500 ms 250 ms"


def test_in_the_sums_what_is_gathered_inside_a_tp_group_counts_as_tp():
    ring = ledger_row("cp", "send", 20 * GIGA)
    rows = [*layout()["ledger"], ring, ledger_row("ep", "all_gather", 1 * GIGA)]
    text = printed(traffic_table(layout(ledger=rows), answer()["order"]))
    totals = [line.split()[0] for line in text.splitlines() if "in all" in line]
    assert totals == ["TP", "CP", "DP", "PP"]
    assert "97.0 GB" in line_with(text, "TP", "in all")
    assert "20.0 GB" in line_with(text, "CP", "in all")


def test_a_neighbour_that_leaves_too_little_free_is_tight():
    row = {**answer()["neighbours"][0], "verdict": "tight", "peak_memory_bytes": 82 * GIGA}
    text = printed(neighbours_table([row], 80 * GIGA))
    assert "82.0 GB tight: 82.0 GB of 80.0" in line_with(text, "tp / 2")


def test_a_neighbour_costs_a_ratio_or_does_not_fit_or_is_illegal():
    text = printed(neighbours_table(answer()["neighbours"], 80 * GIGA))
    assert line_with(text, "tp / 2") == "tp / 2 1.250 x 96.2 GB does not fit: 96.2 GB of 80.0"
    assert line_with(text, "tp x 2") == "tp x 2 - - tp 16 does not divide 8 heads"


def test_names_are_no_markup():
    changed = copy.deepcopy(answer())
    changed["model"]["name"] = "[red]x[/red]"
    changed["cluster"]["name"] = "[/]"
    changed["layouts"][0]["layout"] = "[bold]tp8[/bold]"
    changed["layouts"][0]["ledger"][0]["tier"] = "[blink]tier"
    changed["neighbours"][1]["reason"] = "[/bold] is no layout"
    changed["notes"] = ["[dim]a[/dim]"]
    text = printed(*plan_report(changed))
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
    assert line_with(text, "host") == "host 99.0 GB over tp8"


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
    assert lines == ["compute 6.00 s 75.7%", "TP, exposed 500 ms 6.3%", "bubble 400 ms 5.0%"]
