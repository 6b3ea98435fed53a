from __future__ import annotations

import subprocess
import sys


def test_training_data_do_not_need_torch():
    code = "import sys, fivefold.train.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
