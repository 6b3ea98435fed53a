"""The plan file: what is written comes back, and what is wrong is named."""

from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.plan import planfile
from fivefold.plan.planfile import PlanFile, Predicted

PLAN = PlanFile(
    layout="tp2 pp2 dp2 zero1 ga4",
    model="llama-3.1-8b",
    cluster="dgx-h100",
    gpus=8,
    sequence_length=8192,
    global_batch=8,
    predicted=Predicted(step_time_s=1.5),
)


def written(tmp_path, **changes: object):
    path = tmp_path / "plan.yaml"
    values = {**PLAN.model_dump(exclude_none=True), **changes}
    path.write_text(planfile.yaml.safe_dump(values), encoding="utf-8")
    return path


def test_a_saved_plan_comes_back_and_leaves_nothing_aside(tmp_path):
    path = tmp_path / "plan.yaml"
    planfile.save(PLAN, path)
    assert planfile.load(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_refused_before_there_is_a_plan(tmp_path):
    planfile.refuse_unwritable(tmp_path / "plan.yaml")
    for path, reason in [(tmp_path, "a folder"), (tmp_path / "no" / "plan.yaml", "no folder")]:
        with pytest.raises(UserError, match=reason):
            planfile.refuse_unwritable(path)


def test_a_model_file_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "model.json").write_text("{}", encoding="utf-8")
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    planfile.save(PLAN.model_copy(update={"model": "model.json"}), "plans/plan.yaml")
    monkeypatch.chdir(tmp_path.parent)
    model = planfile.load(tmp_path / "plans" / "plan.yaml").model
    assert isinstance(model, str)
    assert (tmp_path / "plans" / model).samefile(tmp_path / "model.json")


def test_the_layout_states_the_degree_that_follows_from_the_gpus(tmp_path):
    path = written(tmp_path, layout="tp2 pp2 zero1 ga4")
    assert str(planfile.load(path).parsed_layout()) == "tp2 pp2 dp2 zero1 ga4"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpu": 8}, "unknown key gpu; did you mean gpus?"),
        ({"gpus": 16}, "8 ranks, but the number of devices is 16"),
        ({"global_batch": 16}, "= 8 sequences, but global_batch is 16"),
        ({"layout": "tp2 xx3"}, "unknown layout token"),
        ({"gpus": "8"}, 'gpus must be a whole number, and is "8"'),
        ({"precision": "int4"}, "precision must be 'fp32'"),
        ({"predicted": {"speed": 1.0}}, "unknown key predicted.speed; known here: step_time_s"),
    ],
)
def test_what_is_wrong_in_a_plan_file_is_named(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=r"plan\.yaml") as caught:
        planfile.load(written(tmp_path, **changes))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "- a", "!!python/object/apply:os.getcwd []", "a: [", "a: b: c"]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        planfile.load(path)


def test_a_key_that_is_given_twice_is_rejected_with_its_line(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text() + "layout: tp8 ga8\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"not valid YAML, line 12: the key layout is given twice"):
        planfile.load(path)


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml"):
        planfile.load(tmp_path / "none.yaml")


def test_the_model_is_read_from_a_name_from_dimensions_and_from_keys():
    by_name = PLAN.read_model()
    assert by_name.hidden_size == 4096
    text = "hidden=512,layers=4,heads=8,vocab=1000,ffn=2048"
    assert PLAN.model_copy(update={"model": text}).read_model().hidden_size == 512
    with pytest.raises(UserError, match="model_type"):
        PLAN.model_copy(update={"model": {"hidden_size": 1}}).read_model()
