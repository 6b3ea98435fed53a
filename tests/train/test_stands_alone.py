"""Training runs without the planner: it imports neither plan, report, calibrate nor verify."""

from __future__ import annotations

import subprocess
import sys

ABOVE = ("plan", "report", "calibrate", "verify", "interop", "cli")


def test_importing_all_of_train_loads_nothing_above_it() -> None:
    code = """if True:
        import importlib, pkgutil, sys
        import fivefold.train as train
        for module in pkgutil.walk_packages(train.__path__, train.__name__ + "."):
            importlib.import_module(module.name)
        print(*sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in done.stdout.split() if name.startswith("fivefold.")}
    assert {"train", "parallel", "model"} <= loaded
    assert not loaded & set(ABOVE)
