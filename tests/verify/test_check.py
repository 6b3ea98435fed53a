from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fivefold.errors import UserError
from fivefold.parallel.data.run import DataParallel
from fivefold.parallel.expert import cost as expert_cost
from fivefold.parallel.tensor import cost as tensor_cost
from fivefold.train.runfile import Run
from fivefold.verify import check as check_module
from fivefold.verify.check import CheckReport, check
from fivefold.verify.parity import LIMITS

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}
DENSE = {**SIZES, "model_type": "qwen3", "intermediate_size": 64, "head_dim": 8}
MIXTURE = {**SIZES, "model_type": "mixtral", "intermediate_size": 16, "num_local_experts": 4}
MIXTURE |= {"num_experts_per_tok": 2}


@pytest.fixture
def run_of(tmp_path: Path):
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{n} times {n} is {n * n}. " * 3}) for n in range(200))
    )

    def run_of(layout: str, model: dict[str, Any] = DENSE, **changes: Any) -> Run:
        data = {
            "files": [str(tmp_path / "text.jsonl")],
            "sequence_length": 32,
            "cache": str(tmp_path / "cache"),
            "isolate_documents": changes.pop("isolate_documents", False),
        }
        values = {"model": model, "data": data, "layout": layout, "global_batch": 4, "steps": 9}
        values |= {"optimizer": {"lr": 1.0}, "device": "cpu", "folder": tmp_path}
        return Run.model_validate(values | changes)

    return run_of


# --- what agrees ---------------------------------------------------------------------------------


def test_a_layout_that_is_right_passes(run_of) -> None:
    report = check(run_of("tp2 sp pp2 mb2"), steps=2).as_dict()
    assert report["version"] == 1
    assert report["ok"] and report["replicas_identical"] and report["ledger_differences"] == []
    assert json.loads(json.dumps(report)) == report | {
        "optimizer": report["optimizer"] | {"betas": [0.9, 0.95]}
    }
    assert (report["layout"], report["steps"], report["seed"]) == ("tp2 sp pp2 mb2 ga2", 2, 0)
    assert all(0 <= report[key] <= limit for key, limit in LIMITS.items())
    assert report["loss_rel_diff"] < 1e-6
    # Rounding differs, or nothing would have been compared.
    assert report["max_grad_abs_diff"] > 0 and report["max_weight_abs_diff"] > 0
    assert report["one_process_s"] > 0 and report["layout_s"] > 0
    assert {row["pp_rank"] for row in report["ledger"]} == {0, 1}
    assert {"pp", "tp", "world"} == {row["split"] for row in report["ledger"]}
    assert all(row["agrees"] for row in report["ledger"])


def test_the_optimizer_of_the_run_is_not_the_one_that_compares(run_of) -> None:
    """The run's learning rate of 1.0 would blow up every difference."""
    optimizer = check(run_of("dp2"), steps=1).as_dict()["optimizer"]
    assert (optimizer["lr"], optimizer["eps"], optimizer["clip"]) == (1e-3, 1e-6, 1.0)
    assert optimizer["lr_schedule"] == "constant"


def test_a_mixture_with_isolated_documents_passes(run_of) -> None:
    run = run_of("tp2 etp2 ring2 ep2", MIXTURE, isolate_documents=True)
    report = check(run, steps=1).as_dict()
    assert report["ok"], {**report, "ledger": ...}
    routed = [row for row in report["ledger"] if row["routed"]]
    assert routed and all(row["agrees"] for row in routed)


def test_the_messages_of_a_bf16_run_are_counted_in_bf16_and_its_numbers_in_fp32(run_of) -> None:
    reports = [
        check(run_of("pp2 mb2", precision=precision), steps=1).as_dict()
        for precision in ("fp32", "bf16")
    ]
    assert all(report["ok"] for report in reports)
    fp32, bf16 = (
        [row["payload_bytes"] for row in report["ledger"] if row["split"] == "pp"]
        for report in reports
    )
    assert fp32 == [2 * size for size in bf16]
    assert reports[0]["max_weight_abs_diff"] == reports[1]["max_weight_abs_diff"]


# --- what does not -------------------------------------------------------------------------------


def test_a_gradient_that_is_not_summed_is_found_and_named(run_of, monkeypatch) -> None:
    monkeypatch.setattr(DataParallel, "_sum_parts", lambda self, parameters: None)
    report = check(run_of("tp2 sp"), steps=1).as_dict()
    assert not report["ok"] and not report["replicas_identical"]
    assert report["max_grad_rel_diff"] > 0.1
    assert report["worst_gradient"].endswith("norm.weight")
    assert "model.norm.weight" in report["differing_replicas"]
    # The message that was left out is missing in the ledger of both ranks.
    (missing, _) = report["ledger_differences"]
    assert (missing["op"], missing["predicted_calls"]) == ("all_reduce", 1)
    assert missing["measured_calls"] == 0 and missing["rank"] == 0


def test_a_message_that_the_plan_does_not_know_is_found(run_of, monkeypatch) -> None:
    planned = tensor_cost.transfers
    known = lambda work: (t for t in planned(work) if t.phase == "forward")  # noqa: E731
    monkeypatch.setattr(tensor_cost, "transfers", known)
    report = check(run_of("tp2"), steps=1).as_dict()
    assert not report["ok"] and report["max_weight_abs_diff"] < 1e-5
    differences = report["ledger_differences"]
    assert {(row["rank"], row["phase"]) for row in differences} == {
        (rank, phase) for rank in (0, 1) for phase in ("backward", "optimizer")
    }
    assert all(row["predicted_calls"] == 0 < row["measured_calls"] for row in differences)


def test_a_routed_message_is_held_against_its_mean(run_of, monkeypatch) -> None:
    planned = expert_cost.transfers

    def one_byte_more(work):
        for t in planned(work):
            yield replace(t, payload_bytes=t.payload_bytes + 1) if t.routed else t

    monkeypatch.setattr(expert_cost, "transfers", one_byte_more)
    report = check(run_of("tp2 etp2", MIXTURE), steps=1).as_dict()
    differences = report["ledger_differences"]
    assert differences and all(row["routed"] and row["rank"] is None for row in differences)


def test_check_under_torchrun_is_refused(run_of, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="check starts its own processes"):
        check(run_of("dp2"), steps=1)


# --- tokens that choose another expert -----------------------------------------------------------


def test_a_near_tie_of_experts_is_reported_and_the_next_seed_compared(run_of, monkeypatch) -> None:
    """In the layout a token is sent to another expert, with seeds 0 and 1 only."""
    from fivefold.model.moe import MoE

    route = MoE._route

    def other_choice(self, tokens):
        weights, experts, probabilities = route(self, tokens)
        if dist.get_world_size() == 2 and dist.get_rank() == 0 and seeds[-1] < 2:
            experts = experts.clone()
            experts[0, 0] = next(e for e in range(4) if e not in experts[0].tolist())
        return weights, experts, probabilities

    seeds: list[int] = []
    check_seed = check_module._check_seed

    def watched(prepared, steps, rerouted_seeds) -> CheckReport:
        seeds.append(prepared.run.seed)
        return check_seed(prepared, steps, rerouted_seeds)

    monkeypatch.setattr(MoE, "_route", other_choice)
    monkeypatch.setattr(check_module, "_check_seed", watched)
    report = check(run_of("dp2 ep2", MIXTURE), steps=1).as_dict()
    assert report["ok"] and report["seed"] == 2
    assert report["rerouted_seeds"] == [0, 1] and report["rerouted"] == []


def test_a_layout_that_reroutes_with_every_seed_fails_and_says_where(monkeypatch, run_of) -> None:
    from fivefold.model.moe import MoE

    route = MoE._route

    def other_experts(self, tokens):
        weights, experts, probabilities = route(self, tokens)
        if dist.get_world_size() == 2:
            experts = 3 - experts
        return weights, experts, probabilities

    monkeypatch.setattr(MoE, "_route", other_experts)
    report = check(run_of("dp2 ep2", MIXTURE), steps=1).as_dict()
    assert not report["ok"] and report["seed"] == 2 and report["rerouted_seeds"] == [0, 1]
    assert {(it["step"], it["layer"]) for it in report["rerouted"]} == {(1, 0), (1, 1)}
    assert all(it["of"] == 2 * 4 * 32 for it in report["rerouted"])
