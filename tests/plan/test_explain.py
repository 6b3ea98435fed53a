from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.cluster.load import load_cluster
from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.notation import Layout, parse
from fivefold.model.huggingface.presets import load_model
from fivefold.plan import explain
from fivefold.plan import neighbours as one_change_away
from fivefold.plan.engines import Job
from fivefold.plan.estimate import LedgerRow
from fivefold.plan.explain import found_order, justify_splits
from fivefold.plan.neighbours import Neighbour, Outcome, neighbours, refit

LIMIT = 80e9
LINE = "989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s"


def job(model: str = "llama-3.1-70b", gpus: int = 64, batch: int = 64, **changes) -> Job:
    return Job(load_model(model), load_cluster(LINE, gpus), 4096, batch, **changes)


def layout(text: str, gpus: int = 64, batch: int = 64) -> Layout:
    return with_global_batch(parse(text, gpus), batch)


@pytest.fixture
def costs(monkeypatch):
    """Stands in for the planner's arithmetic: (step seconds, GB) by the line of the layout."""
    known: dict[str, tuple[float, float]] = {}

    def outcomes(job, layouts):
        rest = known.get("", (1.0, 10.0))
        found = [known.get(str(each), rest) for each in layouts]
        return [Outcome(step, memory * 1e9) for step, memory in found]

    for module in (explain, one_change_away):
        monkeypatch.setattr(module, "outcomes", outcomes)
    return known


# --- the layout with something changed -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("tp8 sp pp2 zero1", {"tp": 4}, "tp4 sp pp2 dp8 zero1 ga8"),
        ("tp8 sp pp2 zero1", {"tp": 1}, "pp2 dp32 zero1 ga2"),
        ("tp8 pp2 vpp2 dp4", {"pp": 1}, "tp8 dp8 ga8"),
        ("tp8 pp4 dp2 zero1", {"pp": 8}, "tp8 pp8 ga64"),
        ("tp4 pp2 dp8 zero1 mb2", {"tp": 2, "pp": 1}, "tp2 dp32 zero1 mb2"),
        ("tp2 pp1 dp32 mb2", {"tp": 1}, "dp64"),
        ("tp4 pp4 vpp4 dp4", {"pp": 16}, "tp4 pp16 vpp4 ga64"),
        ("tp4 pp4 vpp8 dp4", {"pp": 16}, "tp4 pp16 vpp4 ga64"),
        ("tp2 pp4 vpp2 dp8", {"pp": 2, "tp": 1}, "pp2 dp32 vpp2 ga2"),
    ],
)
def test_other_degrees_keep_devices_and_batch_and_drop_what_has_no_meaning(text, changes, expected):
    assert refit(job(), layout(text), **changes) == parse(expected)


# --- neighbours ----------------------------------------------------------------------------------


def test_a_neighbour_is_cheaper_dearer_over_memory_or_illegal(costs):
    chosen = layout("tp8 sp pp2")
    costs[str(chosen)] = (2.0, 70.0)
    costs["tp4 sp pp2 dp8 ga8"] = (1.5, 96.2)
    costs["tp8 sp pp4 dp2 ga32"] = (3.0, 50.0)
    found = {each.change: each for each in neighbours(job(), chosen, LIMIT)}
    assert (found["tp / 2"].verdict, found["tp / 2"].step_time_ratio) == ("no", 0.75)
    assert (found["pp x 2"].verdict, found["pp x 2"].step_time_ratio) == ("fits", 1.5)
    assert str(found["pp x 2"].layout) == "tp8 sp pp4 dp2 ga32"
    for change in ("no tp", "no pp", "no sp", "tp x 2", "zero1", "recompute=full", "mb x 2"):
        assert change in found
    assert "ep x 2" not in found  # a dense model


def test_illegal_neighbours_say_which_rule_they_break_and_come_last(costs):
    found = neighbours(job("falcon-7b"), layout("pp8"), LIMIT)
    illegal = [each for each in found if each.verdict == "illegal"]
    assert illegal and found[-len(illegal) :] == illegal
    reasons = {each.change: each.reason or "" for each in illegal}
    assert "tp 2 does not divide 71 attention heads" in reasons["tp x 2"]


def test_neighbours_that_need_more_devices_are_left_out(costs):
    found = neighbours(job(), layout("tp8 sp pp8"), LIMIT)
    assert not {"tp x 2", "pp x 2"} & {each.change for each in found}


def test_a_batch_that_does_not_divide_makes_a_neighbour_illegal(costs):
    found = neighbours(job(batch=8), layout("tp8 dp8", batch=8), LIMIT)
    halved = next(each for each in found if each.change == "tp / 2")
    assert halved.reason == "dp 16 does not divide the global batch of 8 sequences"


def test_a_mixture_has_neighbours_in_its_experts(costs):
    found = neighbours(job("mixtral-8x7b"), layout("tp2 ep4 dp32"), LIMIT)
    assert {"no ep", "ep / 2", "ep x 2", "etp=tp"} <= {each.change for each in found}


# --- why -----------------------------------------------------------------------------------------


def test_the_first_reason_is_whether_the_model_fits_one_device(costs):
    costs["dp1"] = (1.0, 1204.0)
    first = justify_splits(job(), layout("tp8 sp pp2"), LIMIT)[0]
    assert first.text == (
        "The model does not fit on one GPU: it would need 1,204 GB; 80 GB is available."
    )
    costs["dp1"] = (1.0, 30.0)
    assert (
        "data parallelism alone is enough" in justify_splits(job(), layout("dp64"), LIMIT)[0].text
    )


def test_each_split_is_there_for_memory_for_time_or_for_the_batch(costs):
    chosen = layout("tp8 sp pp2 zero1")
    costs[""] = (1.0, 50.0)
    costs["tp8 sp dp8 zero1 ga8"] = (1.1, 96.0)
    costs["pp2 dp32 zero1 ga2"] = (1.31, 60.0)
    costs["tp8 pp2 dp4 zero1 ga16"] = (1.001, 60.0)
    costs["tp8 sp pp2 ga16"] = (1.001, 50.1)
    why = {reason.split: reason for reason in justify_splits(job(), chosen, LIMIT)}
    assert why["pp"].text == "PP 2: without it each GPU would need 96.0 GB; 80 GB is available."
    assert why["pp"].peak_memory_bytes == 96e9
    assert why["tp"].text == "TP 8: without it a step would take 31% longer."
    assert why["sp"].text == "TP (sp): without it each GPU would need 10.0 GB more."
    assert "zero" not in why  # what saves nothing is no reason
    few = justify_splits(job(batch=4), layout("tp8 sp pp2", batch=4), LIMIT)
    assert few[1].text == (
        "TP 8: the layout without it is not legal: dp 32 does not divide the global batch of 4 "
        "sequences."
    )


# --- the order of the splits ---------------------------------------------------------------------


def row(split: str, tier: str, wire_bytes: float, op: str = "all_reduce") -> LedgerRow:
    return LedgerRow(split, "forward", op, 2, wire_bytes, 1, wire_bytes, tier, 0.0, 0.0, 0)


def test_the_usual_order_is_said_to_be_usual():
    rows = [row("dp", "leaf", 1e9), row("pp", "leaf", 2e9), row("tp", "nvlink", 9e9)]
    found = found_order(rows, ["nvlink", "leaf"])
    assert (found.splits, found.usual) == (["tp", "pp", "dp"], True)
    assert found.text == "Splits by network tier, innermost first: TP, PP, DP (the usual order)."


def test_another_order_names_the_two_splits_and_their_bytes():
    rows = [row("dp", "leaf", 20e9), row("pp", "leaf", 1e9), row("tp", "nvlink", 9e9)]
    found = found_order(rows, ["nvlink", "leaf"])
    assert (found.splits, found.usual) == (["tp", "dp", "pp"], False)
    assert found.text == (
        "Splits by network tier, innermost first: TP, DP, PP. The usual order is TP, PP, DP. Here "
        "DP and PP both cross leaf, and a step sends 20.0 GB for DP and 1.0 GB for PP."
    )
    rows = [row("ep", "nvlink", 1e9), row("tp", "leaf", 9e9)]
    assert "EP stays in nvlink and TP crosses leaf" in found_order(rows, ["nvlink", "leaf"]).text


def test_a_split_belongs_to_the_outermost_tier_that_it_crosses():
    rows = [row("dp", "nvlink", 5e9), row("dp", "leaf", 1e9), row("tp", "nvlink", 1e9)]
    assert found_order(rows, ["nvlink", "leaf"]).splits == ["tp", "dp"]


def test_what_is_sent_inside_a_tp_group_counts_as_tp():
    rows = [row("tp", "nvlink", 9e9, "all_gather"), row("cp", "nvlink", 1e9, "all_to_all")]
    rows += [row("tp", "nvlink", 1e6), row("ep", "nvlink", 2e9, "reduce_scatter")]
    found = found_order(rows, ["nvlink"])
    assert (found.splits, found.wire_bytes["tp"]) == (["tp", "cp"], 11.001e9)


def test_nothing_is_sent_on_one_device():
    assert found_order([], ["nvlink"]).text == "No messages are sent."


# --- what would change the answer ----------------------------------------------------------------


def neighbour(change: str, ratio: float, memory: float, verdict: str) -> Neighbour:
    return Neighbour(change, layout("tp4 pp2 dp8 ga8"), verdict, ratio, ratio, memory, None)


def test_more_memory_is_worth_what_the_nearest_faster_neighbour_saves(costs):
    around = [
        neighbour("tp / 2", 0.9, 96e9, "no"),
        neighbour("no pp", 0.8, 400e9, "no"),
        neighbour("zero0", 1.2, 81e9, "no"),
    ]
    first = explain.changes(job(), layout("tp8 pp2"), around, LIMIT)[0]
    assert (first.change, first.step_time_ratio) == ("memory", 0.9)
    assert first.text.startswith("With 16.0 GB more memory per GPU, tp / 2 would fit")


def test_a_faster_tier_and_a_larger_batch_change_a_real_step():
    slow = load_cluster(LINE.replace(",50GB/s", ",5GB/s"), 64)
    on_slow = replace(job("llama-3.1-8b"), cluster=slow)
    found = explain.changes(on_slow, layout("zero3"), [], LIMIT)
    by_name = {each.change: each.step_time_ratio for each in found}
    assert set(by_name) == {"bandwidth of tier 2", "global batch"}  # tier 1 is never waited for
    assert by_name["bandwidth of tier 2"] < 0.99
    assert 0.5 < by_name["global batch"] < 1.02


# --- the planner's own arithmetic ----------------------------------------------------------------


def test_tp_across_nodes_is_said_to_be_slower_than_a_pipeline():
    """NVIDIA/Megatron-LM issue 258: Llama-3.1-70B, two nodes of eight, tp8 pp2 against tp16."""
    two_nodes = replace(job(gpus=16, batch=16), sequence_length=8192)
    found = {n.change: n for n in neighbours(two_nodes, layout("tp8 sp pp2", 16, 16), 1e15)}
    wide = found["tp x 2, pp / 2"]
    assert str(wide.layout) == "tp16 sp ga16"
    assert wide.step_time_ratio is not None and wide.step_time_ratio > 1.1
    assert "tp x 2" not in found  # it needs 32 devices


def test_outcomes_come_in_the_order_of_the_layouts_whatever_their_rank_order():
    three = [
        layout("tp8 sp pp2"),
        layout("tp8 sp pp2 order=tp-cp-ep-pp-dp"),
        layout("tp4 sp pp4"),
    ]
    together = one_change_away.outcomes(job(), three)
    assert together == [one_change_away.outcomes(job(), [each])[0] for each in three]
