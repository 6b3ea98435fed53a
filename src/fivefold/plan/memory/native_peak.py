"""Bytes of device memory of this program's own training step (`--engine fivefold`).

What a layer takes is in `own_layers`, and when passes begin in `own_moments`. Here the passes of a
rank follow each other as its schedule says, and its weights and gradients come and go as the ZeRO
stage says (`parallel.data.run`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.layout.stages import chunk_stage, chunks_a_rank
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.weights import (
    Weight,
    embedding_weight,
    embedding_weights,
    head_weights,
    layer_weights,
)
from fivefold.parallel.data.memory import after_step
from fivefold.parallel.layer_counts import layer_range
from fivefold.parallel.workload import FP32, RankWorkload, shard_degree
from fivefold.plan.engines import Job
from fivefold.plan.memory.native_layers import INT64, Passes, Sizes, layer_passes
from fivefold.plan.memory.native_schedule import Moment, moments
from fivefold.plan.time.operations import Numbers

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")


def own_memory(
    job: Job, layouts: LayoutBatch, rank: Numbers, work: RankWorkload
) -> dict[str, Numbers]:
    """Bytes by kind (`KINDS`) at the peak of pipeline rank `rank` of each layout, arrays [n]."""
    kinds = {kind: np.zeros(len(layouts)) for kind in KINDS}
    ranks = np.broadcast_to(rank, len(layouts))
    for row, members in _alike(layouts, ranks).items():
        part = layouts.take(members)
        those = _Ranks(
            job,
            part,
            ranks[members],
            replace(work, layout=part, **_taken(work, members)),
            any(moment.kind in "IW" for moment in row),
        )
        worst = _Worst(len(members))
        for moment in row:
            those.pass_through(moment, worst)
        those.step(worst)
        for kind, size in worst.kinds.items():
            kinds[kind][members] = size
    return kinds


def _alike(layouts: LayoutBatch, rank: NDArray[Any]) -> dict[tuple[Moment, ...], NDArray[Any]]:
    """The layouts that go through the same moments, by these."""
    schedules, schedule = np.unique(layouts.schedule, return_inverse=True)
    columns = (schedule, layouts.pp, layouts.vpp, layouts.accumulation, rank)
    rows, row = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    numbers: dict[tuple[Moment, ...], list[int]] = {}
    for number, (name, *degrees) in enumerate(rows.tolist()):
        numbers.setdefault(moments(str(schedules[name]), *degrees), []).append(number)
    return {key: np.flatnonzero(np.isin(row.reshape(-1), of)) for key, of in numbers.items()}


def _taken(work: RankWorkload, members: NDArray[Any]) -> dict[str, Any]:
    """The counts of some of the layouts."""

    def take(count: Any) -> Any:
        return count[members] if np.ndim(count) else count

    return {
        "layers": tuple((kind, take(count)) for kind, count in work.layers),
        "recomputed": tuple(take(count) for count in work.recomputed),
        **{name: take(getattr(work, name)) for name in COUNTS},
    }


COUNTS = ("chunks", "sends_on", "sends_back", "first", "last")


# Bytes at a moment


class _Worst:
    """The highest peak so far of each layout, by kind."""

    def __init__(self, count: int) -> None:
        self.kinds = {kind: np.zeros(count) for kind in KINDS}
        self._total = np.zeros(count)

    def offer(self, here: Numbers, kinds: dict[str, Numbers]) -> None:
        total = sum(kinds.values())
        higher = here & (total > self._total)
        if np.any(higher):
            self._total = np.where(higher, total, self._total)
            for kind, size in kinds.items():
                self.kinds[kind] = np.where(higher, size, self.kinds[kind])


@dataclass(frozen=True)
class _Unit:
    """Weights that FSDP2 gathers and reduces together, where it shards them: bytes."""

    gathered: Numbers  # in the compute precision, of all shards
    cast: Numbers  # this rank's shard in that precision
    gradients: Numbers  # in fp32, whole
    padded: Numbers  # in fp32, as they are reduced
    shard: Numbers  # in fp32, reduced

    def __add__(self, other: _Unit) -> _Unit:
        return _Unit(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, here: Numbers) -> _Unit:
        return _Unit(*(getattr(self, f.name) * here for f in fields(self)))


NO_UNIT = _Unit(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Run:
    """Layers of a chunk that are alike and follow each other."""

    count: Numbers
    kind: LayerKind
    recomputed: bool
    passes: Passes
    dense: _Unit
    experts: _Unit

    @cached_property
    def units(self) -> _Unit:
        return self.dense + self.experts


class _Ranks:
    """One pipeline rank of each of n layouts, which go through the same moments."""

    def __init__(
        self, job: Job, layouts: LayoutBatch, rank: Numbers, work: RankWorkload, splits: bool
    ) -> None:
        """`splits`: are there backward passes in two parts?"""
        self.job, self.layouts, self.rank, self.work = job, layouts, rank, work
        self.sizes = Sizes(job, layouts, work)
        self.gathers = layouts.zero == 3  # for each pass
        self.reduces = layouts.zero >= 2  # after each backward pass
        self.joins = bool(np.any(self.sizes.joins))
        self.splits = splits
        chunks = range(int(chunks_a_rank(layouts).max(initial=1)))
        self.stages = [chunk_stage(layouts, rank, chunk) for chunk in chunks]
        self.lookups = [self._lookup_unit(chunk) for chunk in chunks]
        self.heads = [self._head_unit(chunk) for chunk in chunks]
        self.roots = [self.lookups[chunk] + self.heads[chunk] for chunk in chunks]
        self.chunks = [self._runs(chunk) for chunk in chunks]
        self.wholes = [self.whole(chunk) for chunk in range(len(self.chunks))]
        self.keeps = [self.kept(chunk) for chunk in range(len(self.chunks))]
        self.puts_off = [self.deferred_weight_grads(chunk) for chunk in range(len(self.chunks))]

    # What there is

    def _runs(self, chunk: int) -> list[_Run]:
        config, layouts = self.job.config, self.layouts
        begin, end = layer_range(config, layouts, np.minimum(self.stage(chunk), layouts.stages - 1))
        again = np.where(layouts.recompute_layers > 0, begin + layouts.recompute_layers, end)
        again = np.where(layouts.recompute == "full", np.minimum(again, end), begin)
        runs = []
        for kind, start, stop in _segments(config):
            parts = (begin, again, True), (again, end, False)
            for first, last, recomputed in parts:
                count = np.clip(np.minimum(last, stop) - np.maximum(first, start), 0, None)
                if np.any(count):
                    passes = self.passes(kind, recomputed)
                    runs.append(_Run(count, kind, recomputed, passes, *self._units(kind)))
        return runs

    def passes(
        self, kind: LayerKind, recomputed: bool, split: bool = False, accumulated: bool = False
    ) -> Passes:
        key = (kind, recomputed, split, accumulated and self.joins)
        if key not in self._known:
            if recomputed:
                passes = layer_passes(self.sizes, kind, "full", *key[2:])
            else:
                passes = layer_passes(self.sizes, kind, "none", *key[2:])
                selective = self.layouts.recompute == "selective"
                if np.any(selective):
                    those = layer_passes(self.sizes, kind, "selective", *key[2:])
                    passes = _choose(selective, those, passes)
            self._known[key] = passes
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[LayerKind, bool, bool, bool], Passes]:
        return {}

    def _units(self, kind: LayerKind) -> tuple[_Unit, _Unit]:
        weights = layer_weights(self.job.config, kind)
        return (
            self._unit(weight for weight in weights if not weight.is_routed),
            self._unit(weight for weight in weights if weight.is_routed),
        )

    def _unit(self, weights: Iterable[Weight]) -> _Unit:
        element, total = self.sizes.element, NO_UNIT
        for weight in weights:
            sizes = self.work.sizes(weight)
            shards = shard_degree(self.layouts, weight.is_routed)
            padded = sizes.padded * sizes.sharded
            total += _Unit(
                gathered=element * padded,
                cast=element * padded / shards,
                gradients=FP32 * sizes.local * sizes.sharded,
                padded=FP32 * padded,
                shard=FP32 * padded / shards,
            )
        return total

    def stage(self, chunk: int) -> Numbers:
        return self.stages[chunk]

    def first(self, chunk: int) -> Numbers:
        return (self.stage(chunk) == 0) * 1.0

    def last(self, chunk: int) -> Numbers:
        return (self.stage(chunk) == self.layouts.stages - 1) * 1.0

    def turns(self, chunk: int) -> Numbers:
        """Is its input the output of another chunk here?"""
        before = self.stage(chunk) - 1
        return sum((stage == before) * 1.0 for stage in self.stages) * (before >= 0)

    def root(self, chunk: int) -> _Unit:
        """What is outside the layers."""
        return self.roots[chunk]

    def _lookup_unit(self, chunk: int) -> _Unit:
        return self._unit(embedding_weights(self.job.config)).times(self.first(chunk))

    def _head_unit(self, chunk: int) -> _Unit:
        unit = self._unit(head_weights(self.job.config))
        if self.job.config.tied_embeddings:
            apart = self.layouts.stages > 1
            unit += self._unit([embedding_weight(self.job.config)]).times(apart)
        return unit.times(self.last(chunk))

    def whole(self, chunk: int) -> _Unit:
        total = self.root(chunk)
        for run in self.chunks[chunk]:
            total += run.units.times(run.count)
        return total

    # What one micro-batch leaves

    def kept(self, chunk: int) -> Numbers:
        """Between its passes through a chunk."""
        total = self.first(chunk) * self.lookup_kept - self.turns(chunk) * self.sizes.hidden
        total = total + np.where(self.last(chunk), self.head_kept, self.sizes.hidden)
        return total + sum(run.count * run.passes.kept for run in self.chunks[chunk])

    def deferred_weight_grads(self, chunk: int) -> Numbers:
        """Between its backward pass for the input and that for the weights."""
        total = self.last(chunk) * self.head_put_off + self.first(chunk) * self.lookup_put_off
        if not self.splits:
            return total
        runs = self.chunks[chunk]
        split = [self.passes(run.kind, run.recomputed, split=True) for run in runs]
        return total + sum(
            run.count * one.deferred_weight_grads for run, one in zip(runs, split, strict=True)
        )

    @property
    def head_put_off(self) -> Numbers:
        """The head's input and the gradient of logits."""
        return self.sizes.hidden + self.logits

    @property
    def lookup_put_off(self) -> Numbers:
        """The gradient of the embedding's rows."""
        return np.where(self.sizes.sp > 0, self.sizes.wide, self.sizes.hidden) + self.lookup_kept

    @property
    def lookup_kept(self) -> Numbers:
        """The rows that a part of the vocabulary is asked for, and whether it has them."""
        return (INT64 + 1) * self.sizes.tokens * (self.layouts.tp > 1)

    @cached_property
    def columns(self) -> Numbers:
        """Of the vocabulary, here."""
        config = self.job.config
        return self.work.sizes(embedding_weight(config)).local / config.hidden_size

    @cached_property
    def logits(self) -> Numbers:
        return self.sizes.element * self.sizes.tokens * self.columns

    @property
    def head_kept(self) -> Numbers:
        """The final norm's input and output; the numerators of the softmax in fp32, their sums and
        the labels' (two numbers), and labels with which of them are here and count."""
        s = self.sizes
        norm = 2 * s.hidden + FP32 * s.held
        return norm + s.fp32(self.logits) + (2 * FP32 + INT64 + 2) * s.tokens

    @cached_property
    def inputs(self) -> Numbers:
        """Of all micro-batches: three numbers a token; and the angles of positions."""
        s = self.sizes
        length = self.job.sequence_length / self.layouts.cp
        angles = FP32 * length * self.job.config.head_dim
        return 3 * INT64 * s.tokens * self.layouts.accumulation + angles

    # The state: what is there beside activations

    @cached_property
    def base(self) -> dict[str, Numbers]:
        """Weights, gradients and moments, but for the gradients of weights that ZeRO shards."""
        state = after_step(self.work)
        sharded = sum(unit.shard for unit in self.wholes)
        return {
            "weights": state.weights,
            "gradients": state.gradients - sharded,
            "optimizer": state.optimizer,
        }

    def between(self, moment: Moment) -> dict[str, Numbers]:
        """As a pass begins, with what ZeRO has gathered and accumulated in all chunks."""
        state = dict(self.base)
        for chunk, unit in enumerate(self.wholes[: len(moment.in_flight)]):
            if moment.is_gathered(chunk):
                state["weights"] = state["weights"] + unit.gathered * ~self.gathers
            if moment.accumulated[chunk]:
                reduced = self.reduces | moment.finished[chunk]
                whole = np.where(reduced, unit.shard, unit.gradients)
                state["gradients"] = state["gradients"] + whole
        resident = self.inputs + self.sizes.hidden * moment.messages
        for chunk, held in enumerate(moment.in_flight):
            passing = chunk == moment.chunk
            others = held - (passing and moment.kind != "W")
            left = moment.deferred_weight_grads[chunk] - (passing and moment.kind == "W")
            resident = resident + others * self.keeps[chunk] + left * self.puts_off[chunk]
        return {**state, "activations": resident, "temporary": 0.0}

    def pass_through(self, moment: Moment, worst: _Worst) -> None:
        if moment.kind == "F":
            _ForwardPass(self, moment, worst).run()
        elif moment.kind == "W":
            _WeightPass(self, moment, worst).run()
        else:
            _BackwardPass(self, moment, worst).run()

    def step(self, worst: _Worst) -> None:
        """The optimizer's: gradients that ranks share are summed in one message each."""
        state = after_step(self.work)
        hidden = self.job.config.hidden_size
        tied = FP32 * self.columns * hidden * self.work.reduces_tied_embedding
        sharded = sum(unit.shard for unit in self.wholes)
        copies = sharded * (self.layouts.dp_replicate > 1)
        kinds = {
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": self.inputs,
            "temporary": np.maximum(tied, copies),
        }
        worst.offer(True, kinds)


class _ForwardPass:
    """One forward pass of a chunk, from the embedding or the stage before to the loss."""

    def __init__(self, ranks: _Ranks, moment: Moment, worst: _Worst) -> None:
        self.ranks, self.worst, self.chunk = ranks, worst, moment.chunk
        self.s, self.runs = ranks.sizes, ranks.chunks[moment.chunk]
        # Weights are gathered for each forward pass, or for the first one of a step.
        self.gathers = ranks.gathers | moment.starts
        root = ranks.root(self.chunk).gathered
        self.state = _add(ranks.between(moment), weights=root * ranks.gathers)
        # What is gathered last leaves its message behind, until the next one has come.
        self.behind = root * self.gathers
        self.alive = ranks.first(self.chunk) * ranks.lookup_kept

    def offer(self, here: Numbers, activations: Numbers, temporary: Numbers, weights=0.0) -> None:
        weights = weights * self.ranks.gathers
        kinds = _add(self.state, weights=weights, activations=activations, temporary=temporary)
        self.worst.offer(here, kinds)

    def run(self) -> None:
        s, ranks = self.s, self.ranks
        first, last = ranks.first(self.chunk), ranks.last(self.chunk)
        self.offer(True, self.alive, first * (s.wide + s.sp * s.hidden) + self.behind)
        for number, run in enumerate(self.runs):
            # The next layer's weights come with it where they are not there already.
            self.layer(run, 2, ranks.gathers, run.dense.gathered)
            self.layer(run, 1, True, self.following(number))
            self.alive = self.alive + run.count * run.passes.kept
            self.behind = np.where(run.count > 0, self.left_behind(run), self.behind)
        loss = s.short * ranks.logits + (INT64 + 3 * FP32) * s.tokens + self.behind
        self.offer(last > 0, self.alive + ranks.head_kept, loss)

    def following(self, number: int) -> Numbers:
        """Weights that are on their way beside the last layer of run `number`."""
        after: Numbers = 0.0
        for run in reversed(self.runs[number + 1 :]):
            after = np.where(run.count > 0, run.dense.gathered, after)
        return after

    def left_behind(self, run: _Run) -> Numbers:
        experts = run.experts.gathered
        return np.where(experts > 0, experts, run.dense.gathered) * self.gathers

    def layer(self, run: _Run, place: int, here: Numbers, coming: Numbers) -> None:
        """The last of these layers, or the last but one (`place` 2)."""
        here, own = here & (run.count >= place), run.dense.gathered
        if not np.any(here):
            return
        dense, experts = own * self.gathers, run.experts.gathered * self.gathers
        before = self.alive + (run.count - place) * run.passes.kept
        kept = before + self.s.hidden
        left = np.where(run.count > place, self.left_behind(run), self.behind)
        self.offer(here, kept, dense + left, own)
        # Its experts' and the next layer's are on their way.
        message, coming = dense + experts, coming * self.ranks.gathers
        end: Numbers = self.s.hidden
        for phase in run.passes.forward:
            weights = own + run.experts.gathered * phase.experts
            if phase.experts:  # copied out, while the message before is still there
                self.offer(here & (experts > 0), before + end, message + coming, weights)
                message = self.left_behind(run)
            self.offer(here, kept, message + coming + phase.peak - self.s.hidden, weights)
            end = phase.end


class _BackwardPass:
    """One backward pass of a chunk, from the loss or the next stage to the embedding."""

    def __init__(self, ranks: _Ranks, moment: Moment, worst: _Worst) -> None:
        self.ranks, self.moment, self.worst = ranks, moment, worst
        self.s, self.chunk = ranks.sizes, moment.chunk
        self.state = ranks.between(moment)
        self.runs = ranks.chunks[self.chunk]
        self.last, self.first = ranks.last(self.chunk), ranks.first(self.chunk)
        self.splits = moment.kind in "IW"
        self.accumulated = moment.accumulated[self.chunk]
        self.reduces = ranks.reduces | moment.last
        self.waits = 1 - self.s.joins * self.accumulated  # gradients, for the rest of their unit
        self.matrix = self.s.element * ranks.columns * ranks.job.config.hidden_size
        self.alive = ranks.keeps[self.chunk] - self.s.hidden * (1 - self.last)
        # Gradients that come first are copied to fp32.
        self.adds = self.s.short * (not self.accumulated)
        # Of sharded weights outside the layers, until the pass is over.
        self.outside: Numbers = 0.0
        self.on_the_way: Numbers = 0.0  # gradients that were reduced last

    def offer(self, here: Numbers, activations: Numbers, temporary: Numbers, **more) -> None:
        temporary = temporary + self.outside
        kinds = _add(self.state, activations=activations, temporary=temporary, **more)
        self.worst.offer(here, kinds)

    def run(self) -> None:
        s, ranks = self.s, self.ranks
        # The stage's output and its gradient stay as long as the pass.
        ends = 2 * s.hidden * (1 - self.last)
        self.state = _add(
            self.state,
            activations=ends,
            weights=ranks.root(self.chunk).gathered * ranks.gathers * self.last,
        )
        self.head()
        given = 1 - self.last  # is the gradient of a layer's output the stage's?
        for number in reversed(range(len(self.runs))):
            before = self.prefetched(number - 1)
            self.layers(self.runs[number], given, before)
            given = given * (self.runs[number].count == 0)
        self.lookup()

    def prefetched(self, number: int) -> Numbers:
        """Weights that are on their way beside the run that follows run `number`."""
        ahead: Numbers = 0.0
        for run in self.runs[: number + 1]:
            ahead = np.where(run.count > 0, run.units.gathered, ahead)
        return ahead * self.ranks.gathers

    def head(self) -> None:
        """The loss, the head's product with the gradients of logits, input and matrix, the norm."""
        s, ranks, here = self.s, self.ranks, self.last > 0
        if not np.any(here):
            return
        ahead = self.prefetched(len(self.runs) - 1)
        self.offer(here, self.alive, s.short * ranks.logits + ahead)
        self.alive = self.alive - self.last * ranks.head_kept
        sharded = ranks.heads[self.chunk].gathered > 0
        product = ranks.logits + 2 * s.sp * s.wide + s.hidden + ahead
        if self.splits:
            product = product - s.sp * s.wide
        else:
            product = product + self.matrix * np.where(sharded, 1.0, s.short)
        self.offer(here, self.alive + 2 * s.hidden + FP32 * s.held, product)
        if self.splits:
            self.leave(self.last * ranks.head_put_off)
        else:
            # One that is tied to the embedding's waits for that, which is added to it.
            waits = np.maximum(self.waits, ranks.job.config.tied_embeddings * self.first)
            self.outside = self.matrix * sharded * self.last * waits
        norm = s.hidden + (3 + s.short) * s.fp32(s.hidden) + ahead
        self.offer(here, self.alive + s.hidden + FP32 * s.held, norm)

    def leave(self, size: Numbers) -> None:
        """What the pass for the weights will need."""
        self.state = _add(self.state, activations=size)

    def layers(self, run: _Run, given: Numbers, before: Numbers) -> None:
        """From the last to the first: of those that are alike the last two and the first."""
        ranks, through = self.ranks, np.zeros_like(run.count)
        own = run.units.gathered * ranks.gathers
        for number in (0, 1, 2):
            target = np.where(number < 2, number, run.count - 1)
            here = (target < run.count) & ((number < 2) | (run.count > 2))
            if not np.any(here):
                continue
            self.go_through(run, np.where(here, target - through, 0))
            through = np.where(here, target, through)
            ahead = np.where(target < run.count - 1, own, before)
            self.layer(run, here, given if number == 0 else 0.0 * given, ahead)
            through = through + here

    def layer(self, run: _Run, here: Numbers, given: Numbers, ahead: Numbers) -> None:
        s, ranks = self.s, self.ranks
        passes = self.passes(run)
        below = self.alive - passes.kept
        dense = run.dense.gathered * ranks.gathers
        # Its weights are copied out of the message that brought them.
        copying = run.units.gathered * ranks.gathers + s.hidden * (1 - given) + self.on_the_way
        self.offer(here, self.alive, copying, weights=dense)
        # The experts' message has come with it, and is copied out when they are needed.
        message = run.experts.gathered * ranks.gathers
        old, new = 0.0, 0.0
        for phase in passes.backward:
            others = ahead + self.on_the_way
            weights = dense + run.experts.gathered * ranks.gathers * phase.experts
            if phase.experts:
                copying = here & (message > 0)
                self.offer(copying, below + old, new + others + message, weights=weights)
                message = 0.0
            # The last phase begins with a sum, a tensor of its own.
            is_last = phase is passes.backward[-1]
            others = others + message - given * (passes.closing if is_last else s.hidden)
            self.offer(here, below + phase.old, phase.peak - phase.old + others, weights=weights)
            old, new = phase.old_end, phase.end - phase.old_end - s.hidden * given
            if phase.experts and not self.splits:
                short = passes.expert_gradients
                self.through(run.experts, here, below + old, new - short + ahead, short, dense)
                new = new - short
        self.alive = np.where(here, below, self.alive)
        if self.splits:
            self.leave(here * (passes.deferred_weight_grads - given * passes.closing))
            return
        self.through(run.dense, here, below, s.hidden + ahead, passes.gradients, 0.0)

    def passes(self, run: _Run) -> Passes:
        return self.ranks.passes(run.kind, run.recomputed, self.splits, self.accumulated)

    def through(
        self,
        unit: _Unit,
        here: Numbers,
        kept: Numbers,
        beside: Numbers,
        short: Numbers,
        weights: Numbers,
    ) -> None:
        """A unit's gradients are all there: they are reduced, or added up in fp32 one by one."""
        ranks = self.ranks
        adding = self.adds * (unit.gradients - short * 2 / 3)
        gone = -unit.gathered * ~ranks.gathers * self.moment.last
        # They are copied into one message; all but the last are gone when the result is made.
        beside_message = np.maximum(short, unit.shard + short / 3)
        if self.accumulated:  # under ZeRO 1 they have joined the others, and go with them
            beside_message = beside_message * ranks.reduces
        message = unit.padded + beside_message
        reducing = np.where(self.reduces, message, short + adding)
        self.offer(here, kept, beside + reducing, weights=weights + gone)
        self.settle(unit, here * 1)

    def settle(self, unit: _Unit, count: Numbers) -> None:
        """The state after so many units have been reduced or added up."""
        if unit is NO_UNIT:
            return
        ranks = self.ranks
        if not self.accumulated:
            gradients = np.where(self.reduces, unit.shard, unit.gradients)
        elif self.moment.last:
            gradients = np.where(ranks.reduces, 0.0, unit.shard - unit.gradients)
        else:
            gradients = 0.0
        gone = -unit.gathered * ~ranks.gathers * self.moment.last
        self.state = _add(self.state, gradients=count * gradients, weights=count * gone)
        reduced = np.where(self.reduces, unit.padded, 0.0)
        self.on_the_way = np.where((count > 0) & (unit.padded > 0), reduced, self.on_the_way)

    def go_through(self, run: _Run, count: Numbers) -> None:
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
        s, ranks, root = self.s, self.ranks, self.ranks.root(self.chunk)
        sharded = ranks.lookups[self.chunk].gathered > 0
        rows = s.hidden + s.wide * s.sp + s.wide * (ranks.layouts.tp > 1)
        rows = rows + s.fp32(s.wide) * s.short * ~sharded
        matrix = self.matrix * sharded * self.first
        self.offer(self.first > 0, self.alive, rows + matrix + self.on_the_way)
        adding = np.where(self.reduces, root.padded, self.adds * root.gradients)
        self.offer(True, self.alive, matrix * self.waits + adding)


class _WeightPass(_BackwardPass):
    """The products for the weights that a backward pass of a chunk has put off, in the order in
    which it came to them: first the head's. What FSDP2 shards is reduced when all are there."""

    def run(self) -> None:
        s, ranks, chunk = self.s, self.ranks, self.chunk
        left, made = ranks.puts_off[chunk], 0.0
        sharded = ranks.root(chunk).gathered > 0
        own = self.matrix * np.where(sharded, 1.0, s.short)
        self.offer(self.last > 0, left, s.wide * s.sp + own)
        left = left - self.last * ranks.head_put_off
        made = made + self.last * self.matrix * sharded * self.waits
        for run in reversed(self.runs):
            passes, own = self.passes(run), self.short(run.units)
            peak, old = passes.weights.peak, passes.weights.old
            for number in (0, run.count - 1):  # with most put off, or with most gradients
                others = left - (number + 1) * passes.deferred_weight_grads
                self.offer(run.count > 0, others + old, made + number * own + peak - old)
            left = left - run.count * passes.deferred_weight_grads
            made = made + run.count * own
        rows = s.wide * (ranks.layouts.tp > 1) + s.fp32(s.wide) * s.short * ~sharded
        self.offer(self.first > 0, left, made + rows + self.matrix * sharded)
        made = made + self.first * self.matrix * sharded * (1 - self.last) * self.waits
        self.reduce(made)

    def reduce(self, made: Numbers) -> None:
        """Each unit in its turn, what is outside the layers first; of layers that are alike those
        of the first and the last."""
        made = self.reduce_unit(self.ranks.root(self.chunk), np.ones_like(made, bool), made)
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

    def reduce_unit(self, unit: _Unit, here: Numbers, made: Numbers) -> Numbers:
        own = self.short(unit)
        self.through(unit, here & (unit.padded > 0), 0.0, made - own, own, 0.0)
        return made - here * own

    def short(self, unit: _Unit) -> Numbers:
        """Its gradients as autograd gets them."""
        return unit.gradients * (self.s.element / FP32) * self.waits


@lru_cache(maxsize=64)
def _segments(config: ModelConfig) -> list[tuple[LayerKind, int, int]]:
    """Layers that follow each other and are of one kind: the first of them, and after the last."""
    segments: list[tuple[LayerKind, int, int]] = []
    for layer in range(config.num_layers):
        kind = LayerKind(config.is_moe(layer))
        if segments and segments[-1][0] == kind:
            segments[-1] = (kind, segments[-1][1], layer + 1)
        else:
            segments.append((kind, layer, layer + 1))
    return segments


def _add(kinds: dict[str, Numbers], **more: Numbers) -> dict[str, Numbers]:
    return {**kinds, **{kind: kinds[kind] + size for kind, size in more.items()}}


def _choose(here: Numbers, yes: Any, no: Any) -> Any:
    """`yes` where that holds, else `no`, of two records of numbers."""
    if isinstance(yes, tuple):
        return tuple(_choose(here, *pair) for pair in zip(yes, no, strict=True))
    if is_dataclass(yes):
        names = [each.name for each in fields(yes)]
        values = (_choose(here, getattr(yes, name), getattr(no, name)) for name in names)
        return type(yes)(**dict(zip(names, values, strict=True)))  # pyright: ignore
    return yes if isinstance(yes, bool) else np.where(here, yes, no)
