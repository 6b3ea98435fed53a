from __future__ import annotations

from fivefold.calibrate.fit import Fit
from fivefold.report.calibration import calibration_table
from tests.helpers import line_with, printed


def test_errors_are_those_of_fits_that_could_be_wrong() -> None:
    two = {"call": 1e-6, "flop": 1e-11}
    text = printed(
        calibration_table(
            [
                Fit("product", {"part": "forward"}, two, "cpu", (0.1, 0.2, 0.3)),
                Fit(
                    "product", {"part": "input"}, two, "cpu", (0.0, 0.0)
                ),  # as many terms as points
                Fit("attention_block", {}, two, "cpu", (0.0,)),
                Fit("message", {"op": "send"}, two, "wall", (0.5, 0.5, 0.5)),
            ]
        )
    )
    assert line_with(text, "product") == "product 5 2 20.0% 28.0%"
    assert line_with(text, "attention block") == "attention block 1 1"
    assert line_with(text, "message") == "message, wall seconds 3 1 50.0% 50.0%"
