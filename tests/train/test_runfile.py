from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.layout.global_batch import with_global_batch
from fivefold.layout.legality import check
from fivefold.layout.notation import Layout, parse, stated
from fivefold.model.huggingface.load import load_config
from fivefold.train.runfile import load_run
from tests.helpers import refusal

SMALLEST = """
model: config.json
data:
  sequence_length: 64
global_batch: 4
steps: 10
optimizer:
  lr: 1e-3
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def smallest(write):
    return write(SMALLEST)


def test_what_is_left_out_has_its_default(smallest):
    run = load_run(smallest)
    assert (run.layout, run.precision, run.seed, run.device, run.timeout_s, run.out) == (
        "dp1",
        "fp32",
        0,
        "auto",
        300,
        None,
    )
    assert (run.data.files, run.data.tokenizer) == (None, "bytes")
    assert (run.optimizer.betas, run.optimizer.clip) == ((0.9, 0.95), 1.0)
    assert (run.checkpoint.every, run.checkpoint.keep, run.checkpoint.resume) == (None, 2, False)


def test_numbers_in_yaml_1_2_are_numbers(write):
    """YAML 1.1 reads 1e-3 as text."""
    for text, value in (("1e-3", 1e-3), ("1E3", 1e3), ("2.5e+1", 25.0), (".5e1", 5.0), ("1", 1.0)):
        assert load_run(write(SMALLEST.replace("1e-3", text))).optimizer.lr == value


def test_relative_paths_are_meant_from_the_folder_of_the_run_file(write, tmp_path, monkeypatch):
    path = write(
        SMALLEST.replace("data:", "out: runs/a\ndata:")
        + "  # the rest by override\ncheckpoint: {every: 2}\n"
    )
    monkeypatch.chdir("/")
    texts = ["data.files=[a.txt, b/**/*.py, /c.txt]", "data.tokenizer=t.json", "data.cache=cache"]
    run = load_run(os.path.relpath(path), overrides=texts)
    folder = str(tmp_path)
    assert run.folder == tmp_path
    assert run.model == f"{folder}/config.json"
    assert run.out == f"{folder}/runs/a"
    assert run.data.files == (f"{folder}/a.txt", f"{folder}/b/**/*.py", "/c.txt")
    assert (run.data.tokenizer, run.data.cache) == (f"{folder}/t.json", f"{folder}/cache")


def test_a_tokenizer_that_is_no_file_keeps_its_name(smallest):
    for name in ("bytes", "bpe:1024"):
        run = load_run(smallest, overrides=[f"data.tokenizer={name}"])
        assert run.data.tokenizer == name


def test_the_out_argument_is_meant_from_the_current_folder(smallest, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_run(smallest, out="here").out == str(tmp_path / "elsewhere" / "here")


def test_arguments_win_over_overrides_and_these_over_the_file(smallest):
    run = load_run(smallest, layout="tp2", overrides=["steps=20", "layout=pp2", "seed=7"], steps=30)
    assert (run.layout, run.steps, run.seed) == ("tp2", 30, 7)


def test_an_override_makes_the_section_that_the_file_leaves_out(write):
    run = load_run(write(SMALLEST + "lr_schedule:\n"), overrides=["lr_schedule.warmup_steps=3"])
    assert (run.lr_schedule.warmup_steps, run.lr_schedule.decay) == (3, "cosine")


def test_an_override_leaves_the_rest_of_its_section(smallest):
    run = load_run(smallest, overrides=["optimizer.clip=null", "optimizer.betas=[0.8, 0.99]"])
    assert (run.optimizer.lr, run.optimizer.clip, run.optimizer.betas) == (1e-3, None, (0.8, 0.99))


def test_a_model_may_be_given_inline(smallest):
    run = load_run(smallest, overrides=["model={model_type: llama, hidden_size: 32}"])
    assert run.model == {"model_type": "llama", "hidden_size": 32}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps='3'", 'steps must be a whole number, and is "3"'),
        ("steps=3.0", "steps must be a whole number, and is 3.0"),
        ("steps=true", "steps must be a whole number, and is true"),
        ("steps=0", "steps must be more than 0, and is 0"),
        ("seed=-1", "seed must be 0 or more, and is -1"),
        ("optimizer.lr=fast", 'optimizer.lr must be a number, and is "fast"'),
        ("optimizer.lr=false", "optimizer.lr must be a number, and is false"),
        ("optimizer.lr=0", "optimizer.lr must be more than 0, and is 0"),
        ("optimizer.lr=.inf", "optimizer.lr must be a finite number, and is Infinity"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1 must be less than 1, and is 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is missing"),
        ("optimizer=null", "optimizer must be a mapping, and is null"),
        ("data.files=a.txt", 'data.files must be a list, and is "a.txt"'),
        ("data.files=[]", "data.files must be a list of 1 or more, and is a list of 0"),
        ("data.isolate_documents=1", "data.isolate_documents must be true or false, and is 1"),
        ("model=3", "model must be text or a mapping, and is 3"),
        ("precision=fp16", "precision must be 'fp32' or 'bf16', and is \"fp16\""),
        ("lr_schedule.final_fraction=2", "lr_schedule.final_fraction must be 1 or less, and is 2"),
        ("data={}", "data.sequence_length is missing"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_key_value_and_what_is_wanted(
    smallest, override, sentence
):
    assert refusal(load_run, smallest, overrides=[override]) == f"{smallest}: {sentence}"


def test_a_run_may_end_within_its_warm_up(smallest):
    assert load_run(smallest, overrides=["lr_schedule.warmup_steps=11"]).steps == 10


@pytest.mark.parametrize("wish", ["checkpoint.every=5", "checkpoint.resume=true", "tensorboard=on"])
def test_what_writes_files_needs_a_folder(smallest, wish):
    assert f"{wish.split('=')[0]} needs a folder: set out" in refusal(
        load_run, smallest, overrides=[wish]
    )
    assert load_run(smallest, overrides=[wish], out="runs").out is not None


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimzer.lr=1", "unknown key optimzer; did you mean optimizer?"),
        ("optimizer.weightdecay=1", "did you mean optimizer.weight_decay?"),
        ("lr=1", "unknown key lr; did you mean optimizer.lr?"),
        ("data.steps=1", "unknown key data.steps; did you mean steps?"),
        ("data.zzz=1", "unknown key data.zzz; known here: files, text_field, tokenizer"),
        ("folder=x", "unknown key folder; known here: model, data"),
        ("steps", "write it as key=value"),
        ("=1", "write it as key=value"),
        ("data..files=1", "write it as key=value"),
        ("steps=[1", "the value is not valid YAML, line 1"),
        ("steps=2020-99-99", "the value is not valid YAML: month must be in 1..12"),
        (
            "model.hidden_size=3",
            'model is "config.json" in the run file, which has no key hidden_size to set',
        ),
    ],
)
def test_a_wrong_override_is_refused_and_quoted(smallest, override, sentence):
    message = refusal(load_run, smallest, overrides=[override])
    assert message.startswith(f"--set {override}: ")
    assert sentence in message


def test_an_unknown_key_in_the_file_is_named_with_its_section_and_the_nearest(write):
    path = write(SMALLEST + "  learning_rate: 3\n")
    assert refusal(load_run, path).startswith(
        f"{path}: unknown key optimizer.learning_rate; known here: lr"
    )
    path = write(SMALLEST.replace("global_batch", "globalbatch"))
    assert refusal(load_run, path) == f"{path}: unknown key globalbatch; did you mean global_batch?"


def test_a_key_given_twice_is_refused_with_its_line(write):
    path = write(SMALLEST + "steps: 20\n")
    message = refusal(load_run, path)
    assert (
        message == f"{path}: the run file is not valid YAML, line 9: the key steps is given twice"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the run file is empty; it needs at least model, data, global_batch, steps"),
        ("- 1\n- 2\n", "must be a mapping of keys, not a list of 2"),
        ("just text", 'must be a mapping of keys, not "just text"'),
        ("a: 1\nb: [1\nc: 2\n", "not valid YAML, line 3"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML, line 1"),
        ("[" * 20_000, "not valid YAML"),
        ("? {a: 1}\n: 2\n", "not valid YAML, line 1"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_the_line(write, text, sentence):
    path = write(text)
    message = refusal(load_run, path)
    assert message.startswith(f"{path}: the run file") and sentence in message


def test_a_missing_file_is_refused_with_the_nearest_name(smallest, tmp_path):
    asked = tmp_path / "rum.yaml"
    assert (
        refusal(load_run, asked) == f"{asked}: there is no such run file; did you mean {smallest}?"
    )
    assert "there is no such run file" in refusal(load_run, tmp_path / "no" / "run.yaml")


def test_a_folder_and_a_binary_file_are_refused(tmp_path):
    assert "cannot be read: Is a directory" in refusal(load_run, tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(load_run, tmp_path / "run.yaml")


def test_a_run_cannot_be_changed(smallest):
    with pytest.raises(ValueError, match="frozen"):
        load_run(smallest).steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_reading_a_run_file_imports_no_torch(smallest):
    code = (
        "import sys; from fivefold.train.runfile import load_run; load_run(sys.argv[1]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(smallest)]).returncode == 0


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_run_file_with_a_legal_layout(path):
    run = load_run(path)
    layout = parse(run.layout)
    layout = with_global_batch(layout, run.global_batch, stated(run.layout))
    check(layout, load_config(run.model), run.data.sequence_length)


def test_there_is_an_example_for_each_split():
    layouts = [parse(load_run(path).layout) for path in EXAMPLES]
    for axis in ("dp", "zero", "pp", "tp", "sp", "ulysses", "ring", "ep"):
        assert any(getattr(layout, axis) > getattr(Layout(), axis) for layout in layouts), axis
    assert {1, 2, 4, 8, 16} == {layout.world_size for layout in layouts}
