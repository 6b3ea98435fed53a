"""Writes what the commands of README.md and docs/planning.md print into these pages.

    python -m benchmarks.planning_page

A block is made of a line `<!-- run: COMMAND -->` and the code block after it. A second line
`<!-- parts: 1, 2 -->` keeps those parts of the output, which empty lines divide, counted from 1.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from fivefold.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "planning.md")
BLOCK = re.compile(
    r"<!-- run: (?P<command>.+?) -->\n(?:<!-- parts: (?P<parts>[0-9, ]+) -->\n)?\n"
    r"```\n.*?```\n",
    re.DOTALL,
)


def output(command: str) -> str:
    """What a fivefold command prints, without trailing blanks."""
    program, *arguments = shlex.split(command)
    if program != "fivefold":
        raise ValueError(f"{command} is no fivefold command")
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    if done.stderr:
        raise ValueError(f"{command}: {done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def block(match: re.Match[str]) -> str:
    """The block with what its command prints today."""
    text = output(match["command"])
    head = f"<!-- run: {match['command']} -->\n"
    if match["parts"]:
        parts = text.split("\n\n")
        kept = [int(number) for number in match["parts"].split(",")]
        text = "\n\n".join(parts[number - 1] for number in kept)
        head += f"<!-- parts: {match['parts']} -->\n"
    return f"{head}\n```\n{text}\n```\n"


def main() -> None:
    for path in PAGES:
        atomic_write(path, BLOCK.sub(block, path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
