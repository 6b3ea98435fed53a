from __future__ import annotations

import pytest
import torch

from fivefold.calibrate.messages import OPERATIONS, _Group
from fivefold.parallel.comm import Axis, Recorder


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_of_a_point_are_those_that_the_ledger_counts(name: str, size: int) -> None:
    recorder = Recorder(dry=True)
    axis = Axis("tp", "tp", tuple(range(size)), 0, None, recorder)
    channel = Axis("pp", "pp", (0, 1), 0, None, recorder)
    group = _Group(axis, channel, 1, True, 1)
    call, elements = OPERATIONS[name](torch.zeros(size * 64), group)
    call()
    [transfer] = recorder.ledger
    assert transfer.payload_bytes == 4 * elements
    assert transfer.op == {"shift": "send", "all_to_all_rows": "all_to_all"}.get(name, name)
