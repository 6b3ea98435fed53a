"""Would the plan have chosen the layout that was measured best?

A sweep is rows of one source that differ in nothing but the layout: the same model, machine,
sequence length, batch, precision, program and release, in two layouts or more. Following the plan
means to take the layout that is predicted best; the regret is how much slower it was measured than
the best one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measurements import Case
from benchmarks.scores import Scored

SETTING = re.compile(
    r"container [\d.]+|tag v[\d.]+|alternative quantisation|token-drop|natural routing"
    r'|section "[^"]*"|precision mode \w+|offload \w+|pack_sample_into_one=\w+|\((?:fp16|BF16 opt)'
    r"|DeepSpeed ZeRO-3"
)
"""What a row's notes say of its program and machine beside the layout."""

NEARLY = 0.01
"""Predicted times that differ by less are as good as equal."""


@dataclass(frozen=True)
class Sweep:
    """Layouts of one job as (layout, measured s, predicted s), the measured best first."""

    name: str
    rows: tuple[tuple[str, float, float], ...]

    @property
    def chosen(self) -> tuple[str, float, float]:
        """The predicted best."""
        return min(self.rows, key=lambda row: row[2])

    @property
    def regret(self) -> float:
        return self.chosen[1] / self.rows[0][1] - 1

    @property
    def found(self) -> bool:
        """Whether the measured best is predicted best, or next to it."""
        return self.rows[0][2] <= (1 + NEARLY) * self.chosen[2]


def sweeps(scored: Sequence[Scored]) -> list[Sweep]:
    """All sweeps of two layouts or more. A layout that was measured several times counts once."""
    alike: dict[Any, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for each in scored:
        if each.step_s is not None:
            alike[_setting(each.case)][str(each.layout)].append(each)
    found = []
    for layouts in alike.values():
        rows = [
            (
                layout,
                float(np.median([each.case.step_s or np.nan for each in rows])),
                float(np.median([each.step_s or np.nan for each in rows])),
            )
            for layout, rows in layouts.items()
        ]
        if len(rows) > 1:
            case = next(iter(layouts.values()))[0].case
            found.append(Sweep(_name(case), tuple(sorted(rows, key=lambda row: row[1]))))
    return found


def _setting(case: Case) -> tuple[Any, ...]:
    return case.source, case.cluster, case.job, tuple(SETTING.findall(case.notes))


def _name(case: Case) -> str:
    job = case.job
    return (
        f"{case.source} {case.cluster}, {job.cluster.num_devices} GPUs, batch {job.global_batch} x "
        f"{job.sequence_length}"
    )


def ranking(scored: Sequence[Scored]) -> dict[str, Any]:
    """Regret over all sweeps, and the worst of them."""
    found = sweeps(scored)
    regrets = [sweep.regret for sweep in found]
    worst = sorted(found, key=lambda sweep: -sweep.regret)[:5]
    return {
        "sweeps": len(found),
        "layouts": sum(len(sweep.rows) for sweep in found),
        "best_found": sum(sweep.found for sweep in found),
        "mean_regret": float(np.mean(regrets)) if regrets else None,
        "worst_regret": max(regrets, default=None),
        "worst": [
            {
                "sweep": sweep.name,
                "regret": sweep.regret,
                "measured_best": sweep.rows[0][0],
                "predicted_best": sweep.chosen[0],
            }
            for sweep in worst
        ],
    }
