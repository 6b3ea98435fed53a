from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fivefold import __version__
from fivefold.cli import main
from fivefold.errors import UserError
from fivefold.interop import EXPORTERS
from fivefold.layout.notation import PLANNED_SCHEDULES, SCHEDULES
from fivefold.plan.engines import ENGINES, PRODUCT_BYTES
from fivefold.plan.search.constraints import OBJECTIVES
from fivefold.train.failures import WorkerFailure
from fivefold.train.runfile import Run
from tests.report.test_timeline import read as read_timeline

COMMANDS = ["plan", "export", "calibrate", "train", "check", "trace", "layout", "schedule"]

RUN = """
model: config.json
data: {sequence_length: 64}
global_batch: 4
steps: 10
optimizer: {lr: 1e-3}
out: runs
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture
def engine(monkeypatch):
    """Stands in for training and checking, which other tests run: what the command line calls."""

    def replace(name, function):
        if name == "check":
            module = ModuleType("fivefold.verify.check")
            module.__dict__["check"] = function
        else:
            module = ModuleType("fivefold.verify.plan_vs_run")
            module.__dict__["train_and_compare"] = lambda run, write_timeline: function(run)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return replace


def sentence(capsys, code: int, expected_code: int = 2) -> str:
    """The one line on stderr that a refusal is."""
    printed = capsys.readouterr()
    assert (code, printed.out) == (expected_code, "")
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_help_and_version_need_no_command(capsys):
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fivefold {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(capsys, command):
    assert main([command, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "Examples:" in help_text and f"\n    fivefold {command} " in help_text


def test_help_groups_options_by_topic_and_names_every_choice(capsys):
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    topics = ["Arguments", "Model", "Cluster", "Batch and precision", "What to search"]
    topics += ["Memory and engine", "Output", "Other options"]
    assert [line[:-1] for line in text.splitlines() if line[:1].isalpha()][1:] == topics
    assert main(["export", "--help"]) == 0
    words = set(re.findall(r"\w+", text + capsys.readouterr().out))
    assert {*ENGINES, *PRODUCT_BYTES, *OBJECTIVES, *EXPORTERS} <= words


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_described_in_a_sentence(capsys, command):
    assert main([command, "--help"]) == 0
    described = re.findall(r"^  --\S+.*?  +(\S.*)", capsys.readouterr().out, re.MULTILINE)
    assert described and all(sentence[0].isupper() for sentence in described), described


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ["torch", "numpy", "pydantic", "rich", "yaml"]),
        (["plan", "--help"], ["torch", "numpy", "yaml"]),
        (["train", "--help"], ["torch", "numpy", "yaml"]),
    ],
)
def test_help_imports_only_what_it_shows(arguments, heavy):
    code = (
        "import sys; from fivefold.cli import main; main(sys.argv[1:]);"
        f"sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_layout_command_imports_no_torch():
    code = (
        "import sys; from fivefold.cli import main; main(['layout', 'tp2 pp2']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_python_m_fivefold_is_the_command_line():
    command = [sys.executable, "-m", "fivefold", "layout", "tp3 tp3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m fivefold layout 'tp2 dp512' --json"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["plant"],
        ["train", "a.yaml", "b.yaml"],
        ["train", "a.yaml", "--stepz", "3"],
        ["check", "a.yaml", "--steps", "0"],
        ["check", "a.yaml", "--steps", "two"],
    ],
)
def test_a_wrong_command_line_exits_with_2_and_no_traceback(capsys, arguments):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and "Usage: fivefold" in printed.out + printed.err


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (RUN + "stepz: 3\n", [], "unknown key stepz; did you mean steps?"),
        (RUN + "steps: [1\n", [], "not valid YAML, line 8"),
        (RUN.replace("10", "ten"), [], 'steps must be a whole number, and is "ten"'),
        (RUN, ["--set", "steps"], "--set steps: write it as key=value"),
        (RUN, ["--set", "optimizer.lr=x"], 'optimizer.lr must be a number, and is "x"'),
        (None, [], "there is no such run file"),
    ],
)
def test_a_bad_run_file_is_one_sentence_and_nothing_is_written(
    capsys, tmp_path, command, text, arguments, expected
):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    before = sorted(tmp_path.iterdir())
    assert expected in sentence(capsys, main([command, str(path), *arguments]))
    assert sorted(tmp_path.iterdir()) == before


def test_train_passes_its_options_on_and_the_flags_win(run_file, engine, tmp_path):
    runs: list[Run] = []
    engine("train", runs.append)
    options = ["--layout", "tp2", "--steps", "7", "--out", str(tmp_path / "o"), "--resume"]
    sets = ["--set", "seed=3", "--set", "checkpoint={every: 2, resume: false}"]
    assert main(["train", run_file, *options, *sets]) == 0
    (run,) = runs
    assert (run.layout, run.steps, run.out, run.seed) == ("tp2", 7, str(tmp_path / "o"), 3)
    assert (run.checkpoint.every, run.checkpoint.resume) == (2, True)


def test_paths_of_train_s_options_are_meant_from_where_one_stands(
    run_file, engine, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    runs: list[Run] = []
    engine("train", runs.append)
    options = ["--cluster", "my/here.yaml", "--timeline", "t: 1.pftrace", "--timeline-steps", "5"]
    assert main(["train", run_file, *options]) == 0
    (run,) = runs
    assert run.cluster == str(tmp_path / "my" / "here.yaml")
    assert (run.timeline, run.timeline_steps) == (str(tmp_path / "t: 1.pftrace"), 5)
    assert main(["train", run_file, "--cluster", "dgx-h100"]) == 0
    assert runs[-1].cluster == "dgx-h100"


def report(**changes) -> dict:
    """A report as of fivefold.verify.check, of which these tests look at a few keys."""
    row = {"pp_rank": 0, "split": "dp", "phase": "backward", "op": "all_reduce", "group_size": 2}
    row |= {"payload_bytes": 8, "routed": False, "agrees": True}
    for side in ("predicted", "measured"):
        row |= {f"{side}_calls": 1, f"{side}_bytes": 8, f"{side}_wire_bytes": 8}
    differences = (
        "loss_rel_diff",
        "balance_loss_rel_diff",
        "grad_norm_rel_diff",
        "max_grad_rel_diff",
        "max_grad_abs_diff",
        "max_weight_abs_diff",
    )
    return {
        "ok": True,
        "layout": "dp2",
        "steps": 5,
        "precision": "fp32",
        "optimizer": {"lr": 1e-3, "eps": 1e-6, "clip": 1.0},
        **dict.fromkeys(differences, 0.0),
        "worst_gradient": "lm_head.weight",
        "worst_weight": "lm_head.weight",
        "differing_replicas": [],
        "rerouted": [],
        "limits": {"loss_rel_diff": 1e-5},
        "ledger": [row],
        "ledger_differences": [],
        "memory": [],
        "seed": 0,
        "rerouted_seeds": [],
        "one_process_s": 1.0,
        "layout_s": 2.0,
        **changes,
    }


def test_check_prints_json_and_exits_with_0_when_all_agree(capsys, run_file, engine):
    engine("check", lambda run, steps: SimpleNamespace(as_dict=lambda: report(steps=steps)))
    assert main(["check", run_file, "--json", "--steps", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == report(steps=3)


def test_check_prints_tables_and_exits_with_1_when_something_differs(capsys, run_file, engine):
    engine("check", lambda run, steps: SimpleNamespace(as_dict=lambda: report(ok=False)))
    assert main(["check", run_file]) == 1
    printed = capsys.readouterr().out
    assert "dp2 compared with one process" in printed and "all-reduce" in printed
    assert printed.endswith("The layout differs from one process or from its plan.\n")


def test_a_user_error_from_training_is_one_sentence(capsys, run_file, engine):
    def refuse(run):
        raise UserError("tp 3 does not divide 8 heads")

    engine("train", refuse)
    assert sentence(capsys, main(["train", run_file])) == "error: tp 3 does not divide 8 heads"


def test_a_failed_worker_is_one_sentence_and_its_traceback_comes_on_demand(
    capsys, run_file, engine, monkeypatch
):
    def fail(run):
        raise WorkerFailure("rank 1 (tp1) failed", rank=1, traceback="Traceback x")

    engine("train", fail)
    monkeypatch.delenv("FIVEFOLD_TRACEBACK", raising=False)
    assert sentence(capsys, main(["train", run_file]), 1) == "error: rank 1 (tp1) failed"
    monkeypatch.setenv("FIVEFOLD_TRACEBACK", "1")
    assert main(["train", run_file]) == 1
    assert capsys.readouterr().err == "Traceback x\nerror: rank 1 (tp1) failed\n"


def test_without_torch_training_says_how_to_install_it(capsys, run_file, engine, monkeypatch):
    def import_torch(run):
        import torch  # noqa: F401

    engine("train", import_torch)
    monkeypatch.setitem(sys.modules, "torch", None)
    line = sentence(capsys, main(["train", run_file]))
    assert line == "error: training needs torch: pip install 'fivefold[train]'"


def test_an_interrupted_run_exits_with_130(capsys, run_file, engine):
    def interrupt(run):
        raise KeyboardInterrupt

    engine("train", interrupt)
    assert main(["train", run_file]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_our_own_is_not_hidden(run_file, engine):
    engine("train", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", run_file])


def test_layout_says_what_a_line_means(capsys):
    assert main(["layout", "dp2 pp2 tp2 mb2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tp2 pp2 dp2 mb2"
    assert lines[1] == "8 devices = pp 2 x tp 2 x dp 2"
    assert lines[2] == "a step: dp 2 x mb 2 x ga 1 = 4 sequences"


def test_layout_prints_degrees_and_groups_as_json(capsys):
    assert main(["layout", "tp2 sp ring2", "--gpus", "8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["layout"], printed["world_size"]) == ("tp2 sp dp2 ring2", 8)
    assert printed["degrees"]["dp"] == printed["degrees"]["cp"] == 2
    assert printed["groups"]["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert printed["groups"]["ring"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("text", ["tp2 sp pp2 dp2 --gpus 9", "sp", "tp0", "tpp2", "dp2 ep4"])
def test_an_impossible_layout_is_refused(capsys, text):
    line, _, gpus = text.partition(" --gpus ")
    sentence(capsys, main(["layout", line, *(["--gpus", gpus] if gpus else [])]))


# --- plan and export -----------------------------------------------------------------------------

TINY = "hidden=64,layers=4,heads=4,vocab=256,ffn=128"
NODES = "989TFLOPS,80GB,3.35TB/s:8x450GB/s,50GB/s"


def planned(capsys, *arguments: str, code: int = 0) -> dict:
    assert main(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_plan_names_the_models_and_clusters_that_are_known(capsys):
    assert main(["plan", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  llama-3.1-405b" in lines[: lines.index("clusters:")]
    assert "  dgx-h100" in lines[lines.index("clusters:") :]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "plan needs a model"),
        (["llama-3.1-8b"], "plan needs --cluster"),
        (["llama-3.1-8b", "--cluster", NODES], "plan needs --gpus"),
        (["llama-3.1-8c", "--cluster", NODES, "--gpus", "8"], "llama-3.1-8b"),
        (["llama-3.1-8b", "--dims", TINY], "give only one"),
        (["llama-3.1-8b", "--cluster", NODES, "--gpus", "8", "--fix", "tp3"], "tp"),
        (["llama-3.1-8b", "--cluster", NODES, "--gpus", "8", "--fix", "tpp"], "tp"),
        (["llama-3.1-8b", "--cluster", NODES, "--gpus", "8", "--objective", "fun"], "fun"),
        (["falcon-7b", "--cluster", NODES, "--gpus", "8", "--layout", "tp2"], "is not legal"),
    ],
)
def test_a_wrong_plan_is_one_sentence(capsys, arguments, expected):
    assert expected in sentence(capsys, main(["plan", *arguments]))


def test_planning_imports_neither_torch_nor_what_json_does_not_need():
    code = (
        "import sys; from fivefold.cli import main;"
        f"main(['plan', '--dims', '{TINY}', '--cluster', '{NODES}', '--gpus', '8', '--json']);"
        "sys.exit(', '.join({'torch', 'rich'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_prints_tables_that_fit_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--dims", TINY, "--cluster", NODES, "--gpus", "16", "--top", "3"]
    assert main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Why" in lines and "Where the step goes" not in lines
    assert main(["plan", *arguments, "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for title in ("Where the step goes", "One change away", "What would change the result"):
        assert title in lines


@pytest.fixture
def plan_path(capsys, tmp_path) -> str:
    """A saved plan of a tiny model on 4 devices: pp2, and a batch of 8 sequences of 64 tokens."""
    path = tmp_path / "plan.yaml"
    arguments = ["--cluster", NODES, "--gpus", "4", "--seq", "64", "--global-batch", "8"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = str(tmp_path / "config.json")
    arguments += ["--fix", "pp2 tp1 vpp1", "--save", str(path)]
    assert main(["plan", config, *arguments]) == 0
    capsys.readouterr()
    return str(path)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}


def test_train_takes_the_layout_of_a_saved_plan(plan_path, tmp_path, engine):
    runs: list[Run] = []
    engine("train", runs.append)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN.replace("global_batch: 4", "global_batch: 8"))
    assert main(["train", str(run_file), "--layout", plan_path]) == 0
    assert "pp2" in runs[0].layout and "dp2" in runs[0].layout


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("global_batch: 4", "global_batch: 16", "is a plan for global_batch 8, but the run has 16"),
        ("sequence_length: 64", "sequence_length: 32", "is a plan for sequence_length 64"),
        ("model: config.json", "model: other.json", "is a plan for model llama of 4 layers"),
    ],
)
def test_train_refuses_a_plan_for_something_else(
    capsys, plan_path, tmp_path, engine, old, new, expected
):
    (tmp_path / "other.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN.replace(old, new).replace("global_batch: 4", "global_batch: 8"))
    assert expected in sentence(capsys, main(["train", str(run_file), "--layout", plan_path]))


def test_train_refuses_a_schedule_that_is_only_planned(capsys, tmp_path, run_file):
    path = tmp_path / "plan.yaml"
    path.write_text(
        f"layout: pp2 ga4 schedule=dualpipe\nmodel: '{TINY}'\ncluster: dgx-h100\ngpus: 2\n"
        "sequence_length: 64\nglobal_batch: 4\n"
    )
    line = sentence(capsys, main(["train", run_file, "--layout", str(path)]))
    assert "schedule=dualpipe can be planned, not run" in line


def test_layout_explains_a_schedule_that_is_only_planned(capsys):
    for schedule in ("zb-h1", "dualpipe"):
        assert main(["layout", f"pp2 ga4 schedule={schedule}"]) == 0
        assert schedule in capsys.readouterr().out


SMALL = ["plan", "llama-3.1-8b", "--cluster", "h100:8x450GB/s,50GB/s", "--gpus", "8"]


@pytest.mark.parametrize("place", ["no/plan.yaml", ".", ""])
def test_a_plan_that_could_not_be_saved_is_refused_before_the_search(
    capsys, monkeypatch, tmp_path, place
):
    monkeypatch.chdir(tmp_path)
    line = sentence(capsys, main([*SMALL, "--save", place]))
    assert "the plan cannot be written" in line


def test_a_saved_layout_that_does_not_fit_is_said_not_to(capsys, tmp_path):
    path = str(tmp_path / "plan.yaml")
    assert main([*SMALL, "--layout", "dp8", "--save", path, "--json"]) == 1
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert f"the layout that {path} keeps does not fit" in notes
    assert main([*SMALL, "--layout", "dp8 zero3", "--save", path, "--json"]) == 0
    assert not any(path in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_a_plan_is_written_as_a_timeline(capsys, tmp_path):
    path = tmp_path / "plan.pftrace"
    arguments = ["--fix", "pp2", "--global-batch", "8", "--timeline", str(path)]
    planned(capsys, "--dims", TINY, "--cluster", NODES, "--gpus", "8", *arguments)
    processes = {each.place[0] for each in read_timeline(path)}
    assert processes == {"pipeline rank 0", "pipeline rank 1"}
    nowhere = ["--timeline", str(tmp_path / "none" / "plan.pftrace")]
    command = ["plan", "--dims", TINY, "--cluster", NODES, "--gpus", "8", *nowhere]
    assert "there is no folder" in sentence(capsys, main(command))


def test_the_names_that_are_known_can_be_json(capsys):
    assert main(["plan", "--list", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert "llama-3.1-8b" in known["models"] and "dgx-h100" in known["clusters"]


def test_a_sequence_may_be_said_in_thousands(capsys):
    assert main([*SMALL, "--seq", "8K", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["sequence_length"] == 8192


def test_export_prints_or_writes_what_an_engine_takes(capsys, plan_path, tmp_path):
    assert main(["export", plan_path, "--to", "megatron"]) == 0
    printed = capsys.readouterr().out
    assert "--pipeline-model-parallel-size 2" in printed
    out = tmp_path / "job"
    assert main(["export", plan_path, "--to", "megatron", "--out", str(out)]) == 0
    (path,) = capsys.readouterr().out.split()
    assert (out / "megatron.sh").read_text() == printed
    assert [each.name for each in out.iterdir()] == ["megatron.sh"] and path.endswith("megatron.sh")


def test_export_knows_its_engines(capsys, plan_path):
    assert "'jax'" in sentence(capsys, main(["export", plan_path, "--to", "jax"]))
    assert "no such plan file" in sentence(capsys, main(["export", "no.yaml", "--to", "megatron"]))


# --- schedule ----------------------------------------------------------------------------------


def test_schedule_draws_a_table_and_says_what_each_rank_waits_and_keeps(capsys):
    assert main(["schedule", "zb-h1", "--pp", "2", "--micro-batches", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "rank 0  0   1   .   (0) {0} (1) {1}\nrank 1  .   0   (0) 1   (1) {0} {1}\n3: forward"
    )
    assert "takes 7 s. Ranks are idle for 14.3% of it." in out
    assert " ".join(out.split()).endswith("0 0 6 14.3% 2 1 1 6 14.3% 2")


def test_schedule_in_json_has_the_table_and_its_times(capsys):
    arguments = ["--pp", "4", "--micro-batches", "8", "--overlapped-s", "2.5", "--json"]
    assert main(["schedule", "dualpipe", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step_s"], report["bubble_fraction"]) == (24.0, 0.0625)
    assert [rank["peak_in_flight"] for rank in report["ranks"]] == [5] * 4
    assert report["table"][3][:3] == ["0F4", "0F5", "0F6"]


def test_schedule_writes_a_drawing_and_a_table_that_it_reads_again(capsys, tmp_path):
    svg, table = tmp_path / "zb-v.svg", tmp_path / "zb-v.csv"
    assert main(["schedule", "zb-v", "--svg", str(svg), "--csv", str(table)]) == 0
    drawn = capsys.readouterr().out
    assert svg.read_text().startswith("<svg ")
    assert main(["schedule", str(table)]) == 0
    assert capsys.readouterr().out == drawn


def test_schedule_names_what_it_knows(capsys):
    assert main(["schedule", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*SCHEDULES, *PLANNED_SCHEDULES, "FILE.csv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which schedule? `fivefold schedule --list` names them"),
        (["zigzag"], "schedule=zigzag is not known: it may be gpipe, 1f1b"),
        (["interleaved", "--micro-batches", "6"], "multiple of pp 4, not 6"),
        (["dualpipe", "--pp", "3"], "pp 3 or ga 8 is odd: use pp4 ga8"),
        (["dualpipe", "--csv", "table.csv"], "two copies of each stage"),
        (["none.csv"], "cannot read none.csv"),
        (["1f1b", "--pp", "100000", "--micro-batches", "100000"], "the most is 4,000,000"),
        (["1f1b", "--weight-s", "3"], "--weight-s 3 is a part of the backward"),
        (["1f1b", "--forward-s", "inf"], "inf is no number of seconds"),
        (["1f1b", "--svg", "none/a.svg"], "cannot write none/a.svg"),
        (["1f1b", "--overlapped-s", "3"], "dualpipe and dualpipe-v do"),
        (["interleaved", "--vpp", "1"], "interleaved is 1f1b with 2 or more stages a rank"),
        (["examples/own-schedule.csv", "--pp", "9"], "is a table with pp 2, not 9"),
        (["examples/own-schedule.csv", "--micro-batches", "99"], "with micro batches"),
    ],
)
def test_schedule_refuses_in_one_sentence(capsys, arguments: list[str], words: str):
    assert words in sentence(capsys, main(["schedule", *arguments]))


def test_train_and_check_refuse_a_table_that_cannot_run(capsys, tmp_path):
    run_file = str(Path(__file__).parents[1] / "examples" / "pipeline.yaml")
    table = tmp_path / "stuck.csv"
    table.write_text("0B0,0F0\n1F0,1B0\n")
    for command in ("train", "check"):
        arguments = [command, run_file, "--layout", f"pp2 mb8 schedule={table}"]
        line = sentence(capsys, main(arguments))
        assert "gets stuck: rank 0 at its action 0 (B of stage 0, micro-batch 0)" in line


def test_plan_refuses_a_table_of_ones_own(capsys, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0B0\n1F0,1B0\n")
    arguments = ["plan", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8"]
    line = sentence(capsys, main([*arguments, "--layout", f"pp2 dp4 schedule={table}"]))
    assert "is a custom table, which runs but cannot be planned" in line
