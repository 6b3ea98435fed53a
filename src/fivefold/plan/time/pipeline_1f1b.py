"""The step of 1F1B schedules by formula: see `pipeline`, whose paths these are.

The interleaved one has the most of them, for its ranks leave their rows where another is later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.parallel.pipeline.schedules import warm_up_1f1b

FIRST, MIDDLE, LAST = range(3)

Array = NDArray[Any]


@dataclass(frozen=True)
class Pipeline:
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
        return sum_of_stages(self.pp * self.vpp, *self.both)

    def slowest_stage(self, times: Array) -> Array:
        """The largest of times [3, n] by role, of the roles that there are."""
        first = np.where(self.pp > 1, times[FIRST], 0.0)
        middle = np.where(self.pp > 2, times[MIDDLE], 0.0)
        return np.maximum(np.maximum(first, middle), times[LAST])

    def take(self, mask: Array) -> Pipeline:
        return Pipeline(*(value[..., mask] for value in vars(self).values()))


def sum_of_stages(stages: Array, first: Array, middle: Array, last: Array) -> Array:
    return np.where(stages > 1, first + (stages - 2) * middle + last, last)


# 1F1B


def one_forward_one_backward(pipeline: Pipeline) -> Array:
    step_s = np.empty(pipeline.pp.shape)
    for members, formula in (
        (pipeline.vpp == 1, _without_chunks),
        (pipeline.vpp > 1, _interleaved),
    ):
        if members.any():
            step_s[members] = formula(pipeline.take(members))
    return step_s


def _without_chunks(pipeline: Pipeline) -> Array:
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


def _leave_row(pipeline: Pipeline, role: int, rank: Array, times: Array) -> Array:
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


def _all_forwards_first(pipeline: Pipeline, way: Array) -> Array:
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


def _excursions(pipeline: Pipeline, role: int, rank: Array) -> Array:
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


def _interleaved(pipeline: Pipeline) -> Array:
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


def _one_way_and_held(pipeline: Pipeline) -> Array:
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


def _start_of_row(pipeline: Pipeline, role: int, rank: Array) -> Array:
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


def _exposed_sends(pipeline: Pipeline, rank: Array, pairs: Array) -> Array:
    """Sends longer than half a pair, or than a forward or a backward, in the steady state."""
    send, ahead = pipeline.send, pipeline.pp - 1 - rank
    there_and_back = pairs // (2 * ahead + 1) * ahead * (2 * send - pipeline.both[MIDDLE])
    shorter = np.minimum(pipeline.forward[MIDDLE], pipeline.backward[MIDDLE])
    return np.maximum(0.0, np.maximum(there_and_back, pairs * (send - shorter)))
