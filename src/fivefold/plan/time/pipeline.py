"""Time and activations of pipeline schedules by formula, for many layouts at once.

A step lasts as long as the longest path through its actions. Such a path descends to one rank (its
anchor), follows that rank's row, and climbs back up; on the way it may leave the row where another
rank is later. The formulas add up these paths for the few anchors that can be slowest and take the
longest. Every path counted is one that the table of actions has, so an error is mostly a path left
out: the result is rarely too long. `simulation` is the judge (tests/plan/test_pipeline.py).

Everything is elementwise on arrays [n], one entry a layout. A stage's time comes by role, [3, n]:
the first virtual stage (with the embedding), a middle one, and the last (with head and loss).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from fivefold.layout.actions import TABLE_FILE
from fivefold.layout.notation import PLANNED_SCHEDULES, SCHEDULES
from fivefold.parallel.pipeline.schedules import warm_up_1f1b
from fivefold.plan.time.pipeline_1f1b import (
    FIRST,
    LAST,
    MIDDLE,
    Array,
    Pipeline,
    one_forward_one_backward,
)


def pipeline_step_s(
    schedule: str | Array,
    pp: ArrayLike,
    vpp: ArrayLike,
    micro_batches: ArrayLike,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    send_s: ArrayLike = 0.0,
    *,
    weight_s: ArrayLike | None = None,
    overlapped_s: ArrayLike | None = None,
) -> Array:
    """Seconds from the first forward's start to the last backward's end, array [n].

    `schedule` is the name of one for all layouts or an array [n] of names. `forward_s` and
    `backward_s` [3, n] are the seconds of one micro-batch on the first, a middle and the last
    virtual stage (where there is one stage alone, the last's counts); the backward is the whole
    one. `send_s` [n] is the seconds a message travels between two ranks while they compute.

    For backwards in two parts: `weight_s` [3, n], the part of the backward that makes weight
    gradients (default: half of it); for the dualpipes `overlapped_s` [3, n], a forward and a
    backward run side by side (default: as long as both).

    The layouts must be legal (`layout.legality` knows what each schedule can run, such as that
    interleaved 1F1B needs micro-batches that are a multiple of pp).

    gpipe is exact, and so is 1f1b for equal stages with sends of at most half a chunk's forward
    and backward. With a first and a last stage of 0.7 to 1.6 times a middle one, and sends up to
    a quarter of its forward, 1f1b is within 2 % (0.05 % in the mean), with 0.5 to 2 times within
    5 %, the worst with one group of micro-batches in interleaved chunks. The others
    are exact for equal stages without messages (zb-v, if 2 pp - 1 micro-batches or more fill it),
    and go at the pace of the slowest rank: with ends of 0.7 to 1.6 times a middle stage they are
    6 % too short to 9 % (zero bubble) or 14 % (dualpipes) too long, bfs up to 16 % either way.
    Raises ValueError for an unknown schedule.
    """
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    weight = backward / 2 if weight_s is None else np.asarray(weight_s, float)
    overlapped = forward + backward if overlapped_s is None else np.asarray(overlapped_s, float)
    names, *columns = np.broadcast_arrays(
        schedule, pp, vpp, micro_batches, send_s, *forward, *backward, *weight, *overlapped
    )
    pp, vpp, micro_batches, send, *times = columns
    forward, backward, weight, overlapped = np.reshape(times, (4, 3, *names.shape))
    pipeline = Pipeline(pp, vpp, micro_batches, forward, backward, weight, overlapped, send)
    step_s = np.zeros(names.shape)
    for name, members in _by_schedule(names):
        step_s[members] = _STEP_S[name](pipeline.take(members))
    return step_s


def in_flight(
    schedule: str | Array, pp: ArrayLike, vpp: ArrayLike, micro_batches: ArrayLike, rank: ArrayLike
) -> Array:
    """Most activations a pipeline rank holds at a time, array [n], in those of one micro-batch on
    one virtual stage.

    The same as the simulation's `peak_in_flight`: gpipe and bfs hold all, 1f1b its warm-up and one
    more. zb-h1 and zb-v hold on every rank what 1F1B holds on the first, as weight gradients come
    later (arXiv:2401.10241, sections 2.1 and 6); the dualpipes one more than they have stages
    (DeepSeek-V3, arXiv:2412.19437, table 2). Raises ValueError for an unknown schedule.
    """
    names, *columns = np.broadcast_arrays(schedule, pp, vpp, micro_batches, rank)
    held = np.zeros(names.shape, dtype=np.int64)
    for name, members in _by_schedule(names):
        pp, vpp, micro_batches, rank = (column[members] for column in columns)
        passes = micro_batches * vpp
        if name in ("gpipe", "bfs"):
            most = passes
        elif name == "1f1b":
            most = warm_up_1f1b(rank, pp, vpp) + 1
        elif name in ("zb-h1", "zb-v"):
            most = pp * vpp
        else:
            most = pp * vpp + 1
        held[members] = np.minimum(most, passes)
    return held


def _by_schedule(names: Array) -> Iterator[tuple[str, Array]]:
    """Each schedule that occurs, with the mask of where it does. The table of a file counts as
    1F1B: it is simulated where that matters (`estimate`)."""
    names = np.where(np.char.endswith(names.astype(str), TABLE_FILE), "1f1b", names)
    left = names.size
    for name in (*SCHEDULES, *PLANNED_SCHEDULES):
        members = names == name
        if count := np.count_nonzero(members):
            left -= count
            yield name, members
    if left:
        raise ValueError(f"no formula for a schedule among {sorted(set(names.flat))}")


# GPipe


def _gpipe(pipeline: Pipeline) -> Array:
    """Two passes of all micro-batches through all stages, each paced by its slowest stage."""
    travel = 2 * pipeline.send * (pipeline.pp - 1)
    slowest = pipeline.slowest_stage(pipeline.forward) + pipeline.slowest_stage(pipeline.backward)
    return pipeline.round_trip + travel + (pipeline.count - 1) * slowest


# Breadth first


def _breadth_first(pipeline: Pipeline) -> Array:
    """GPipe with chunks: all micro-batches through one chunk before the next. With fewer of them
    than ranks a rank waits at each change of chunk for what goes round."""
    pp, vpp, count = pipeline.pp, pipeline.vpp, pipeline.count
    row = vpp * pipeline.both[MIDDLE] + _more_than_middle(pipeline)
    waits = (pp - 1) + (vpp - 1) * np.maximum(0, pp - count)
    sends = 2 * pipeline.send * ((pp - 1) + (vpp - 1) * pp * (count <= pp))
    return count * row + waits * pipeline.both[MIDDLE] + sends


def _more_than_middle(pipeline: Pipeline) -> Array:
    """What the first or the last stage, each on a rank of its own, takes longer than others."""
    first = pipeline.both[FIRST] - pipeline.both[MIDDLE]
    last = pipeline.both[LAST] - pipeline.both[MIDDLE]
    return np.maximum(0.0, np.maximum(first, last))


# Weight gradients later
#
# For equal stages these are the longest paths through the tables, and the papers' formulas where
# F = I = W: F the forward, I and W the gradients of a stage's input and of its weights.


def _zero_bubble_h1(pipeline: Pipeline) -> Array:
    """(pp - 1) (F + I - W) idle (arXiv:2401.10241, table 2), and no less than the last rank waits
    for its first forward or the first for its last gradient."""
    slowest = pipeline.slowest_stage(pipeline.both)
    forward, of_input, weight, send = _of_middle(pipeline)
    ahead = pipeline.pp - 1
    more = np.minimum(pipeline.count - 1, ahead)  # micro-batches that follow the first at once
    bubble = _longest(
        ahead * (forward + of_input + 4 * send) - more * weight,
        ahead * (forward + 3 * send) + (ahead - more) * of_input,
        ahead * (of_input + 2 * send) + (ahead - more) * forward,
    )
    return pipeline.count * slowest + bubble


def _zero_bubble_v(pipeline: Pipeline) -> Array:
    """Two chunks a rank in a V, first and last stage on the first rank (ZB-V, section 6 of
    arXiv:2401.10241).

    With F = I = W a rank waits only for its first forward to arrive: (pp - 1) F. The paper counts
    that as zero since a rank may begin its next step early; here the ranks begin together.
    """
    forward, of_input, weight, send = _of_middle(pipeline)
    ahead = pipeline.pp - 1
    bubble = _longest(
        (2 * ahead - 1) * forward - (ahead - 1) * of_input + (3 * ahead - 2) * send,
        ahead * of_input + (5 * ahead - 2) * send,
        forward + (ahead - 1) * weight + (3 * ahead - 2) * send,
        of_input + (ahead - 1) * weight + 3 * ahead * send,
        2 * ahead * (of_input - weight) + (6 * ahead - 2) * send,
    )
    # Too few micro-batches to fill the V: all forwards come before the backwards reach the rank.
    more = pipeline.count - 1
    turned = np.maximum(more - ahead, 0)
    unfilled = _longest(
        (2 * ahead - more) * (forward + of_input + 2 * send),
        2 * np.maximum(ahead - more, 0) * forward
        + 2 * ahead * (of_input + 2 * send)
        - 2 * turned * weight,
        2 * (ahead - turned) * of_input + ahead * send,
    )
    bubble = np.where(more < 2 * ahead, unfilled, bubble)
    return pipeline.count * _slowest_v(pipeline.both, pipeline.pp > 1) + bubble


def _dualpipe(pipeline: Pipeline) -> Array:
    """Idle (stages / 2 - 1) (F&B + B - 3 W), B the whole backward (arXiv:2412.19437, table 2).

    That is with F = I; else a path is longer that goes along the outermost ranks' forwards. A
    forward and a backward side by side wait for both of their messages, which nothing hides.
    Half of the micro-batches come from either end; dualpipe-v folds twice the stages into a V.
    Of the passes of the outermost rank, all but 3 / 2 * stages - 1 forwards and as many backwards
    are overlapped (the schedule's steps in github.com/deepseek-ai/DualPipe).
    """
    stages, passes = pipeline.pp * pipeline.vpp, pipeline.count * pipeline.vpp
    alone = 3 * stages // 2 - 1
    outer = stages > 2
    # A rank has two stages; the first has the first and the last.
    overlapped = _slowest_v(pipeline.overlapped, outer) / 2
    in_turn = _slowest_v(pipeline.both, outer) / 2
    forward, of_input, weight, send = _of_middle(pipeline)
    ahead = stages // 2 - 1
    saved = pipeline.both[MIDDLE] - pipeline.overlapped[MIDDLE]
    idle = _longest(2 * ahead * forward, np.maximum(ahead - 1, 0) * forward + ahead * of_input)
    idle = idle + ahead * (_longest(of_input - weight, 0.0 * weight) - saved)
    sends = send * (passes * (pipeline.pp - 1) / pipeline.pp + pipeline.pp - 2)
    return (passes - alone) * overlapped + alone * in_turn + np.maximum(idle, 0.0) + sends


def _of_middle(pipeline: Pipeline) -> tuple[Array, Array, Array, Array]:
    """Forward, gradient of the input and of the weights of a middle stage; a message."""
    weight = pipeline.weight[MIDDLE]
    return pipeline.forward[MIDDLE], pipeline.backward[MIDDLE] - weight, weight, pipeline.send


def _longest(*paths: Array) -> Array:
    return np.maximum.reduce(paths)


def _slowest_v(times: Array, has_middle: Array) -> Array:
    """The larger of first and last stage together and of two middle ones."""
    ends = times[FIRST] + times[LAST]
    return np.where(has_middle, np.maximum(ends, 2 * times[MIDDLE]), ends)


_STEP_S = {
    "gpipe": _gpipe,
    "1f1b": one_forward_one_backward,
    "bfs": _breadth_first,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe,
}
