"""The documents agree with the program: tables, links, names, commands, the run file's keys."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

import fivefold.ledger
from benchmarks import pages, planning_page, split_tables
from fivefold.cli import main
from fivefold.layout import legality
from fivefold.layout.notation import DEFAULTS, FORMS, ORDER, parse
from fivefold.parallel.pipeline.table_file import with_table
from fivefold.train.runfile import Run, Section

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "torchrun" / "README.md",
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


# --- tables ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_of() -> dict[str, split_tables.Rows]:
    return {case.name: split_tables.predicted_rows(case) for case in split_tables.CASES}


def test_every_table_shows_what_the_cost_functions_say_today(rows_of) -> None:
    for page, contents in split_tables.blocks(rows_of).items():
        text = (split_tables.DOCS / page).read_text()
        for name, content in contents.items():
            assert pages.block(text, name) == content, f"{page}: {name} is out of date"


def test_a_formula_that_does_not_give_what_is_sent_is_refused(monkeypatch, rows_of) -> None:
    wrong = split_tables.FORMULAS.replace("m*(4*L + 2)", "m*(4*L + 1)")
    monkeypatch.setattr(split_tables, "FORMULAS", wrong)
    with pytest.raises(ValueError, match="tp2 sp ga2 has no row"):
        split_tables.formula_table(rows_of)


@pytest.mark.parametrize("page", planning_page.PAGES, ids=lambda page: page.name)
def test_the_plans_that_are_shown_are_of_the_models_and_clusters_of_today(page: Path) -> None:
    shown = list(planning_page.BLOCK.finditer(page.read_text(encoding="utf-8")))
    commands = {block["command"] for block in shown if (block["parts"] or "1").startswith("1")}
    assert commands
    for command in commands:
        question = planning_page.output(command).partition("\nsearch ")[0]
        assert f"-->\n\n```\n{question}\n" in page.read_text(encoding="utf-8"), command


def test_pages_have_no_tables_but_those_that_are_written() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        if name in ("accuracy.md", "performance.md"):  # of other commands
            continue
        written = {case.name for case in split_tables.CASES if case.page == name}
        written |= {"transfers"} if name == "splits.md" else set()
        assert set(re.findall(r"<!-- begin: (\S+) -->", page.read_text())) == written


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = "above\n<!-- begin: a -->\n\nold\n\n<!-- end: a -->\nbelow\n"
    assert pages.with_block(page, "a", "new") == page.replace("old", "new")
    with pytest.raises(ValueError):
        pages.with_block(page, "b", "new")


def test_payloads_are_defined_as_in_the_ledger() -> None:
    assert fivefold.ledger.__doc__ is not None
    page = (ROOT / "docs" / "splits.md").read_text()
    for op, words in _table(fivefold.ledger.__doc__, "op"):
        assert f"| {op} | {words} |" in page


def test_the_figures_show_what_the_program_does() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))["FIGURES"]
    for name, figure in figures.items():
        drawn = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
        assert drawn == figure().svg(), f"{name}.svg is out of date: run docs/figures/draw.py"


# --- links and names ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} is not there"
        if anchor:
            assert anchor in _anchors(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"(?<![\w/.-])([\w.-]+/[\w./-]*\w\.(?:py|md|yaml|json|svg))", page.read_text()
    )
    roots = (ROOT, ROOT / "src" / "fivefold", page.parent)
    for name in named:
        assert any((root / name).exists() for root in roots), f"there is no {name}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_layouts_that_are_shown_are_legal(page: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)  # a layout may name an example's table
    text = page.read_text()
    shown = re.findall(r'(?:--layout|fivefold layout) "([^"]+)"', text)
    shown += re.findall(r"^    ((?:tp|pp|dp|ulysses|ring)\d\S*(?: \S+)*)", text, re.MULTILINE)
    for line in shown:
        layout = with_table(parse(line))
        legality.check(layout)


def test_the_output_of_layout_is_what_the_readme_shows(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["layout", "tp2 sp pp2 dp2 ep2"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = pages.block((ROOT / "README.md").read_text(), "layout")
    assert shown == "\n".join(["```", *printed, "```"])


# --- references --------------------------------------------------------------------------------


def test_every_key_of_the_run_file_is_described_with_its_default() -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    described = {key.strip("`"): default.strip("`") for key, *_, default in _table(text, "key")}
    assert described == dict(_defaults(Run))


def _defaults(section: type[Section], prefix: str = ""):
    for key, field in section.model_fields.items():
        inner = field.annotation
        if field.exclude:
            continue
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _defaults(inner, f"{key}.")
        else:
            yield prefix + key, "required" if field.is_required() else _show(field.default)


def _show(value) -> str:
    return json.dumps(value).strip('"')


def test_every_token_of_the_layout_line_is_described_with_its_default() -> None:
    described = {}
    for tokens, _, defaults in _table((ROOT / "docs" / "layout.md").read_text(), "token"):
        names = [name.strip("`=").removesuffix("N") for name in tokens.split(", ")]
        described |= dict(zip(names, defaults.replace("`", "").split(", "), strict=True))
    expected = {name: str(getattr(DEFAULTS, name, 1)) for name in FORMS}
    expected |= {"sp": "off", "edp": "from the others", "layers": "automatic"}
    assert described == expected | {"order": "-".join(ORDER)}


# --- reading markdown --------------------------------------------------------------------------


def _table(text: str, first_column: str) -> list[list[str]]:
    """The rows of all tables whose first column has this name. A row whose first cell is empty
    goes on with the row above."""
    rows: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif cells[0] == first_column:
            inside = True
        elif inside and cells[0] == "":
            rows[-1] = [
                f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)
            ]
        elif inside and not cells[0].startswith("---"):
            rows.append(cells)
    return rows


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
