"""The traffic of a mixture of 2T parameters, as UB-Mesh has it (arXiv:2503.20377, table 1):
TP 52.9 %, SP 44.1 %, EP 1.5 %, DP 1.3 %, PP 0.1 % of the bytes. Its SP is our CP.

Its model is not public; ours is the one of docs/planning.md, by the command that is shown there.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fivefold.plan.request import Options, parse_request
from fivefold.plan.result import make_plan
from fivefold.plan.result_json import to_json
from fivefold.report.plan_tables import traffic_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    (command,) = re.findall(
        r"<!-- run: fivefold plan (.*--cluster ub-mesh.*) -->", PAGE.read_text()
    )
    words = shlex.split(command)
    given = {
        name.removeprefix("--"): word for name, word in zip(words[::2], words[1::2], strict=True)
    }
    options = Options(
        model=given["dims"],
        cluster=given["cluster"],
        gpus=int(given["gpus"]),
        sequence_length=int(given["seq"]),
        global_batch=int(given["global-batch"]),
        layout=given["layout"],
    )
    return to_json(make_plan(parse_request(options)))


def test_the_model_is_a_mixture_of_16_experts_and_2t_parameters(planned):
    assert planned["model"]["total_params"] == pytest.approx(2e12, rel=0.05)
    assert planned["model"]["active_params"] < 0.16 * planned["model"]["total_params"]


def test_tp_and_cp_send_over_95_percent_and_then_ep_dp_and_pp(planned):
    sent = planned["order"]["wire_bytes"]
    assert sorted(sent, key=lambda split: -sent[split]) == ["tp", "cp", "ep", "dp", "pp"]
    share = {split: each / sum(sent.values()) for split, each in sent.items()}
    assert share["tp"] + share["cp"] > 0.95
    assert share["tp"] == pytest.approx(0.529, abs=0.05)
    assert share["cp"] == pytest.approx(0.441, abs=0.05)
    assert share["ep"] == pytest.approx(0.015, abs=0.015)
    assert share["dp"] == pytest.approx(0.013, abs=0.01)
    assert share["pp"] == pytest.approx(0.001, abs=0.002)


def test_in_the_ledger_too_tp_and_cp_send_over_95_percent(planned):
    rows = planned["layouts"][0]["ledger"]
    inside = sum(row["wire_bytes"] for row in rows if row["split"] in ("tp", "cp"))
    assert inside > 0.95 * sum(row["wire_bytes"] for row in rows)


def test_tp_and_cp_stay_inside_the_rack_and_the_others_cross_it(planned):
    order = planned["order"]
    assert order["tiers"]["tp"] == "board"
    assert order["tiers"]["cp"] == "rack"
    assert order["tiers"]["ep"] == order["tiers"]["dp"] == "row of racks"
    assert order["tiers"]["pp"] == "superpod"
    assert order["splits"] == ["tp", "cp", "ep", "dp", "pp"]
    assert "DP stays in row of racks and PP crosses superpod" in order["text"]


def test_the_table_has_a_line_for_each_split_with_its_share_and_tier(planned):
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(traffic_table(planned["layouts"][0], planned["order"]))
    lines = [line.split() for line in capture.get().splitlines() if "%" in line]
    assert [line[0] for line in lines] == ["TP", "CP", "EP", "DP", "PP"]
    shares = [float(word.rstrip("%")) for line in lines for word in line if word.endswith("%")]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.3)
    assert "board" in lines[0] and "rack" in lines[1] and "superpod" in lines[4]
