from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.errors import UserError
from fivefold.layout.notation import parse
from fivefold.model.huggingface.presets import preset_names
from fivefold.plan.intervals import calibrate_with_measurements
from fivefold.plan.planfile import load, save
from fivefold.plan.request import Options, parse_request
from fivefold.plan.result import make_plan
from fivefold.plan.result_json import to_json
from fivefold.plan.search.ranking import TIE_TOLERANCE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")

NODES = "989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s"
"""Nodes of eight 80 GB devices, in round numbers."""

KEYS = {
    "": {
        "version",
        "model",
        "cluster",
        "job",
        "search",
        "layouts",
        "best_found",
        "order",
        "neighbours",
        "changes",
        "nothing_fits",
        "notes",
    },
    "model": {
        "name",
        "family",
        "total_params",
        "active_params",
        "flops_per_token",
        "flops_per_token_full_attention",
        "layers",
        "mtp_params",
    },
    "cluster": {
        "name",
        "devices",
        "device",
        "memory_bytes",
        "memory_bandwidth_bytes_per_s",
        "peak_flops_per_s",
        "tiers",
    },
    "cluster.tiers[]": {
        "name",
        "devices",
        "shape",
        "bandwidth_bytes_per_s",
        "oversubscription",
    },
    "job": {
        "sequence_length",
        "global_batch",
        "global_batch_tokens",
        "precision",
        "engine",
        "mtp",
        "imbalance",
        "offload",
        "objective",
        "fix",
        "forbid",
        "tokens",
        "checkpoint_bytes",
        "loading_bytes",
        "memory_limit_bytes",
        "measured",
        "measured_factor",
    },
    "job.measured[]": {"layout", "step_time_s", "predicted_step_time_s", "ratio"},
    "search": {"layouts", "legal", "fit", "skipped", "near", "seconds"},
    "layouts[]": {
        "layout",
        "meaning",
        "devices",
        "step_time_s",
        "step_time_low_s",
        "step_time_high_s",
        "tokens_per_s_per_device",
        "model_flops_per_s_per_device",
        "mfu",
        "mfu_full_attention",
        "bubble_fraction",
        "peak_memory_bytes",
        "peak_memory_low_bytes",
        "peak_memory_high_bytes",
        "worst_stage",
        "verdict",
        "memory_bytes",
        "seconds",
        "stages",
        "ledger",
        "placement",
        "training_hours",
        "device_hours",
        "why",
    },
    "layouts[].ledger[]": {
        "split",
        "phase",
        "op",
        "group_size",
        "payload_bytes",
        "calls",
        "wire_bytes",
        "tier",
        "time_s",
        "exposed_s",
        "stage",
    },
    "layouts[].stages[]": {"layers", "memory_bytes", "in_flight", "forward_s", "backward_s"},
    "layouts[].why[]": {"split", "text", "peak_memory_bytes", "step_time_ratio"},
    "order": {"splits", "tiers", "wire_bytes", "usual", "text"},
    "neighbours[]": {
        "change",
        "layout",
        "verdict",
        "step_time_s",
        "step_time_ratio",
        "peak_memory_bytes",
        "reason",
    },
    "changes[]": {"change", "text", "step_time_ratio"},
    "nothing_fits": {
        "limit_bytes",
        "closest",
        "state_bytes",
        "bounds",
        "smallest_gpus",
        "smallest_gpus_to_spare",
        "helps",
        "text",
    },
    "nothing_fits.closest[]": {"layout", "peak_memory_bytes"},
    "nothing_fits.bounds[]": {"bytes_per_parameter", "devices"},
    "nothing_fits.helps[]": {"change", "peak_memory_bytes", "fits", "layout"},
}
"""The keys of `plan --json`: whoever reads them relies on each."""


@cache
def planned(**options: Any) -> dict[str, Any]:
    """The answer as `--json` prints it."""
    result = to_json(make_plan(parse_request(Options(**{"cluster": NODES, **options}))))
    return json.loads(json.dumps(result))


def keys_at(data: Any, path: str) -> list[set[str]]:
    """The key sets of all objects at a path such as `layouts[].ledger[]`."""
    objects = [data]
    for part in filter(None, path.split(".")):
        objects = [each[part.removesuffix("[]")] for each in objects]
        if part.endswith("[]"):
            objects = [item for each in objects for item in each]
    return [set(each) for each in objects if each is not None]


@pytest.mark.parametrize("path", KEYS)
def test_the_keys_are_stable(path):
    if path.startswith("nothing_fits"):
        result = planned(model="llama-3.1-70b", gpus=8)
    else:
        result = planned(model="llama-3.1-8b", gpus=16, measured=("dp16 zero1=9.31s",))
    found = keys_at(result, path)
    assert found and all(each == KEYS[path] for each in found)


@pytest.mark.parametrize("path", [path for path in KEYS if "." not in path])
def test_the_page_names_every_key(path):
    assert all(f"`{key}`" in PAGE for key in KEYS[path])


def test_the_checkpoint_and_the_memory_for_loading_are_those_of_the_model():
    job = planned(model="llama-3.1-8b", gpus=16)["job"]
    assert (
        job["checkpoint_bytes"]
        == 14 * planned(model="llama-3.1-8b", gpus=16)["model"]["total_params"]
    )
    assert job["loading_bytes"] == 8 * 5e9  # a file for each device of a node


def test_equal_requests_have_equal_answers():
    def once() -> str:
        options = Options(model="qwen3-30b-a3b", cluster=NODES, gpus=16)
        result: dict[str, Any] = to_json(make_plan(parse_request(options)))
        result["search"].pop("seconds")
        return json.dumps(result)

    assert once() == once()


def test_numbers_of_a_layout_agree_with_each_other():
    result = planned(model="llama-3.1-8b", gpus=16, tokens="15T")
    first, job = result["layouts"][0], result["job"]
    step_tokens = job["global_batch_tokens"]
    a_device = step_tokens / first["step_time_s"] / 16
    assert first["tokens_per_s_per_device"] == pytest.approx(a_device)
    flops = a_device * result["model"]["flops_per_token"]
    assert first["model_flops_per_s_per_device"] == pytest.approx(flops)
    assert first["mfu"] == pytest.approx(flops / 989e12)
    assert sum(first["seconds"].values()) == pytest.approx(first["step_time_s"])
    worst = first["stages"][first["worst_stage"]]["memory_bytes"]
    assert sum(worst.values()) == pytest.approx(first["peak_memory_bytes"])
    hours = 15e12 / step_tokens * first["step_time_s"] / 3600
    assert first["device_hours"] == pytest.approx(16 * hours)
    assert parse(first["layout"]).world_size == 16
    assert parse(first["layout"]).global_batch == job["global_batch"]


def simplest_first(numbers: list[float]) -> bool:
    """Ordered, but for the first, which may be simpler and a little slower than the best."""
    first, *others = numbers
    return others == sorted(others) and first <= min(numbers) * (1 + TIE_TOLERANCE)


def test_the_list_is_ordered_by_step_time_and_the_others_are_held_against_the_first():
    layouts = planned(model="llama-3.1-8b", gpus=16)["layouts"]
    steps = [each["step_time_s"] for each in layouts]
    assert simplest_first(steps) and len(steps) == 5
    ratio = layouts[1]["why"][0]["step_time_ratio"]
    assert ratio == pytest.approx(steps[1] / steps[0])


def test_the_objective_memory_asks_for_the_least():
    by_time = planned(model="llama-3.1-8b", gpus=16)["layouts"][0]
    by_memory = planned(model="llama-3.1-8b", gpus=16, objective="memory")["layouts"][0]
    assert by_memory["peak_memory_bytes"] < by_time["peak_memory_bytes"]


def test_the_objective_cost_may_take_fewer_devices():
    layouts = planned(model="llama-3.1-8b", gpus=64, objective="cost", tokens="1T")["layouts"]
    hours = [each["device_hours"] for each in layouts]
    assert simplest_first(hours)
    assert all(each["devices"] == parse(each["layout"]).world_size for each in layouts)
    assert {each["devices"] for each in layouts} - {64}


def test_a_measured_step_scales_all_times_and_keeps_the_order():
    plain = planned(model="llama-3.1-8b", gpus=16)
    second, asked = plain["layouts"][1], plain["layouts"][0]
    seconds = 1.25 * second["step_time_s"]
    scaled = planned(model="llama-3.1-8b", gpus=16, measured=(f"{second['layout']}={seconds}s",))
    (measured,) = scaled["job"]["measured"]
    assert measured["ratio"] == pytest.approx(1.25)
    factor = scaled["job"]["measured_factor"]
    assert factor == calibrate_with_measurements([(1.25, 1.0)]).factor
    first = scaled["layouts"][0]
    assert first["layout"] == asked["layout"]
    assert first["step_time_s"] == pytest.approx(factor * asked["step_time_s"])
    assert first["mfu"] == pytest.approx(asked["mfu"] / factor)
    assert sum(first["seconds"].values()) == pytest.approx(first["step_time_s"])
    for name in ("time_s", "exposed_s"):
        assert first["ledger"][0][name] == pytest.approx(factor * asked["ledger"][0][name])
    assert first["peak_memory_bytes"] == asked["peak_memory_bytes"]


def test_a_measured_step_narrows_the_interval():
    plain, other = planned(model="llama-3.1-8b", gpus=16)["layouts"][:2]
    line = f"{other['layout']}={other['step_time_s']}s"
    sharp = planned(model="llama-3.1-8b", gpus=16, measured=(line,))["layouts"][0]
    before, after = (
        math.log(each["step_time_high_s"] / each["step_time_low_s"]) for each in (plain, sharp)
    )
    assert after < before
    assert after == pytest.approx(calibrate_with_measurements([(1.0, 1.0)]).narrower * before)


def test_a_measured_layout_is_shown_with_what_was_measured():
    layout = planned(model="llama-3.1-8b", gpus=16)["layouts"][0]["layout"]
    options = {"model": "llama-3.1-8b", "gpus": 16, "layout": layout}
    (once,) = planned(**options, measured=(f"{layout}=50s",))["layouts"]
    assert [once[f"step_time{end}_s"] for end in ("", "_low", "_high")] == [50.0] * 3
    assert sum(once["seconds"].values()) == pytest.approx(50.0)
    (twice,) = planned(**options, measured=(f"{layout}=50s", f"{layout}=52s"))["layouts"]
    assert [twice[f"step_time{end}_s"] for end in ("", "_low", "_high")] == [51.0, 50.0, 52.0]
    listed = planned(model="llama-3.1-8b", gpus=16, measured=(f"{layout}=50s",))["layouts"]
    steps = {each["layout"]: each["step_time_s"] for each in listed}
    assert steps.get(layout, 50.0) == 50.0 and [*steps.values()] == sorted(steps.values())


def test_a_measured_step_far_from_its_prediction_is_doubted():
    first = planned(model="llama-3.1-8b", gpus=16)["layouts"][0]
    for factor, doubted in [(2.9, False), (3.1, True), (0.34, False), (0.32, True)]:
        line = f"{first['layout']}={first['step_time_s'] * factor:.6f}s"
        notes = planned(model="llama-3.1-8b", gpus=16, measured=(line,))["notes"]
        assert any("times the predicted one" in note for note in notes) == doubted


# --- one layout ----------------------------------------------------------------------------------


def test_one_layout_is_held_against_the_best_that_is_found():
    result = planned(model="llama-3.1-8b", gpus=8, layout="tp8")
    (asked,) = result["layouts"]
    best = result["best_found"]
    assert asked["layout"] == "tp8 ga1024"
    assert best["step_time_s"] < asked["step_time_s"]
    why = asked["why"][0]
    assert why["step_time_ratio"] == pytest.approx(asked["step_time_s"] / best["step_time_s"])
    assert best["layout"] in why["text"]


def test_the_best_layout_is_said_to_be_the_best():
    best = planned(model="llama-3.1-8b", gpus=8)["layouts"][0]["layout"]
    asked = planned(model="llama-3.1-8b", gpus=8, layout=best)["layouts"][0]
    assert asked["why"][0]["text"] == "This is the best layout that the search found."


def test_a_layout_over_memory_is_shown_and_said_not_to_fit():
    result = planned(model="llama-2-70b", gpus=32, layout="tp8 dp4 zero1")
    (asked,) = result["layouts"]
    assert asked["verdict"] == "no" and asked["peak_memory_bytes"] > 77.6e9
    assert any(
        each["text"].startswith("It does not fit: pipeline rank 0 needs") for each in asked["why"]
    )


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [
        ({"max_memory": "400GB"}, "fits"),
        ({"max_memory": "120GB"}, "fits"),
        ({"max_memory": "115GB"}, "tight"),
        ({"max_memory": "100GB"}, "no"),
        ({"max_memory": "120GB", "headroom": "20%"}, "no"),
        ({}, "no"),
    ],
)
def test_the_verdict_is_by_the_limit_that_was_asked_for(limit, verdict):
    """110 GB on devices of 80."""
    options = {"model": "llama-3.1-8b", "gpus": 8, "layout": "dp8 zero1 mb2"}
    result = planned(**options, **limit)
    (asked,) = result["layouts"]
    assert 106e9 < asked["peak_memory_bytes"] < 110.4e9 and asked["verdict"] == verdict
    does_not_fit = any(each["text"].startswith("It does not fit") for each in asked["why"])
    assert does_not_fit == (verdict == "no")


def test_neighbours_take_as_long_as_when_they_are_asked_about():
    options = {"model": "llama-3.1-70b", "gpus": 64}
    result = planned(**options, layout="tp4 sp pp4 vpp4 zero1")
    first = result["layouts"][0]["step_time_s"]
    for change in ("zero0", "pp x 2", "vpp / 2"):
        found = next(each for each in result["neighbours"] if each["change"] == change)
        (asked,) = planned(**options, layout=found["layout"])["layouts"]
        assert found["step_time_ratio"] == pytest.approx(asked["step_time_s"] / first, rel=1e-6)
        assert found["step_time_s"] == pytest.approx(asked["step_time_s"])
        assert found["verdict"] == asked["verdict"]


def test_no_bubble_is_negative():
    for layout in ("tp4 sp pp4 vpp4 zero1", "pp8 vpp10 dp8 mb1", "tp8 sp pp8"):
        (asked,) = planned(model="llama-3.1-70b", gpus=64, layout=layout)["layouts"]
        assert asked["bubble_fraction"] >= 0


def test_an_illegal_layout_is_refused_with_every_rule_it_breaks():
    with pytest.raises(UserError, match=r"71 attention heads.*the model has 32"):
        planned(model="falcon-7b", gpus=128, layout="tp2 pp64")


# --- a plan file ---------------------------------------------------------------------------------


def test_a_plan_file_holds_the_first_layout(tmp_path):
    request = parse_request(Options(model="llama-3.1-8b", cluster=NODES, gpus=16))
    result = make_plan(request)
    save(result.plan_file(), tmp_path / "plan.yaml")
    plan = load(tmp_path / "plan.yaml")
    assert str(plan.parsed_layout()) == str(result.layouts[0].estimate.layout)
    assert (plan.model, plan.gpus, plan.gpus_per_node) == ("llama-3.1-8b", 16, 8)
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == result.layouts[0].estimate.step_time_s


def test_there_is_no_plan_file_when_nothing_fits():
    request = parse_request(Options(model="llama-3.1-70b", cluster=NODES, gpus=8))
    with pytest.raises(UserError, match="nothing fits"):
        make_plan(request).plan_file()


# --- cases from the field ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "bounds"),
    [
        ("llama-3.1-405b", (82, 92)),
        ("glm-4.5", (71, 80)),
        ("deepseek-v3", (135, 151)),
        ("kimi-k2", (206, 231)),
        ("qwen3-235b-a22b", (48, 53)),
        ("gpt-oss-120b", (24, 27)),
        ("llama-3.1-70b", (15, 16)),
        ("mixtral-8x7b", (10, 11)),
    ],
)
def test_states_alone_say_how_many_devices_are_too_few(model, bounds):
    """Users of DeepSeek-V3, Kimi-K2 and others guess 32 to 64 GPUs (deepseek-ai/DeepSeek-V3
    issues 109, 295 and 577)."""
    shortage = planned(model=model, gpus=8)["nothing_fits"]
    found = {each["bytes_per_parameter"]: each["devices"] for each in shortage["bounds"]}
    assert (found[16], found[18]) == bounds
    text = " ".join(shortage["text"])
    assert "Infeasible: " in text
    assert f"At least {bounds[1]:,} GPUs ({bounds[0]:,} with 16 B/parameter) are needed." in text
    assert shortage["closest"][0]["peak_memory_bytes"] > 0.9 * 80e9
    assert shortage["smallest_gpus"] >= bounds[1]
    changes = " ".join(each["change"] for each in shortage["helps"])
    assert "host memory" in changes and "bf16" in changes and "LoRA" in changes


def test_the_smallest_number_of_devices_has_a_layout_that_fits():
    shortage = planned(model="llama-3.1-70b", gpus=8)["nothing_fits"]
    enough = planned(model="llama-3.1-70b", gpus=shortage["smallest_gpus"])
    assert enough["layouts"] and enough["layouts"][0]["verdict"] != "no"
    assert planned(model="llama-3.1-70b", gpus=shortage["smallest_gpus"] - 8)["nothing_fits"]


def test_fewer_devices_may_do_with_less_to_spare():
    """Llama-3.1-70B fits 16 devices of 85.5 GB, tightly, and 24 with the usual headroom."""
    options = {"model": "llama-3.1-70b", "cluster": "h100:8x450GB/s,50GB/s"}
    shortage = planned(**options, gpus=8)["nothing_fits"]
    tight, spare = shortage["smallest_gpus"], shortage["smallest_gpus_to_spare"]
    assert tight < spare and shortage["text"][-1] == (
        f"In full nodes, at least {tight} GPUs are needed for a layout to fit. The fit is tight "
        f"there, with less than 8% free; with {spare} GPUs it is not."
    )
    assert planned(**options, gpus=tight)["layouts"][0]["verdict"] == "tight"
    assert planned(**options, gpus=spare)["layouts"][0]["verdict"] == "fits"


def test_qwen3_235b_does_not_fit_64_devices_as_users_try_it():
    """tp2 pp2 ep32, S = 4096 (verl-project/verl pull 1467): 63.9 GB of experts and 13.5 GB of the
    rest are on each device before any activation."""
    result = planned(model="qwen3-235b-a22b", gpus=64, layout="tp2 sp pp2 ep32 zero1")
    (asked,) = result["layouts"]
    states = sum(asked["memory_bytes"][kind] for kind in ("weights", "gradients", "optimizer"))
    assert asked["verdict"] == "no"
    assert states == pytest.approx(77.4e9, rel=0.03)
    assert {"pp x 2", "recompute=full"} <= {each["change"] for each in result["neighbours"]}


def test_tp_is_not_proposed_across_nodes():
    """Llama-3.1-70B, S = 8192, two nodes of eight (NVIDIA/Megatron-LM issue 258)."""
    options = {"model": "llama-3.1-70b", "gpus": 16, "sequence_length": 8192, "global_batch": 16}
    result = planned(**options, max_memory="1TB")
    assert all(parse(each["layout"]).tp <= 8 for each in result["layouts"])
    asked = planned(**options, max_memory="1TB", layout="tp8 sp pp2")
    wide = next(n for n in asked["neighbours"] if n["change"] == "tp x 2, pp / 2")
    assert wide["layout"].startswith("tp16 sp") and wide["step_time_ratio"] > 1.1


# --- every model on three clusters ---------------------------------------------------------------


@pytest.mark.parametrize(
    "cluster",
    [
        "dgx-h100",
        pytest.param("mi300x", marks=pytest.mark.slow),
        pytest.param("dgx-a100", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("model", [name for name in preset_names() if "megatron" not in name])
def test_every_model_has_an_answer_or_a_reasoned_no(capsys, model, cluster):
    code = main(["plan", model, "--cluster", cluster, "--gpus", "16", "--top", "1", "--json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    if result["nothing_fits"]:
        assert code == 1 and result["layouts"] == []
        assert result["nothing_fits"]["text"] and result["nothing_fits"]["smallest_gpus"]
        return
    (first,) = result["layouts"]
    assert code == 0 and first["verdict"] in ("fits", "tight")
    assert 0 < first["mfu"] < 1 and math.isfinite(first["step_time_s"])
    assert first["why"] and result["neighbours"] and result["order"]["text"]
