"""The measures of the program's house: sizes, and which room imports which.

    python -m benchmarks.house [--json]

Everything is read from the source, nothing is imported or run. A line of code is a line that holds
part of a statement: blank lines, comments and docstrings are not counted.
`tests/test_house.py` holds the numbers to their limits.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"

BASE = {
    "errors",
    "files",
    "text",
    "malloc_env",
    "step_trace",
    "schema",
    "version",
    "arrays",
    "results",
}
"""Modules at the root that any room may use."""
RUNTIME = ("train", "parallel", "model", "layout", "ledger")
"""The rooms of the runtime; those of readers and of verification are others."""
ARROWS: dict[str, set[str]] = {
    "version": set(),
    "arrays": set(),
    "errors": set(),
    "files": {"errors"},
    "text": {"errors"},
    "malloc_env": set(),
    "results": set(),
    "schema": {"errors", "files", "text"},
    "step_trace": {"ledger"},
    "ledger": set(),
    "model": set(),
    "readers": {"model"},
    "layout": {"model", "ledger"},
    "cluster": set(),
    "parallel": {"layout", "model", "ledger"},
    "train": {"parallel", "layout", "model", "readers", "ledger"},
    "plan": {"cluster", "parallel", "layout", "model", "readers", "ledger"},
    "calibrate": {"train", "cluster", "plan", "parallel", "layout", "model", "readers", "ledger"},
    "verify": {"plan", "train", "cluster", "parallel", "layout", "model", "readers", "ledger"},
    "interop": {"plan", "layout", "model", "readers"},
    "report": {
        "results",
        "verify",
        "plan",
        "train",
        "cluster",
        "parallel",
        "layout",
        "model",
        "ledger",
    },
}
"""What each room may import, apart from BASE. `readers` is model/huggingface; `cli`, the api and
`__main__` stand on top and may import anything."""
TOP = {"cli", "api", "__main__"}

STEP = "fivefold.train.trainer"
WORKER = "fivefold.train.loop"
NOT_OF_A_STEP = (
    r"\.model\.huggingface\b",  # readers of configurations and of files
    r"^fivefold\.(files|schema|text)$",
    r"\.train\.(runfile|prepare)$",
    r"\.train\.data\.(documents|tokenizer|tokens)$",
    r"\.train\.(launch|torchrun)$",  # the start of processes
    r"\.parallel\.pipeline\.(proof|simulation)$",  # verification, and prediction of a schedule
    r"\.parallel\.(\w+\.)?(cost|overlap|memory|workload|layer_counts)$",
    r"\.(layout\.(legality|\w*_rules|rule|batch)|model\.counts)$",
    r"^fivefold\.(verify|plan|cluster|report|calibrate|interop)\b",
)
"""What a training step executes: STEP, which builds a rank's model, splits, optimizer and schedule
and does the steps, and all that it imports directly or through others (imports for types alone are
not followed), without the modules that match one of these patterns: readers of files, the start of
processes, verification, cost and simulation. What a worker executes is the same from WORKER, which
also writes metrics and checkpoints."""

WEIGHT_NAME = re.compile(r"_proj\b|(norm|gate)\.weight")


@dataclass(frozen=True)
class Function:
    """One function or method: its size and its switches."""

    place: str  # file:line name
    code_lines: int
    booleans: int  # parameters that are annotated `bool`, or have True or False as default


@dataclass(frozen=True)
class Module:
    """One file of the source."""

    name: str  # fivefold.plan.search.search
    path: Path
    place: str  # plan/search/search.py

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines))

    @cached_property
    def code(self) -> set[int]:
        """The numbers of its lines of code."""
        return code_lines(self.tree, self.lines)

    @property
    def room(self) -> str:
        """Its package, or its own name at the root."""
        parts = self.name.split(".")
        if parts[1:3] == ["model", "huggingface"]:
            return "readers"
        return parts[1] if len(parts) > 1 else "version"


def main() -> None:
    parser = argparse.ArgumentParser(description="Sizes and imports of the program.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args()
    measures = House().measures()
    if arguments.json:
        print(json.dumps(measures, indent=2))
        return
    for name, value in measures.items():
        if isinstance(value, list):
            print(f"{name:40} {len(value):>7,}")
            for line in value:
                print(f"    {line}")
        else:
            print(f"{name:40} {value:>7,}")


class House:
    """All modules of the program and what follows from their source."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted((source / "fivefold").rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path, "/".join(path.relative_to(source).parts[1:]))

    def measures(self) -> dict[str, int | list[str]]:
        """All measures, in the order in which they are printed."""
        runtime = [m for m in self.modules.values() if m.room in RUNTIME]
        step, worker = self.executed(STEP), self.executed(WORKER)
        planner = [m for m in self.modules.values() if m.room == "plan"]
        everything = self.modules.values()
        return {
            "lines": sum(len(m.lines) for m in everything),
            "lines of code": sum(len(m.code) for m in everything),
            "runtime lines": sum(len(m.lines) for m in runtime),
            "step lines": sum(len(m.lines) for m in step),
            "step lines of code": sum(len(m.code) for m in step),
            "worker lines": sum(len(m.lines) for m in worker),
            "worker lines of code": sum(len(m.code) for m in worker),
            "planner lines": sum(len(m.lines) for m in planner),
            "files over 400 lines": self.long_files(),
            "functions over 50 lines of code": [
                f"{f.place} {f.code_lines}" for f in self.functions() if f.code_lines > 50
            ],
            "functions with over 2 booleans": [
                f"{f.place} {f.booleans}" for f in self.functions() if f.booleans > 2
            ],
            "lines with Any in annotations": sum(len(any_lines(m.tree)) for m in everything),
            "upward imports": self.upward_imports(),
            "package cycles": self.package_cycles(),
            "module cycles": self.module_cycles(),
            "places that describe a weight's split": self.split_places(),
        }

    def imports(self, module: Module, types: bool = True) -> set[str]:
        """Modules of the program that one imports anywhere, also in functions; with `types`, those
        it imports under TYPE_CHECKING too."""
        found: set[str] = set()
        for node in statements(module.tree, types):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in self.modules else node.module)
        return {name for name in found if name in self.modules} - {module.name}

    def executed(self, entry: str) -> list[Module]:
        """The modules that run from `entry` on while a model is trained, see NOT_OF_A_STEP."""
        seen: set[str] = set()
        todo = [entry]
        while todo:
            name = todo.pop()
            if (
                name not in self.modules
                or name in seen
                or any(re.search(pattern, name) for pattern in NOT_OF_A_STEP)
            ):
                continue
            seen.add(name)
            todo += self.imports(self.modules[name], types=False)
        return [self.modules[name] for name in sorted(seen)]

    def long_files(self, limit: int = 400) -> list[str]:
        """Files of more lines than `limit`, with their number of lines."""
        return [f"{m.place} {len(m.lines)}" for m in self.modules.values() if len(m.lines) > limit]

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    size = len(module.code & set(range(node.lineno, node.end_lineno + 1)))
                    place = f"{module.place}:{node.lineno} {node.name}"
                    yield Function(place, size, count_booleans(node.args))

    def upward_imports(self) -> list[str]:
        """Imports that ARROWS does not allow."""
        wrong = []
        for module in self.modules.values():
            if module.room in TOP:
                continue
            allowed = ARROWS.get(module.room, set()) | BASE | {module.room}
            if module.room in BASE:
                allowed = ARROWS[module.room] | {module.room}
            for name in sorted(self.imports(module)):
                if self.modules[name].room not in allowed:
                    wrong.append(f"{module.name} -> {name}")
        return wrong

    def package_cycles(self) -> list[str]:
        """Packages, at any depth, that import each other round in a circle.

        The packages of one parent are compared: `fivefold.plan.time` with `fivefold.plan.search`,
        `fivefold.plan` with `fivefold.train`; a file directly in the parent counts as itself.
        """
        parents = {name.rpartition(".")[0] for name in self.modules if "." in name}
        found = []
        for parent in sorted(parents):
            edges: dict[str, set[str]] = {}
            for module in self.modules.values():
                child = _child(module.name, parent)
                if child:
                    others = {_child(name, parent) for name in self.imports(module)}
                    edges.setdefault(child, set()).update(others - {child, ""})
            packages = {n for n in edges if any(m.startswith(f"{n}.") for m in self.modules)}
            found += [" <-> ".join(sorted(group)) for group in circles(edges) if group & packages]
        return found

    def module_cycles(self) -> list[str]:
        """Modules that import each other round in a circle, late imports included."""
        edges = {name: self.imports(module) for name, module in self.modules.items()}
        return [" <-> ".join(sorted(group)) for group in circles(edges)]

    def split_places(self) -> list[str]:
        """Modules that say how weights are split: the table of weights, and each module of
        `parallel` that spells the name of a weight in a string."""
        return [
            m.place
            for m in self.modules.values()
            if m.name == "fivefold.model.weights"
            or (m.room == "parallel" and any(map(WEIGHT_NAME.search, strings(m.tree))))
        ]


def _child(name: str, parent: str) -> str:
    """The child of `parent` that a module is or is in; "" if none."""
    if not name.startswith(f"{parent}."):
        return ""
    return f"{parent}." + name[len(parent) + 1 :].partition(".")[0]


def statements(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """All nodes; without `types`, none of a block `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            continue
        yield node
        yield from statements(node, types)


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Strings that stand alone as a statement."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node


def code_lines(tree: ast.AST, lines: list[str]) -> set[int]:
    """The numbers, from 1, of the lines that are not blank, a comment or part of a docstring."""
    text: set[int] = set()
    for node in docstrings(tree):
        assert node.end_lineno is not None
        text |= set(range(node.lineno, node.end_lineno + 1))
    return {
        number
        for number, line in enumerate(lines, 1)
        if number not in text and line.strip() and not line.lstrip().startswith("#")
    }


def strings(tree: ast.AST) -> Iterator[str]:
    """Strings of the code, parts of f-strings included, docstrings left out."""
    text = {id(node.value) for node in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in text:
            yield node.value


def count_booleans(arguments: ast.arguments) -> int:
    """Parameters that are switches: annotated `bool`, or True or False by default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return sum(
        (a.annotation is not None and ast.unparse(a.annotation) == "bool")
        or (isinstance(default, ast.Constant) and isinstance(default.value, bool))
        for a, default in pairs
    )


def any_lines(tree: ast.AST) -> set[int]:
    """The numbers of the lines in which `Any` is written, imports apart."""
    return {n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "Any"}


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected groups of more than one node (Tarjan, doi:10.1137/0201010)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            start = stack.index(node)
            groups.append(set(stack[start:]))
            del stack[start:]

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return [group for group in groups if len(group) > 1]


if __name__ == "__main__":
    main()
