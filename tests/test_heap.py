"""A program that trains starts with the settings of its heap, once, and keeps the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fivefold.heap import SETTINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux")

PROGRAM = """
import json, os, sys
from fivefold.heap import SETTINGS, restart_with_settings
restart_with_settings()
print(json.dumps([os.getpid(), sys.argv[1:], {name: os.environ[name] for name in SETTINGS}]))
"""


def run(**environment: str) -> tuple[int, list]:
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "an argument", "--flag"],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
    )
    out, _ = process.communicate()
    return process.pid, json.loads(out)


def test_the_same_process_goes_on_with_its_arguments_and_the_settings() -> None:
    started, (pid, arguments, found) = run()
    assert (pid, arguments, found) == (started, ["an argument", "--flag"], SETTINGS)


def test_what_a_user_has_set_stays() -> None:
    _, (_, _, found) = run(GLIBC_TUNABLES="glibc.malloc.perturb=1")
    assert found == {**SETTINGS, "GLIBC_TUNABLES": "glibc.malloc.perturb=1"}


def test_the_command_that_trains_has_them_and_the_planner_does_without() -> None:
    code = "import fivefold.heap as heap, sys; heap.os.execve = lambda *a: print('restarted'); "
    code += "from fivefold.cli import main; main()"
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}

    def printed(*arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=clean, capture_output=True, text=True).stdout

    assert printed("train", "--help").startswith("restarted")
    assert printed("plan", "--help").startswith("Usage")
