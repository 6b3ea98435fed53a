from __future__ import annotations

import numpy as np

from fivefold.report.calibration import calibration_table
from tests.helpers import line_with, printed


def test_each_kind_of_pass_has_the_errors_of_its_points() -> None:
    errors = {"forward": np.array([0.1, 0.2, 0.3]), "backward": np.array([0.0])}
    text = printed(calibration_table(errors))
    assert line_with(text, "forward") == "forward passes 3 20.0% 28.0%"
    assert line_with(text, "backward") == "backward passes 1 0.0% 0.0%"
