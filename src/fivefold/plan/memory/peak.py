"""The peak of this program's own training step (`--engine fivefold`): what it holds between steps,
and the fold of its layers' operations over the schedule, with ZeRO's units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.parallel.data.memory import after_step
from fivefold.parallel.workload import FP32, RankWorkload
from fivefold.plan.memory.layers import LayerMemory
from fivefold.plan.memory.passes import BackwardPass, ForwardPass, WeightPass
from fivefold.plan.memory.rank import KINDS, PeakMemory, Rank
from fivefold.plan.memory.schedule import ScheduleEvent, schedule_events
from fivefold.plan.operations.operation import Bytes

PASSES = {"F": ForwardPass, "B": BackwardPass, "I": BackwardPass, "W": WeightPass}


def native_memory(
    rank: NDArray[np.int64] | int, work: RankWorkload, layers: LayerMemory
) -> dict[str, NDArray[np.float64]]:
    """Bytes by kind (`KINDS`) at the peak of pipeline rank `rank` of each layout, [layout]."""
    layouts = layers.layouts
    kinds = {kind: np.zeros(len(layouts)) for kind in KINDS}
    ranks = np.broadcast_to(rank, len(layouts))
    for events, members in _alike(layouts, ranks).items():
        part = layouts.take(members)
        counts = {"layout": part, **_taken(work, members)}
        splits = any(event.kind in "IW" for event in events)
        held = replace(work, **counts)
        those = Rank(layers.job, part, ranks[members], held, layers, members, splits)
        peak = PeakMemory(len(members))
        for event in events:
            PASSES[event.kind](those, event, peak).run()
        optimizer_step(those, peak)
        for kind, size in peak.kinds.items():
            kinds[kind][members] = size
    return kinds


def optimizer_step(rank: Rank, peak: PeakMemory) -> None:
    """Gradients that ranks share are summed in one message each."""
    state = after_step(rank.work)
    tied = FP32 * rank.columns * rank.job.config.hidden_size * rank.work.reduces_tied_embedding
    copies: Bytes = 0.0
    for unit in rank.wholes:  # of one chunk after the other
        copies = np.maximum(copies, unit.shard * (rank.layouts.dp_replicate > 1))
    kinds = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": rank.inputs,
        "temporary": np.maximum(tied, copies),
    }
    peak.update(True, kinds)


def _alike(
    layouts: LayoutBatch, rank: NDArray[np.int64]
) -> dict[tuple[ScheduleEvent, ...], NDArray[np.int64]]:
    """The layouts that go through the same events, by these."""
    schedules, schedule = np.unique(layouts.schedule, return_inverse=True)
    columns = (schedule, layouts.pp, layouts.vpp, layouts.accumulation, rank)
    rows, row = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    numbers: dict[tuple[ScheduleEvent, ...], list[int]] = {}
    for number, (name, *degrees) in enumerate(rows.tolist()):
        numbers.setdefault(schedule_events(str(schedules[name]), *degrees), []).append(number)
    return {key: np.flatnonzero(np.isin(row.reshape(-1), of)) for key, of in numbers.items()}


def _taken(work: RankWorkload, members: NDArray[np.int64]) -> dict[str, Any]:
    """The counts of some of the layouts."""

    def take(count: Any) -> Any:
        return count[members] if np.ndim(count) else count

    return {
        "layers": tuple((kind, take(count)) for kind, count in work.layers),
        "recomputed": tuple(take(count) for count in work.recomputed),
        **{name: take(getattr(work, name)) for name in COUNTS},
    }


COUNTS = ("chunks", "sends_on", "sends_back", "first", "last")
