"""A program that trains starts with the settings of its heap, once, and keeps the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fivefold.malloc_env import NVIDIA, TUNABLES, settings

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or NVIDIA.exists(), reason="it is for Linux without GPUs"
)

PROGRAM = """
import json, os, sys
from fivefold.malloc_env import reexec_with_malloc_settings
reexec_with_malloc_settings()
names = ("GLIBC_TUNABLES", "MKL_DISABLE_FAST_MM")
print(json.dumps([os.getpid(), sys.argv[1:], {name: os.environ[name] for name in names}]))
"""
NAMES = ("GLIBC_TUNABLES", "MKL_DISABLE_FAST_MM")
CLEAN = {name: value for name, value in os.environ.items() if name not in NAMES}


def run(**environment: str) -> tuple[int, list]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "an argument", "--flag"],
        env={**CLEAN, **environment},
        stdout=subprocess.PIPE,
    )
    out, _ = process.communicate()
    return process.pid, json.loads(out)


def test_the_same_process_goes_on_with_its_arguments_and_the_settings() -> None:
    started, (pid, arguments, found) = run()
    assert (pid, arguments) == (started, ["an argument", "--flag"])
    assert found == settings({}) and all(name in found["GLIBC_TUNABLES"] for name in TUNABLES)


def test_what_a_user_has_set_stays_and_the_rest_comes_after_it() -> None:
    own = "glibc.pthread.rseq=0:glibc.malloc.mxfast=64"
    _, (_, _, found) = run(GLIBC_TUNABLES=own, MKL_DISABLE_FAST_MM="0")
    assert found["MKL_DISABLE_FAST_MM"] == "0"
    others = [f"{name}={value}" for name, value in TUNABLES.items() if not name.endswith("mxfast")]
    assert found["GLIBC_TUNABLES"] == ":".join([own, *others])


@pytest.mark.parametrize(
    ("arguments", "restarts"),
    [
        (["train", "--help"], True),
        (["check", "--help"], True),
        (["calibrate", "--help"], True),
        (["plan", "--here", "--help"], True),
        (["plan", "--help"], False),
    ],
)
def test_commands_that_train_have_them_and_the_planner_does_without(
    arguments: list[str], restarts: bool
) -> None:
    code = "import fivefold.malloc_env as m, sys; m.os.execve = lambda *a: print('restarted'); "
    code += "from fivefold.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    out = subprocess.run(command, env=CLEAN, capture_output=True, text=True).stdout
    assert out.startswith("restarted" if restarts else "Usage")
