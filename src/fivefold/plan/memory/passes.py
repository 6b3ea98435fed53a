"""The passes of one chunk of layers, with ZeRO's units: what is alive at their highest moments."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.parallel.workload import FP32
from fivefold.plan.memory.layers import Gradients, Passes
from fivefold.plan.memory.rank import Kinds, Mask, PeakMemory, Rank, Run, choose
from fivefold.plan.memory.schedule import ScheduleEvent
from fivefold.plan.memory.zero import NO_UNIT, ZeroUnit
from fivefold.plan.operations.operation import Bytes
from fivefold.plan.operations.sizes import INT64


class ForwardPass:
    """From the embedding or the stage before to the loss."""

    def __init__(self, rank: Rank, event: ScheduleEvent, peak: PeakMemory) -> None:
        self.rank, self.peak, self.chunk = rank, peak, event.chunk
        self.runs = rank.chunks[event.chunk]
        # Weights are gathered for each forward pass, or for the first one of a step.
        self.gathers = rank.gathers | event.starts
        root = rank.root(self.chunk).gathered
        self.state = _add(rank.state(event), weights=root * rank.gathers)
        # What is gathered last leaves its message behind, until the next one has come.
        self.behind = root * self.gathers
        self.alive = rank.first(self.chunk) * rank.lookup_kept

    def offer(self, here: Mask, activations: Bytes, temporary: Bytes, weights: Bytes = 0.0) -> None:
        weights = weights * self.rank.gathers
        kinds = _add(self.state, weights=weights, activations=activations, temporary=temporary)
        self.peak.update(here, kinds)

    def run(self) -> None:
        rank = self.rank
        first, last = rank.first(self.chunk), rank.last(self.chunk)
        sliced = rank.hidden * (rank.gathered > 0)
        self.offer(first >= 0, self.alive, first * (rank.wide + sliced) + self.behind)
        for number, run in enumerate(self.runs):
            # The next layer's weights come with it where they are not there already.
            self.layer(run, 2, rank.gathers, run.dense.gathered)
            self.layer(run, 1, first >= 0, self.following(number))
            self.alive = self.alive + run.count * run.passes.kept
            self.behind = np.where(run.count > 0, self.left_behind(run), self.behind)
        loss = rank.short * rank.logits + (INT64 + 3 * FP32) * rank.tokens + self.behind
        self.offer(last > 0, self.alive + rank.head_kept, loss)

    def following(self, number: int) -> Bytes:
        """Weights that are on their way beside the last layer of run `number`."""
        after: Bytes = 0.0
        for run in reversed(self.runs[number + 1 :]):
            after = np.where(run.count > 0, run.dense.gathered, after)
        return after

    def left_behind(self, run: Run) -> Bytes:
        experts = run.experts.gathered
        return np.where(experts > 0, experts, run.dense.gathered) * self.gathers

    def layer(self, run: Run, place: int, here: Mask, coming: Bytes) -> None:
        """The last of these layers, or the last but one (`place` 2)."""
        here, own = here & (run.count >= place), run.dense.gathered
        if not np.any(here):
            return
        dense, experts = own * self.gathers, run.experts.gathered * self.gathers
        before = self.alive + (run.count - place) * run.passes.kept
        hidden = self.rank.hidden
        left = np.where(run.count > place, self.left_behind(run), self.behind)
        self.offer(here, before + hidden, dense + left, own)
        # Its experts' and the next layer's are on their way.
        message, coming = dense + experts, coming * self.rank.gathers
        end: Bytes = hidden
        for phase in run.passes.forward:
            weights = own + run.experts.gathered * phase.experts
            if phase.experts:  # copied out, while the message before is still there
                self.offer(here & (experts > 0), before + end, message + coming, weights)
                message = self.left_behind(run)
            self.offer(here, before, message + coming + phase.peak, weights)
            end = phase.end


class BackwardPass:
    """From the loss or the next stage to the embedding."""

    def __init__(self, rank: Rank, event: ScheduleEvent, peak: PeakMemory) -> None:
        self.rank, self.event, self.peak = rank, event, peak
        self.chunk = event.chunk
        self.state = rank.state(event)
        self.runs = rank.chunks[self.chunk]
        self.last, self.first = rank.last(self.chunk), rank.first(self.chunk)
        self.splits = event.kind in "IW"
        self.accumulated = event.accumulated[self.chunk]
        self.reduces = rank.reduces | event.last
        self.waits = 1 - rank.joins * self.accumulated  # gradients, for the rest of their unit
        self.alive = rank.keeps[self.chunk] - rank.hidden * (1 - self.last)
        # Gradients that come first are copied to fp32.
        self.adds = rank.short and not self.accumulated
        # Of sharded weights outside the layers, until the pass is over.
        self.outside: Bytes = 0.0
        self.on_the_way: Bytes = 0.0  # gradients that were reduced last

    def offer(self, here: Mask, activations: Bytes, temporary: Bytes, **more: Bytes) -> None:
        temporary = temporary + self.outside
        kinds = _add(self.state, activations=activations, temporary=temporary, **more)
        self.peak.update(here, kinds)

    def run(self) -> None:
        rank = self.rank
        # The stage's output and its gradient stay as long as the pass.
        self.state = _add(self.state, activations=2 * rank.hidden * (1 - self.last))
        self.gather_root()
        self.head()
        given = 1 - self.last  # is the gradient of a layer's output the stage's?
        for number in reversed(range(len(self.runs))):
            before = self.prefetched(number - 1)
            self.layers(self.runs[number], given, before)
            given = given * (self.runs[number].count == 0)
        self.lookup()

    def gather_root(self) -> None:
        """What is outside the layers is copied out of its message, unless it is still there."""
        rank = self.rank
        root = rank.root(self.chunk).gathered * rank.gathers * self.last
        self.state = _add(self.state, weights=root)
        again = np.logical_not(rank.layouts.backward_follows_at_once)
        self.offer(self.last > 0, self.alive, root * again)

    def prefetched(self, number: int) -> Bytes:
        """Weights that are on their way beside the run that follows run `number`."""
        ahead: Bytes = 0.0
        for run in self.runs[: number + 1]:
            ahead = np.where(run.count > 0, run.units.gathered, ahead)
        return ahead * self.rank.gathers

    def head(self) -> None:
        """The loss, the head's product with the gradients of logits, input and matrix, the norm."""
        rank, here = self.rank, self.last > 0
        if not np.any(here):
            return
        ahead = self.prefetched(len(self.runs) - 1)
        self.offer(here, self.alive, rank.short * rank.logits + ahead)
        self.alive = self.alive - self.last * rank.head_kept
        sharded = rank.heads[self.chunk].gathered > 0
        product = rank.logits + 2 * rank.gathered + rank.hidden + ahead
        if self.splits:
            product = product - rank.gathered
        else:
            product = product + rank.matrix * (sharded | rank.short)
        self.offer(here, self.alive + 2 * rank.hidden + FP32 * rank.held, product)
        if self.splits:
            self.leave(self.last * rank.head_deferred)
        else:
            # One that is tied to the embedding's waits for that, which is added to it.
            waits = np.maximum(self.waits, rank.job.config.tied_embeddings * self.first)
            self.outside = rank.matrix * sharded * self.last * waits
        norm = rank.hidden + (3 + rank.short) * rank.fp32(rank.hidden) + ahead
        self.offer(here, self.alive + rank.hidden + FP32 * rank.held, norm)

    def leave(self, size: Bytes) -> None:
        """The pass for the weights will need this."""
        self.state = _add(self.state, activations=size)

    def layers(self, run: Run, given: Bytes, before: Bytes) -> None:
        """From the last to the first: of those that are alike the last two and the first two."""
        rank, through = self.rank, np.zeros_like(run.count)
        own = run.units.gathered * rank.gathers
        for target in (0 * run.count, 1 + 0 * run.count, run.count - 2, run.count - 1):
            here = (through <= target) & (target < run.count)
            if not np.any(here):
                continue
            self.go_through(run, np.where(here, target - through, 0))
            ahead = np.where(target < run.count - 1, own, before)
            self.layer(run, here, given * (target == 0), ahead)
            through = np.where(here, target + 1, through)

    def layer(self, run: Run, here: Mask, given: Bytes, ahead: Bytes) -> None:
        rank = self.rank
        passes = self.passes(run)
        below = self.alive - passes.kept
        dense = run.dense.gathered * rank.gathers
        # Its weights are copied out of the message that brought them.
        copying = run.units.gathered * rank.gathers + rank.hidden * (1 - given) + self.on_the_way
        self.offer(here, self.alive, copying, weights=dense)
        # The experts' message has come with it, and is copied out when they are needed. Where they
        # run again they are gathered once more for their backward pass.
        experts = run.experts.gathered * rank.gathers
        message: Bytes = experts
        old, new = passes.kept, rank.hidden * (1 - given)
        phases = passes.backward
        if np.any(given):
            phases = choose(given > 0, passes.given, phases)
        uses = sum(phase.experts for phase in phases)
        for phase in phases:
            others = ahead + self.on_the_way
            weights = dense + experts * phase.experts
            if phase.experts:
                copying = here & (np.asarray(experts) > 0)
                self.offer(copying, below + old, new + others + experts, weights=weights)
                # A forward pass leaves its message behind until the experts are through.
                message, uses = experts * (uses > 1), uses - 1
            others = others + message
            self.offer(here, below + phase.old, phase.peak - phase.old + others, weights=weights)
            old, new = phase.old_end, phase.end - phase.old_end
            if not phase.experts:
                continue
            message = 0.0
            if not self.splits and not uses:
                short = passes.expert_gradients
                self.through(run.experts, here, below + old, new - short + ahead, short, dense)
                new = new - short
        self.alive = np.where(here, below, self.alive)
        if self.splits:
            self.leave(here * (passes.deferred_weight_grads - given * passes.closing))
            return
        self.through(run.dense, here, below, rank.hidden + ahead, passes.gradients, 0.0)

    def passes(self, run: Run) -> Passes:
        gradients = Gradients(self.splits, self.accumulated)
        return self.rank.passes(run.kind, run.recomputed, gradients)

    def through(
        self, unit: ZeroUnit, here: Mask, kept: Bytes, beside: Bytes, short: Bytes, weights: Bytes
    ) -> None:
        """A unit's gradients are all there: they are added up in fp32 one by one, or its weights
        go and the gradients are reduced. `short`: their bytes as autograd made them."""
        rank, event = self.rank, self.event
        gone = -unit.gathered * ~rank.gathers * event.last
        weights = weights + np.where(self.reduces, gone, 0.0)
        last = unit.last * (rank.job.element_bytes / FP32)
        adding = np.maximum(short, unit.gradients + last) if self.adds else short
        # Under ZeRO 1 they have joined those of earlier micro-batches, and are copied from there.
        joined = ~rank.reduces & self.accumulated
        made = np.where(joined, 0.0, short)
        self.offer(here & self.reduces, kept, beside + made + unit.padded, weights=weights)
        self.offer(here & ~self.reduces, kept, beside + adding, weights=weights)
        # They are copied into one message; all but the last are gone when the result is made.
        left = np.where(joined, unit.last - unit.gradients, last)
        reduced = here & self.reduces
        result = unit.shard
        self.offer(reduced, kept, beside + unit.padded + left, weights=weights, gradients=result)
        self.settle(unit, np.asarray(here, np.int64))

    def settle(self, unit: ZeroUnit, count: NDArray[np.int64]) -> None:
        """The state after so many units have been reduced or added up."""
        if unit is NO_UNIT:
            return
        rank = self.rank
        gradients: Bytes = 0.0
        if not self.accumulated:
            gradients = np.where(self.reduces, unit.shard, unit.gradients)
        elif self.event.last:
            gradients = np.where(rank.reduces, 0.0, unit.shard - unit.gradients)
        gone = -unit.gathered * ~rank.gathers * self.event.last
        self.state = _add(self.state, gradients=count * gradients, weights=count * gone)
        reduced = np.where(self.reduces, unit.padded, 0.0)
        self.on_the_way = np.where((count > 0) & (unit.padded > 0), reduced, self.on_the_way)

    def go_through(self, run: Run, count: NDArray[np.int64]) -> None:
        """So many layers of a run, unseen."""
        self.alive = self.alive - count * run.passes.kept
        if self.splits:
            self.leave(count * self.passes(run).deferred_weight_grads)
            return
        self.settle(run.experts, count)
        self.settle(run.dense, count)

    def lookup(self) -> None:
        """The embedding's rows; then what is outside the layers is reduced."""
        if self.splits:
            return
        rank, root = self.rank, self.rank.root(self.chunk)
        sharded = rank.lookups[self.chunk].gathered > 0
        rows = rank.hidden + rank.gathered + rank.wide * (rank.layouts.tp > 1)
        rows = rows + rank.fp32(rank.wide) * rank.short * ~sharded
        matrix = rank.matrix * sharded * self.first
        self.offer(self.first > 0, self.alive, rows + matrix + self.on_the_way)
        here = self.first + self.last > 0
        if rank.job.config.tied_embeddings:  # autograd adds the two up, in a third
            both = sharded & (self.first * self.last > 0)
            self.offer(both, self.alive, 2 * matrix + self.on_the_way)
            self.outside = np.where(both, 0.0, self.outside)
        short = self.outside + matrix * self.waits
        self.outside = 0.0
        gathered = -root.gathered * rank.gathers * self.last
        self.through(root, here, self.alive, 0.0, short, gathered)


class WeightPass(BackwardPass):
    """The products for the weights that a backward pass of a chunk has deferred, in the order in
    which it came to them: first the head's. What FSDP2 shards is reduced when all are there."""

    def run(self) -> None:
        rank, chunk = self.rank, self.chunk
        left, made = rank.defers[chunk], np.zeros(1)
        sharded = rank.root(chunk).gathered > 0
        own = rank.matrix * (sharded | rank.short)
        self.offer(self.last > 0, left, rank.gathered + own)
        left = left - self.last * rank.head_deferred
        made = made + self.last * rank.matrix * sharded * self.waits
        for run in reversed(self.runs):
            passes, own = self.passes(run), self.short(run.units)
            peak, old = passes.weights.peak, passes.weights.old
            for number in (0, run.count - 1):  # with most deferred, or with most gradients
                others = left - (number + 1) * passes.deferred_weight_grads
                self.offer(run.count > 0, others + old, made + number * own + peak - old)
            left = left - run.count * passes.deferred_weight_grads
            made = made + run.count * own
        rows = rank.wide * (rank.layouts.tp > 1) + rank.fp32(rank.wide) * rank.short * ~sharded
        self.offer(self.first > 0, left, made + rows + rank.matrix * sharded)
        made = made + self.first * rank.matrix * sharded * (1 - self.last) * self.waits
        self.reduce(made)

    def reduce(self, made: Bytes) -> None:
        """Each unit in its turn, what is outside the layers first; of layers that are alike those
        of the first and the last."""
        made = self.reduce_unit(self.rank.root(self.chunk), np.ones_like(made, bool), made)
        for run in reversed(self.runs):
            through = np.zeros_like(run.count)
            for number in (0, run.count - 1):
                here = (run.count > 0) & (through <= number)
                unseen = np.where(here, number - through, 0)
                self.settle(run.dense, unseen)
                self.settle(run.experts, unseen)
                made = made - unseen * self.short(run.units)
                for unit in (run.dense, run.experts):
                    made = self.reduce_unit(unit, here, made)
                through = through + unseen + here

    def reduce_unit(self, unit: ZeroUnit, here: Mask, made: Bytes) -> Bytes:
        own = self.short(unit)
        self.through(unit, here & (np.asarray(unit.padded) > 0), 0.0, made - own, own, 0.0)
        return made - here * own

    def short(self, unit: ZeroUnit) -> Bytes:
        """Its gradients as autograd gets them."""
        return unit.gradients * (self.rank.job.element_bytes / FP32) * self.waits


def _add(kinds: Kinds, **more: Bytes) -> Kinds:
    return {**kinds, **{kind: kinds[kind] + size for kind, size in more.items()}}
