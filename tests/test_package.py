"""What is installed: every data file, and no torch for planning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("pyproject.toml is read with tomllib of Python 3.11", allow_module_level=True)

import tomllib

import fivefold

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


@pytest.mark.slow
def test_a_wheel_and_an_sdist_install_and_plan(tmp_path):
    """From a copy of the source, since a build leaves files in the folder that it builds."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(SOURCE, source / "src", ignore=shutil.ignore_patterns("*.egg-info", "*cache*"))
    build = "import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])"
    contents = {}
    for kind in ("wheel", "sdist"):
        _run(sys.executable, "-c", build.format(kind), str(tmp_path), folder=source)
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    for archive in (wheel, sdist):
        target = tmp_path / archive.suffix[1:]
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
        _run(*pip, "--quiet", "--target", str(target), str(archive), folder=tmp_path)
        contents[archive] = {
            path.relative_to(target)
            for path in (target / "fivefold").rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        command = ["-m", "fivefold", "plan", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8"]
        planned = _run(sys.executable, *command, folder=tmp_path, path=str(target))
        assert "llama-3.1-8b: 8.03 B parameters" in planned
        version = _run(
            sys.executable, "-m", "fivefold", "--version", folder=tmp_path, path=str(target)
        )
        assert version == f"fivefold {fivefold.__version__}\n"
    assert contents[wheel] == contents[sdist]


def _run(*command: str, folder: Path, path: str = "") -> str:
    """What a command prints, in a folder and with that search path for modules."""
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_changelog_begins_with_the_version_of_the_package():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == fivefold.__version__


def test_the_lock_has_every_package_that_the_extras_name():
    lines = (ROOT / "requirements.lock").read_text().splitlines()[1:]
    locked = {line.partition("==")[0].lower() for line in lines}
    named = [*PROJECT["project"]["dependencies"]]
    for extra in ("train", "dev"):
        named += PROJECT["project"]["optional-dependencies"][extra]
    assert {re.split("[><=]", name)[0].lower() for name in named} <= locked


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
