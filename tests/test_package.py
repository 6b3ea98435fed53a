"""What is installed: every data file, and no torch for planning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("pyproject.toml is read with tomllib of Python 3.11", allow_module_level=True)

import tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_data_file_of_the_source_is_part_of_the_package():
    covered: set[Path] = set()
    for package, globs in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = SOURCE / package.replace(".", "/")
        for glob in globs:
            found = set(folder.glob(glob))
            assert found, f"{package}: nothing is called {glob}"
            covered |= found
    data = {
        path
        for path in (SOURCE / "fivefold").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert data == covered


def test_folders_of_code_are_packages():
    """setuptools finds packages by their __init__.py."""
    for path in (SOURCE / "fivefold").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path


def test_what_plans_and_exports_is_imported_without_the_training_extra():
    needed = {name.partition(">")[0] for name in PROJECT["project"]["dependencies"]}
    assert needed == {"numpy", "pydantic", "pyyaml", "rich", "typer"}
    code = """if True:
        import importlib, pkgutil, sys
        sys.modules |= dict.fromkeys(("torch", "tokenizers", "safetensors"))
        for name in ("plan", "cluster", "layout", "report"):
            package = importlib.import_module("fivefold." + name)
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
