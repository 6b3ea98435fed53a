"""The documentation site builds without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_site_builds_and_has_every_page(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(tmp_path / "t"),
    ]
    done = subprocess.run(
        [*command, "docs", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (tmp_path / "site" / name).is_file(), name
