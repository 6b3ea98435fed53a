"""The Python API returns what the commands print with --json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from fivefold import api
from fivefold.cli import main

ROOT = Path(__file__).resolve().parents[1]
TINY = "hidden=64,layers=4,heads=4,vocab=256,ffn=128"
CLUSTER = "989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s"


def printed(capsys, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def assert_keys(result: Any, declared: Any) -> None:
    """Every declared key is there, at every level."""
    arguments = [each for each in get_args(declared) if each is not type(None)]
    if is_typeddict(declared):
        for key, each in get_type_hints(declared).items():
            assert key in result, f"{declared.__name__} has no {key}"
            assert_keys(result[key], each)
    elif get_origin(declared) is list:
        for each in result:
            assert_keys(each, arguments[0])
    elif result is not None and len(arguments) == 1:  # X | None
        assert_keys(result, arguments[0])


def test_plan_returns_what_the_command_prints(capsys) -> None:
    result = api.plan(dims=TINY, cluster=CLUSTER, gpus=16, top=2, fix="tp2")
    options = ["--dims", TINY, "--cluster", CLUSTER, "--gpus", "16", "--top", "2", "--fix", "tp2"]
    expected = printed(capsys, "plan", *options)
    assert_keys(result, api.PlanResult)
    result["search"]["seconds"] = expected["search"]["seconds"] = 0.0
    assert json.loads(json.dumps(result)) == expected
    assert set(result) == set(get_type_hints(api.PlanResult)) | ({"version"} & set(result))
    assert result["layouts"][0]["ledger"] and result["neighbours"]


def test_what_does_not_fit_has_every_key_too() -> None:
    result = api.plan("llama-3.1-70b", "dgx-h100", gpus=8)
    assert result["nothing_fits"] is not None and result["nothing_fits"]["closest"]
    assert_keys(result, api.PlanResult)


def test_plan_takes_every_option_of_the_command() -> None:
    import inspect

    from fivefold.plan.request import Options

    declared = inspect.signature(api.plan).parameters
    assert set(declared) - {"from_megatron"} == set(Options.__dataclass_fields__)


def test_layout_returns_what_the_command_prints(capsys) -> None:
    result = api.layout("tp2 sp ring2", gpus=8)
    assert result == printed(capsys, "layout", "tp2 sp ring2", "--gpus", "8")
    assert set(result) == set(get_type_hints(api.LayoutResult))


def test_trace_returns_what_the_command_prints(capsys) -> None:
    model = str(ROOT / "examples" / "models" / "first-run.json")
    result = api.trace(model, "tp2 dp2", sequence_length=64, rank=0)
    options = ["--layout", "tp2 dp2", "--seq", "64", "--rank", "0"]
    assert json.loads(json.dumps(result)) == printed(capsys, "trace", model, *options)
    assert_keys(result, api.TraceResult)


@pytest.mark.slow
def test_train_and_check_return_their_reports(tmp_path) -> None:
    run_file = str(ROOT / "examples" / "one-process.yaml")
    result = api.train(run_file, steps=2, out=str(tmp_path / "out"))
    assert result is not None
    assert_keys(result, api.TrainResult)
    checked = api.check(run_file, "dp2", steps=1)
    assert checked["ok"]
    assert_keys(checked, api.CheckResult)


def test_bad_input_is_a_user_error_of_one_sentence() -> None:
    with pytest.raises(api.UserError, match="plan needs --gpus"):
        api.plan(dims=TINY, cluster=CLUSTER)
    with pytest.raises(api.UserError, match="tp"):
        api.layout("tpp2")
    assert issubclass(api.WorkerFailure, Exception)


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_python_that_is_shown_runs(page: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(
        r"<!-- python -->\n\n```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL
    )
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    assert re.search(r"(tp|pp|dp)\d+ .* s \d+%", capsys.readouterr().out)
