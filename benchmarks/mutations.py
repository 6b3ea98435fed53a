"""Breaks one rule at a time in a copy of the project, and sees whether a fast test notices.

    python benchmarks/mutations.py [NAME ...]

A mutation replaces the one place in src that its pattern finds. A pattern that finds none or more
is an error: the rule has moved and its mutation must follow. The tests must pass without any
mutation. Each mutation takes the seconds of its tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """`pattern` becomes `replacement` in a file of `folder`; one of `tests` must fail."""

    name: str
    folder: str  # below src/fivefold
    pattern: str
    replacement: str
    tests: str


OPTIMIZER = "tests/train/test_optimizer.py"
PLANNER = "tests/plan/test_published.py"

MUTATIONS = [
    Mutation("betas", "train", r"betas=settings\.betas", "betas=(0.9, 0.95)", OPTIMIZER),
    Mutation(
        "weight decay", "train", r'"weight_decay": settings\.weight_decay', '"weight_decay": 0.0',
        OPTIMIZER,
    ),
    Mutation(
        "decay of norms", "train",
        r'return not name\.endswith\("bias"\) and "norm" not in .*', "return True", OPTIMIZER,
    ),
    Mutation("clipping", "train", r"if self\.clip is not None:", "if False:", OPTIMIZER),
    Mutation(
        "warm-up", "train", r"if step < schedule\.warmup_steps:", "if False:",
        f"{OPTIMIZER} tests/train/test_learning_rate.py",
    ),
    Mutation("graphed step", "", r"GRAPHED_STEP = [\d.]+", "GRAPHED_STEP = 1.0", PLANNER),
    Mutation("host bandwidth", "", r"HOST_BANDWIDTH = [\d.e]+", "HOST_BANDWIDTH = 400e9", PLANNER),
    Mutation(
        "all-to-all bytes", "", r"ALL_TO_ALL_BYTES = [\d.e]+", "ALL_TO_ALL_BYTES = 0", PLANNER,
    ),
    Mutation("expert passes", "", r"\b6\.4$", "4.0", PLANNER),
    Mutation(
        "kernels of ulysses", "plan", r"ulysses \* 12\.0", "ulysses * 0.0", PLANNER,
    ),
    Mutation(
        "DP hidden behind late stages", "plan",
        r"role_rank\(job\.config, layouts, role\) \* pass_s", "0 * pass_s", PLANNER,
    ),
    Mutation(
        "slowest of many nodes", "plan", r"constants\.straggler \* np\.log2\(nodes\)", "0.0",
        PLANNER,
    ),
    Mutation(
        "tokens sent once a node", "plan",
        r"share \* _copies_once_a_node\(job, ep_members\) if", "share if", PLANNER,
    ),
    Mutation("passes of ZeRO", "", r"ZERO_PASSES = \d", "ZERO_PASSES = 0", PLANNER),
    Mutation("keys at a time", "", r"KEYS_AT_A_TIME = \d+", "KEYS_AT_A_TIME = 1", PLANNER),
    Mutation(
        "ties go to the simplest", "plan", r"TIE_TOLERANCE = [\d.]+", "TIE_TOLERANCE = 0.0",
        "tests/plan/search/test_search.py",
    ),
    Mutation(
        "hops of the ring", "parallel", r"hops = size - 1", "hops = size",
        "tests/parallel/test_cost.py",
    ),
    Mutation(
        "gathers of megatron sp", "parallel", r"gathers = 2 \* pairs", "gathers = pairs",
        "tests/parallel/test_cost.py",
    ),
    Mutation(
        "experts divide over ep", "layout",
        r"model\.moe is None or model\.moe\.num_experts % layout\.ep == 0", "True",
        "tests/layout/test_legality.py",
    ),
    Mutation(
        "warm-up of 1f1b", "parallel", r"warm_up = min\(warm_up_1f1b\(rank, pp, vpp\)",
        "warm_up = min(warm_up_1f1b(rank, pp, vpp) + 1", "tests/parallel/pipeline",
    ),
    Mutation(
        "place of a shard in a checkpoint", "train", r"offset\[dim\] \+= start",
        "offset[dim] += 0", "tests/train/checkpoint",
    ),
    Mutation(
        "a checkpoint is renamed when it is whole", "train", r"os\.rename\(aside, saved\.folder\)",
        "shutil.copytree(aside, saved.folder)", "tests/train/checkpoint",
    ),
]  # fmt: skip


def place_of(mutation: Mutation) -> Path:
    """The file that has the pattern, once; relative to the project. SystemExit for none or more."""
    folder = ROOT / "src" / "fivefold" / mutation.folder
    pattern = re.compile(mutation.pattern, re.MULTILINE)
    found = [
        path.relative_to(ROOT)
        for path in sorted(folder.rglob("*.py"))
        for _ in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    if len(found) != 1:
        places = ", ".join(map(str, found)) or "nowhere"
        sys.exit(
            f"{mutation.name}: {mutation.pattern!r} must stand in one place, and is in {places}"
        )
    return found[0]


def passes(tests: str, change: Callable[[Path], None]) -> bool:
    """Do the fast tests pass in a copy of the project that `change` has changed?"""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        change(copy)
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests.split()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / "src")},
            capture_output=True,
        )
    if ran.returncode not in (0, 1):
        sys.exit(f"{tests}: pytest ended with {ran.returncode}\n{ran.stdout.decode()}")
    return ran.returncode == 0


def is_caught(mutation: Mutation) -> bool:
    """Does a fast test fail with the mutation?"""
    place = place_of(mutation)

    def mutate(copy: Path) -> None:
        text = (copy / place).read_text(encoding="utf-8")
        text = re.sub(mutation.pattern, mutation.replacement, text, flags=re.MULTILINE)
        (copy / place).write_text(text, encoding="utf-8")

    return not passes(mutation.tests, mutate)


def main(names: list[str]) -> int:
    chosen = [each for each in MUTATIONS if not names or each.name in names]
    for tests in sorted({each.tests for each in chosen}):
        if not passes(tests, lambda copy: None):
            sys.exit(f"{tests}: fail without a mutation")
    missed = 0
    for mutation in chosen:
        caught = is_caught(mutation)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}  {mutation.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
