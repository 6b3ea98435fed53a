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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.layout.actions import TABLE_FILE
from fivefold.layout.notation import PLANNED_SCHEDULES, SCHEDULES
from fivefold.parallel.pipeline.schedules import warm_up_1f1b

FIRST, MIDDLE, LAST = range(3)

Array = NDArray[Any]


@dataclass(frozen=True)
class _Pipeline:
    """The arguments of `pipeline_step_s` as arrays [n]; times [3, n], in seconds, by role."""

    pp: Array
    vpp: Array
    count: Array  # micro-batches
    forward: Array
    backward: Array  # for the input and for the weights
    weight: Array  # the part of `backward` for the weights
    overlapped: Array  # a forward and a backward, of two micro-batches, side by side
    send: Array

    @property
    def both(self) -> Array:
        """Forward and backward of one micro-batch on a stage."""
        return self.forward + self.backward

    @property
    def round_trip(self) -> Array:
        """Forward and backward of one micro-batch on all stages, without the messages."""
        return _sum_of_stages(self.pp * self.vpp, *self.both)

    def slowest_stage(self, times: Array) -> Array:
        """The largest of times [3, n] by role, of the roles that there are."""
        first = np.where(self.pp > 1, times[FIRST], 0.0)
        middle = np.where(self.pp > 2, times[MIDDLE], 0.0)
        return np.maximum(np.maximum(first, middle), times[LAST])

    def take(self, mask: Array) -> _Pipeline:
        return _Pipeline(*(value[..., mask] for value in vars(self).values()))


# Faces


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
    pipeline = _Pipeline(pp, vpp, micro_batches, forward, backward, weight, overlapped, send)
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


def _sum_of_stages(stages: Array, first: Array, middle: Array, last: Array) -> Array:
    return np.where(stages > 1, first + (stages - 2) * middle + last, last)


# GPipe


def _gpipe(pipeline: _Pipeline) -> Array:
    """Two passes of all micro-batches through all stages, each paced by its slowest stage."""
    travel = 2 * pipeline.send * (pipeline.pp - 1)
    slowest = pipeline.slowest_stage(pipeline.forward) + pipeline.slowest_stage(pipeline.backward)
    return pipeline.round_trip + travel + (pipeline.count - 1) * slowest


# 1F1B


def _one_forward_one_backward(pipeline: _Pipeline) -> Array:
    step_s = np.empty(pipeline.pp.shape)
    for members, formula in (
        (pipeline.vpp == 1, _without_chunks),
        (pipeline.vpp > 1, _interleaved),
    ):
        if members.any():
            step_s[members] = formula(pipeline.take(members))
    return step_s


def _without_chunks(pipeline: _Pipeline) -> Array:
    """1F1B with one stage a rank.

    Down to the anchor, along its row, up again. The row begins with `ahead` forwards and ends with
    as many backwards; in place of either a path may dive to the ranks below and come back.
    """
    pp, count, send = pipeline.pp, pipeline.count, pipeline.send
    both, middle = pipeline.both, pipeline.both[MIDDLE]
    way = pipeline.round_trip + 2 * send * (pp - 1)
    at_last = way + (count - 1) * both[LAST]
    step_s = np.maximum(at_last, _all_forwards_first(pipeline, way))
    # Middle ranks are alike but for their place, in which the length of a path is linear: the
    # outermost are enough, from the first that has a forward and a backward to spare.
    second = np.minimum(np.maximum(1, pp + 1 - count), pp - 2)
    for role, rank, exists in (
        (FIRST, np.zeros_like(pp), pp > 1),
        (MIDDLE, second, pp > 2),
        (MIDDLE, pp - 2, pp > 2),
    ):
        ahead = pp - 1 - rank
        above = (both[FIRST] + (rank - 1) * middle) * (rank > 0) + 2 * send * rank
        start = _leave_row(pipeline, role, rank, pipeline.forward)
        end = _leave_row(pipeline, role, rank, pipeline.backward)
        along = (count - ahead) * both[role] + _excursions(pipeline, role, rank)
        length = (above + start + along + end) * (exists & (count >= ahead + 2))
        step_s = np.maximum(step_s, length)
    return step_s


def _leave_row(pipeline: _Pipeline, role: int, rank: Array, times: Array) -> Array:
    """What a path does while the anchor runs its warm-up of forwards, `ahead` of them (or its
    cool-down of backwards): stay there or longer at the first rank, dive to the last rank and
    back, or dive to the one before it and stay somewhere once. `times` [3, n] of the actions."""
    ahead = pipeline.pp - 1 - rank
    middle, last = pipeline.both[MIDDLE], pipeline.both[LAST]
    stay = np.maximum(times[FIRST], times[role])
    stay_below = np.where(ahead > 1, np.maximum(stay, times[MIDDLE]), stay)
    dive = (ahead - 1) * middle + last + 2 * pipeline.send * ahead
    shorter = (ahead - 1) * (middle + 2 * pipeline.send) + stay_below
    return np.maximum(np.maximum(ahead * stay, dive), shorter) * (ahead > 0)


def _all_forwards_first(pipeline: _Pipeline, way: Array) -> Array:
    """The longest path where an anchor has no more micro-batches than ranks below it.

    It runs all forwards, then all backwards. The path is one micro-batch's `way` and the others
    at the anchor, going in or coming out; or some of them both times, where it turns round
    before the last rank: a rank with `turn` ranks below goes on `turn` micro-batches back.
    """
    pp, count, send = pipeline.pp, pipeline.count, pipeline.send
    longest = way
    for role, exists in ((FIRST, pp > 1), (MIDDLE, pp > 2)):
        forward, backward = pipeline.forward[role], pipeline.backward[role]
        longer, shorter = np.maximum(forward, backward), np.minimum(forward, backward)
        twice = np.zeros(pp.shape)
        for turn in (1, np.minimum(count - 1, pp - 2)):
            left_out = (turn - 1) * pipeline.both[MIDDLE] + pipeline.both[LAST] + 2 * send * turn
            possible = (pp > 2) & (count > 1)
            twice = np.maximum(twice, (turn * shorter - left_out) * possible)
        longest = np.maximum(longest, (way + (count - 1) * longer + twice) * exists)
    return longest


def _excursions(pipeline: _Pipeline, role: int, rank: Array) -> Array:
    """What a path gains in steady state by going down from the anchor and back again and again.

    A trip over n ranks takes the time of n pairs of the row. Rank r holds only pp - r
    micro-batches, so nothing hides the messages of a trip: each adds two sends a boundary.
    """
    both, ahead = pipeline.both, pipeline.pp - 1 - rank
    pairs = np.maximum(pipeline.count - ahead - 2, 0)

    def gain(ranks: Array) -> Array:
        reaches_last = ranks > ahead
        below = (ranks - 1 - reaches_last) * both[MIDDLE] + reaches_last * both[LAST]
        return below - (ranks - 1) * both[role] + 2 * pipeline.send * (ranks - 1)

    most = np.zeros(rank.shape)
    for ranks in (ahead + 1, ahead, np.full_like(ahead, 2)):
        ranks = np.clip(ranks, 1, ahead + 1)
        trips = pairs // ranks
        left = pairs - trips * ranks
        rest = np.maximum(gain(np.maximum(left, 1)), 0.0)
        most = np.maximum(most, trips * gain(ranks) + rest)
    return most


def _interleaved(pipeline: _Pipeline) -> Array:
    """Interleaved 1F1B. Micro-batches go through the chunks in groups of pp.

    As without chunks, but upstream ranks are two pairs ahead, which hides sends of up to half a
    pair in steady state; and a slow first or last stage shows up as a burst of pp actions.
    """
    pp, vpp, count, send = pipeline.pp, pipeline.vpp, pipeline.count, pipeline.send
    both, middle = pipeline.both, pipeline.both[MIDDLE]
    backward_first = replace(pipeline, forward=pipeline.backward, backward=pipeline.forward)
    step_s = np.where(pp > 1, _one_way_and_held(pipeline), count * pipeline.round_trip)
    late = (pp - 1) * np.maximum(both[LAST] - middle, 0.0)  # the last stage's burst
    for role, rank, exists in (
        (FIRST, np.zeros_like(pp), pp > 1),
        (MIDDLE, np.ones_like(pp), pp > 2),
        (MIDDLE, pp - 2, pp > 2),
        (LAST, pp - 1, pp > 1),
    ):
        above = (both[FIRST] + (rank - 1) * middle) * (rank > 0) + 2 * send * rank
        row = vpp * middle
        if role != MIDDLE:
            row = row + both[role] - middle
        # Backwards run like forwards seen from the end of the step.
        start = _start_of_row(pipeline, role, rank)
        end = _start_of_row(backward_first, role, rank)
        same_burst = np.minimum(np.minimum(start, end), late) * ((count < 2 * pp) & (rank < pp - 1))
        pairs = count * vpp - warm_up_1f1b(rank, pp, vpp) - 2
        ends = np.where(pairs >= 0, start + end - same_burst, np.maximum(start, end))
        exposed = _exposed_sends(pipeline, rank, np.maximum(pairs, 0))
        step_s = np.maximum(step_s, (above + count * row + ends + exposed) * exists)
    return step_s


def _one_way_and_held(pipeline: _Pipeline) -> Array:
    """One micro-batch's whole way, and the others of its group held where it is slowest: at one
    stage, or at the first both going in and coming out, turning round above the last rank."""
    pp, send = pipeline.pp, pipeline.send
    both, middle = pipeline.both, pipeline.both[MIDDLE]
    way = pipeline.round_trip + 2 * send * (pp * pipeline.vpp - 1)
    enter, leave = pipeline.forward[FIRST], pipeline.backward[FIRST]
    turn = (pp - 1) // 2  # ranks left out
    twice = turn * (2 * np.minimum(enter, leave) - middle - 2 * send) - (both[LAST] - middle)
    at_first = (pp - 1) * np.maximum(enter, leave) + np.maximum(twice, 0.0) * (turn > 0)
    elsewhere = np.maximum(both[LAST], np.maximum(pipeline.forward[1], pipeline.backward[1]))
    return way + np.maximum(at_first, (pp - 1) * elsewhere)


def _start_of_row(pipeline: _Pipeline, role: int, rank: Array) -> Array:
    """What a path gains until the anchor's first backward by not staying in its row."""
    pp, vpp, count, send = pipeline.pp, pipeline.vpp, pipeline.count, pipeline.send
    forward, backward = pipeline.forward, pipeline.backward
    first, middle, last = forward
    warm_up = warm_up_1f1b(rank, pp, vpp)
    ran = np.minimum(warm_up + 1, count * vpp)  # forwards before the first backward
    cycles, rest = np.divmod(ran, pp * vpp)
    row = ran * middle
    if role == FIRST:
        row = row + (cycles * pp + np.minimum(rest, pp)) * (first - middle)
    if role == LAST:
        of_last = cycles * pp + np.maximum(rest - (vpp - 1) * pp, 0)
        row = row + of_last * (last - middle)
    # Dive: the first micro-batch's way down to the last stage, and up to the anchor, at once or
    # with the last of its group. The first rank would have run a forward of its stage meanwhile.
    down = forward[FIRST if role == FIRST else MIDDLE] + (pp * vpp - 2 - rank) * middle + last
    ahead = pp - 1 - rank
    late = (pp - 1) * (pipeline.both[LAST] - pipeline.both[MIDDLE])
    if role == FIRST:
        late = late - (first - middle)
    late = np.maximum(late, 0.0)
    up = ((ahead - 1) * backward[MIDDLE] + backward[LAST] + late) * (ahead > 0)
    # The first stage may hold its group first, before the last member follows through chunks.
    held = (pp - 1) * (first - middle)
    dive = down + up + (pp * vpp - 1 - rank + ahead) * send - row
    gain = dive + np.maximum(held - pp * send, 0.0)
    if role == FIRST:
        held = 0.0  # in its row anyway
        # Follow to a rank at the end, and stay in that one's row until the second group comes
        # round to the first rank.
        last_rank = pp * pipeline.both[LAST] - 2 * backward[MIDDLE]
        before_it = pp * middle + (pp - 4) * backward[MIDDLE]
        round_s = np.maximum(last_rank, before_it) - pp * first + pp * (vpp - 1) * send
        gain = np.maximum(gain, np.where(count >= 2 * pp, round_s, 0.0))
    chunks = vpp - 2 + (warm_up >= vpp * pp - 1)
    gain = np.maximum(gain, held + chunks * pp * send)
    return np.maximum(gain, 0.0)


def _exposed_sends(pipeline: _Pipeline, rank: Array, pairs: Array) -> Array:
    """Sends longer than half a pair, or than a forward or a backward, in the steady state."""
    send, ahead = pipeline.send, pipeline.pp - 1 - rank
    there_and_back = pairs // (2 * ahead + 1) * ahead * (2 * send - pipeline.both[MIDDLE])
    shorter = np.minimum(pipeline.forward[MIDDLE], pipeline.backward[MIDDLE])
    return np.maximum(0.0, np.maximum(there_and_back, pairs * (send - shorter)))


# Breadth first


def _breadth_first(pipeline: _Pipeline) -> Array:
    """GPipe with chunks: all micro-batches through one chunk before the next. With fewer of them
    than ranks a rank waits at each change of chunk for what goes round."""
    pp, vpp, count = pipeline.pp, pipeline.vpp, pipeline.count
    row = vpp * pipeline.both[MIDDLE] + _more_than_middle(pipeline)
    waits = (pp - 1) + (vpp - 1) * np.maximum(0, pp - count)
    sends = 2 * pipeline.send * ((pp - 1) + (vpp - 1) * pp * (count <= pp))
    return count * row + waits * pipeline.both[MIDDLE] + sends


def _more_than_middle(pipeline: _Pipeline) -> Array:
    """What the first or the last stage, each on a rank of its own, takes longer than others."""
    first = pipeline.both[FIRST] - pipeline.both[MIDDLE]
    last = pipeline.both[LAST] - pipeline.both[MIDDLE]
    return np.maximum(0.0, np.maximum(first, last))


# Weight gradients later
#
# For equal stages these are the longest paths through the tables, and the papers' formulas where
# F = I = W: F the forward, I and W the gradients of a stage's input and of its weights.


def _zero_bubble_h1(pipeline: _Pipeline) -> Array:
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


def _zero_bubble_v(pipeline: _Pipeline) -> Array:
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


def _dualpipe(pipeline: _Pipeline) -> Array:
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


def _of_middle(pipeline: _Pipeline) -> tuple[Array, Array, Array, Array]:
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
    "1f1b": _one_forward_one_backward,
    "bfs": _breadth_first,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe,
}
