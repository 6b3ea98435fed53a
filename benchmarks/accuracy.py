"""How far the planner's step times and memory are from published measurements.

    python benchmarks/accuracy.py                          tables
    python benchmarks/accuracy.py --measurements FILE.csv  of another file with the same columns
    python benchmarks/accuracy.py --json                   the same, machine-readable
    python benchmarks/accuracy.py --write                  docs/accuracy.md, its plots, and the
                                                           errors that the planner's intervals use
    python benchmarks/accuracy.py --write --halves         refits on half of the clusters as well
                                                           (takes many minutes)

Every row that says enough is predicted; those that do not are listed with the reason. What a row
leaves blank is filled by the rules of measurements.py and predictions.py: the least recomputation
that fits in memory by the planner's own estimate, and then the micro-batch and the chunks that are
predicted fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the packages importable
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

import numpy as np
import yaml

from benchmarks import pages, spread
from benchmarks.measurements import INFERRED, MEASUREMENTS, read
from benchmarks.ranking import ranking
from benchmarks.reasons import memory_reasons, step_reasons
from benchmarks.scores import Scored, both, figures, score
from fivefold.files import atomic_write
from fivefold.plan import intervals

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
FIGURES = ROOT / "docs" / "figures"

WORST = 10
GENERATIONS = {
    "V": "Volta",
    "A": "Ampere",
    "H": "Hopper",
    "GB": "Blackwell",
    "B": "Blackwell",
    "MI": "CDNA",
}
"""NVIDIA's and AMD's architectures by how a GPU's name begins."""

Report = dict[str, Any]


def generation(gpu: str) -> str:
    """The architecture of a GPU by its name."""
    names = sorted(GENERATIONS, key=len, reverse=True)
    return next((GENERATIONS[name] for name in names if gpu.startswith(name)), "other")


PARTS: dict[str, Callable[[Scored], list[str]]] = {
    "source": lambda row: [row.case.source],
    "generation": lambda row: [generation(row.case.gpu)],
    "gpu": lambda row: [row.case.gpu],
    "model": lambda row: [row.case.kind],
    "split": lambda row: row.splits,
    "precision": lambda row: [row.case.job.precision],
    "trust": lambda row: [row.case.trust],
}
"""What the figures are shown by. A row with several splits counts with each of them."""


# --- The report.


def report(path: Path = MEASUREMENTS) -> tuple[Report, list[Scored]]:
    """The figures of a file (errors as fractions), and its rows with their predictions."""
    cases, skipped = read(path)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # rows that make no sense; their numbers are refused
        rows, failed = score(cases)
    totals = both(rows)
    return {
        **totals,
        "by": {name: _by(rows, part) for name, part in PARTS.items()},
        "ranking": ranking(rows),
        "worst": {"time": _worst_steps(rows), "memory": _worst_memory(rows)},
        "skipped": [{"id": name, "reason": why} for name, why in [*skipped, *failed]],
    }, rows


def _by(rows: Sequence[Scored], part: Callable[[Scored], list[str]]) -> Report:
    groups = defaultdict(list)
    for row in rows:
        for name in part(row):
            groups[name].append(row)
    return {name: both(groups[name]) for name in sorted(groups)}


def _worst_steps(rows: Sequence[Scored]) -> list[Report]:
    timed = [row for row in rows if row.step_error is not None]
    timed.sort(key=lambda row: -abs(np.log1p(row.step_error or 0.0)))
    return [
        {**_described(row), "measured_s": row.case.step_s, "predicted_s": row.step_s,
         "error": row.step_error, "reason": step_reasons(row, rows)}
        for row in timed[:WORST]
    ]  # fmt: skip


def _worst_memory(rows: Sequence[Scored]) -> list[Report]:
    weighed = [row for row in rows if row.memory_error is not None]
    weighed.sort(key=lambda row: -abs(np.log1p(row.memory_error or 0.0)))
    return [
        {**_described(row), "measured_bytes": row.case.memory_bytes,
         "predicted_bytes": row.memory_bytes, "error": row.memory_error,
         "reason": memory_reasons(row)}
        for row in weighed[:WORST]
    ]  # fmt: skip


def _described(row: Scored) -> Report:
    return {"id": row.case.id, "cluster": row.case.cluster, "layout": str(row.layout)}


# --- As text.

FIGURES_OF = (("time", "step time"), ("memory", "memory"))


def as_text(result: Report) -> str:
    """The figures as lines for the terminal."""
    lines = [_text_line("", label, result[what]) for what, label in FIGURES_OF]
    for name, groups in result["by"].items():
        lines += ["", f"by {name}"]
        for group, each in groups.items():
            for what, label in FIGURES_OF:
                if each[what]["rows"]:
                    lines.append(_text_line(group, label, each[what]))
    lines += ["", "ranking: " + ranking_sentence(result["ranking"])]
    for what, label in FIGURES_OF:
        lines += ["", f"worst rows by {label}"]
        lines += [
            f"  {row['id']:12} {row['error']:+7.1%}  {row['cluster']}: {row['layout']}: "
            f"{row['reason']}"
            for row in result["worst"][what]
        ]
    lines += ["", f"skipped: {len(result['skipped'])} rows"]
    lines += [f"  {row['id']:12} {row['reason']}" for row in result["skipped"]]
    return "\n".join(lines)


def _text_line(group: str, label: str, each: Report) -> str:
    median, p90, bias = _percents(each)
    return (
        f"  {group[:40]:40} {label:9} {each['rows']:5} rows {each['clusters']:4} clusters  "
        f"median {median:>6}  p90 {p90:>6}  bias {bias:>6}"
    )


def _percents(each: Report) -> tuple[str, str, str]:
    def percent(value: float | None, form: str = ".1%") -> str:
        return "-" if value is None else format(value, form)

    return (
        percent(each["median_abs_error"]),
        percent(each["p90_abs_error"]),
        percent(each["bias"], "+.1%"),
    )


def ranking_sentence(result: Report) -> str:
    """How often the measured best layout is found, and what following the plan costs."""
    if not result["sweeps"]:
        return "no job was measured in two layouts"
    return (
        f"{result['sweeps']} sweeps of {result['layouts']} layouts; the measured best is predicted "
        f"best, or within 1 % of it, in {result['best_found']}; following the plan costs "
        f"{result['mean_regret']:.1%} in the mean and {result['worst_regret']:.1%} at worst"
    )


# --- docs/accuracy.md: blocks between markers.


def blocks(result: Report, rows: Sequence[Scored], as_unseen: Sequence[Scored]) -> dict[str, str]:
    """What stands between the markers of the page, but for halves and published layouts."""
    trusted = [row for row in rows if row.case.trust == "A"]
    others = [row for row in rows if row.case.source not in INFERRED]
    nearly = [row for row in rows if row.case.trust in ("A", "A-")]
    totals = [
        ("all rows", both(rows)),
        ("trust A", both(trusted)),
        ("trust A and A-", both(nearly)),
        (f"all but {', '.join(INFERRED)}", both(others)),
    ]
    made = {
        "totals": _table("rows of", totals),
        "ranking": ranking_sentence(result["ranking"]) + ".\n\n" + _sweeps_table(result["ranking"]),
        "worst-time": _worst_table(result["worst"]["time"], "s", 1.0),
        "worst-memory": _worst_table(result["worst"]["memory"], "bytes", 1e9),
        "skipped": _skipped_table(result["skipped"]),
        "coverage": _coverage_tables(spread.coverage(rows, as_unseen)),
        "measured": _measured_sentence(spread.sharpened(rows)),
    }
    for name, groups in result["by"].items():
        made[f"by-{name}"] = _table(name, list(groups.items()))
    return made


def _table(first: str, rows: Sequence[tuple[str, Report]]) -> str:
    lines = [
        f"| {first} | rows | clusters | median | p90 | bias "
        "| memory rows | clusters | median | p90 | bias |",
        "| --- " * 11 + "|",
    ]
    for name, each in rows:
        cells = [name]
        for what in ("time", "memory"):
            numbers = each[what]
            if numbers["rows"]:
                cells += [str(numbers["rows"]), str(numbers["clusters"]), *_percents(numbers)]
            else:
                cells += ["-"] * 5
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _worst_table(rows: Sequence[Report], unit: str, scale: float) -> str:
    shown = "GB" if unit == "bytes" else unit
    lines = [
        f"| row | model and GPU | layout | measured, {shown} | predicted, {shown} | error "
        "| likely reason |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        measured, predicted = row[f"measured_{unit}"] / scale, row[f"predicted_{unit}"] / scale
        cells = [row["id"], row["cluster"], f"`{row['layout']}`", f"{measured:.4g}"]
        cells += [f"{predicted:.4g}", f"{row['error']:+.0%}", row["reason"]]
        lines.append(_line(cells))
    return "\n".join(lines)


def _sweeps_table(result: Report) -> str:
    lines = [
        "| worst sweeps | slower by | measured best | predicted best |",
        "| --- " * 4 + "|",
    ]
    for sweep in result["worst"]:
        cells = [sweep["sweep"], f"{sweep['regret']:.1%}"]
        cells += [f"`{sweep['measured_best']}`", f"`{sweep['predicted_best']}`"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _skipped_table(skipped: Sequence[Report]) -> str:
    reasons = defaultdict(list)
    for row in skipped:
        reasons[row["reason"]].append(row["id"])
    lines = ["| why | rows |", "| --- | --- |"]
    lines += [_line([reason, ", ".join(names)]) for reason, names in reasons.items()]
    return "\n".join(lines)


def _coverage_tables(result: Report) -> str:
    parts = []
    for what, each in result.items():
        lines = [
            f"| {what.replace('_', ' ')}, kind | interval | clusters | truth inside, cluster left "
            "out | truth inside, device unseen |",
            "| --- " * 5 + "|",
        ]
        left, unseen = each["clusters_left_out"], each["devices_left_out"]
        for name, held in left.items():
            kind = each["kinds"].get(name) if name != "in all" else None
            shown = f"{kind['low'] - 1:+.0%} to {kind['high'] - 1:+.0%}" if kind else ""
            other = unseen.get(name, {}).get("inside")
            cells = [name, shown, str(held["clusters"]), f"{held['inside']:.0%}"]
            lines.append(_line([*cells, "-" if other is None else f"{other:.0%}"]))
        lines += [
            "",
            f"For a device that no row is of, the interval is {each['unseen_device']:.2f} times as "
            "wide (on a logarithmic scale).",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _measured_sentence(result: Report) -> str:
    if not result["programs"]:
        return "No program was measured in two layouts."
    lines = ["| other layouts, predicted | median | p90 |", "| --- | --- | --- |"]
    for name, label in (("before", "without a measured step"), ("after", "with one measured step")):
        each = result[name]
        cells = [label, f"{each['median_abs_error']:.1%}", f"{each['p90_abs_error']:.1%}"]
        lines.append(_line(cells))
    lines += [
        "",
        f"{result['programs']} programs (one model on one GPU, from one source) with two layouts "
        "or more, each of which was measured in turn. The interval is then "
        f"{result['narrower']:.2f} times as wide, and the truth lay inside for "
        f"{result['inside']:.0%} of the other layouts.",
    ]
    return "\n".join(lines)


def write(result: Report, rows: list[Scored], refit: bool) -> None:
    """errors.yaml, the plots and the page."""
    from benchmarks import plots, published

    as_unseen = score([spread.unseen(row.case) for row in rows])[0]
    errors = spread.errors_file(rows, as_unseen)
    atomic_write(intervals.ERRORS, ERRORS_HEAD + yaml.safe_dump(errors, sort_keys=False))
    intervals.errors.cache_clear()
    contents = blocks(result, rows, as_unseen) | {"published": published.table()}
    if refit:
        contents["halves"] = halves(rows)
    pages.write(PAGE, contents)
    drawn = {
        "accuracy_time": plots.predicted_against_measured(rows),
        "accuracy_memory": plots.predicted_against_measured(rows, memory=True),
        "accuracy_errors": plots.error_histogram(rows),
    }
    for name, canvas in drawn.items():
        atomic_write(FIGURES / f"{name}.svg", canvas.svg())


ERRORS_HEAD = """\
# Measured over predicted on published rows; made by benchmarks/accuracy.py --write.
# coverage: the share of cases whose truth an interval holds.
# kinds: by kind, the clusters of rows it is from, and the interval's ends.
# devices: on which rows are; unseen_device: how many times as wide intervals of others are (log).
# shared, own: standard deviations of the logarithm that all layouts of a program share, and of one.
"""


def halves(rows: Sequence[Scored]) -> str:
    """Markdown: the constants fitted on each half of the clusters, scored on both."""
    from benchmarks import fit
    from benchmarks.predictions import ENTRIES

    # From the middle of what is physically possible: the constants in use know both halves.
    middle = {name: (low + high) / 2 for name, (low, high) in fit.BOUNDS.items()}
    start = fit.start_values(ENTRIES) | middle
    cases = [row.case for row in rows if row.case.step_s is not None]
    first, second = fit.halves(cases)
    lines = [
        "| constants fitted on | scored on | rows | clusters | median | p90 | bias |",
        "| --- " * 7 + "|",
    ]
    for name, mine, other in (("first half", first, second), ("second half", second, first)):
        values = fit.fit(mine, start)
        for scored_on, half in (("the same half", mine), ("the other half", other)):
            each = _figures_with(half, values)
            cells = [name, scored_on, str(each["rows"]), str(each["clusters"]), *_percents(each)]
            lines.append(_line(cells))
    return "\n".join(lines)


def _figures_with(cases: Sequence[Any], values: dict[str, float]) -> Report:
    from benchmarks.predictions import choose, predict_steps

    predicted = predict_steps(cases, choose(cases, values), values)
    pairs = zip(cases, predicted.tolist(), strict=True)
    return figures((case.cluster, step / case.step_s - 1) for case, step in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    parser.add_argument("--write", action="store_true", help="write the page, plots and errors")
    parser.add_argument("--halves", action="store_true", help="with --write: refit on the halves")
    options = parser.parse_args(arguments)
    if not options.measurements.is_file():
        parser.error(f"there is no file {options.measurements}")
    if options.write and options.measurements != MEASUREMENTS:
        parser.error("--write is for the rows in benchmarks/data: leave out --measurements")
    result, rows = report(options.measurements)
    if options.write:
        write(result, rows, options.halves)
    print(json.dumps(result, indent=2) if options.json else as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
