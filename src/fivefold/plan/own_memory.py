"""Bytes of device memory of this program's own training step (`--engine fivefold`).

What a layer takes is in `own_layers`. Here the passes of a rank follow each other as its schedule
says, and its weights and gradients come and go as the ZeRO stage says (`parallel.data.run`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fivefold.layout.many import Layouts
from fivefold.layout.notation import SCHEDULES
from fivefold.layout.stages import chunk_stage, chunks_a_rank
from fivefold.model.config import LayerKind
from fivefold.model.weights import (
    Weight,
    embedding_weight,
    embedding_weights,
    head_weights,
    layer_weights,
)
from fivefold.parallel.data.memory import after_step
from fivefold.parallel.pipeline.schedules import build, messages
from fivefold.parallel.work import FP32, Work, layer_range, shard_degree
from fivefold.plan.job import Job
from fivefold.plan.operations import Numbers
from fivefold.plan.own_layers import INT64, Passes, Sizes, layer_passes
from fivefold.plan.pipeline import in_flight

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")


def own_memory(job: Job, layouts: Layouts, rank: Numbers, work: Work) -> dict[str, Numbers]:
    """Bytes by kind (`KINDS`) at the peak of pipeline rank `rank` of each layout, arrays [n]."""
    ranks = _Ranks(job, layouts, np.broadcast_to(rank, len(layouts)), work)
    worst = _Worst(len(layouts))
    schedules, schedule = np.unique(layouts.schedule, return_inverse=True)
    columns = (schedule, layouts.pp, layouts.vpp, layouts.accumulation, ranks.rank)
    rows, row = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    for number, (name, *numbers) in enumerate(rows.tolist()):
        here = row.reshape(-1) == number
        for moment in moments(str(schedules[name]), *numbers):
            ranks.pass_through(moment, here, worst)
        ranks.step(here, worst)
    return worst.kinds


# Moments of a schedule


@dataclass(frozen=True)
class Moment:
    """When a rank of a pipeline begins a pass."""

    forward: bool
    chunk: int
    in_flight: tuple[int, ...]  # micro-batches that it holds of each chunk, this one included
    accumulated: tuple[bool, ...]  # has a chunk been through a backward pass?
    last: bool  # is this the chunk's last backward pass?
    messages: int  # hidden states that have arrived for the next pass, or leave still


@lru_cache(maxsize=4096)
def moments(schedule: str, pp: int, vpp: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """The moments of one step, but for those that another one surpasses."""
    if schedule not in SCHEDULES:
        return _moments_of_planned(schedule, pp, vpp, micro_batches, rank)
    if schedule == "1f1b":  # after its warm-up it goes round in the same circle
        circle = pp - rank + 2 if vpp == 1 else 4 * pp
        micro_batches = min(micro_batches, circle)
    steps = messages(build(schedule, pp, vpp, micro_batches), rank)
    chunks = sorted({step.action.stage for step in steps})
    held, done = [0] * len(chunks), [0] * len(chunks)
    found = dict[Moment, None]()
    leaving = 0
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        chunk = chunks.index(step.action.stage)
        forward = step.action.kind == "F"
        held[chunk] += forward
        arriving = following is not None and following.receives is not None
        moment = Moment(
            forward,
            chunk,
            tuple(held),
            tuple(count > 0 for count in done),
            not forward and done[chunk] == micro_batches - 1,
            arriving + leaving,
        )
        found[moment] = None
        held[chunk] -= not forward
        done[chunk] += not forward
        if step.sends is not None:
            leaving = int(not forward)  # what a forward pass sends is its output, which stays
    return tuple(each for each in found if not any(_surpasses(other, each) for other in found))


def _moments_of_planned(
    schedule: str, pp: int, vpp: int, micro_batches: int, rank: int
) -> tuple[Moment, ...]:
    """Of a schedule that has no table: its chunks hold alike much, as `in_flight` says."""
    chunks = max(vpp, 2 if schedule.startswith("dualpipe") else 1)
    held = int(in_flight(schedule, pp, vpp, micro_batches, rank))
    each = (max(1, -(-held // chunks)),) * chunks
    return tuple(
        Moment(forward, chunk, each, (True,) * chunks, False, 1)
        for forward in (True, False)
        for chunk in range(chunks)
    )


def _surpasses(other: Moment, each: Moment) -> bool:
    more = (*other.in_flight, other.messages), (*each.in_flight, each.messages)
    return (
        other != each
        and all(getattr(other, name) == getattr(each, name) for name in _SAME)
        and all(a >= b for a, b in zip(*more, strict=True))
    )


_SAME = ("forward", "chunk", "accumulated", "last")


# Bytes at a moment


class _Worst:
    """The highest peak so far of each layout, by kind."""

    def __init__(self, count: int) -> None:
        self.kinds = {kind: np.zeros(count) for kind in KINDS}
        self._total = np.zeros(count)

    def offer(self, here: Numbers, kinds: dict[str, Numbers]) -> None:
        total = np.broadcast_to(sum(kinds.values()), self._total.shape)
        higher = here & (total > self._total)
        self._total[higher] = total[higher]
        for kind, size in kinds.items():
            self.kinds[kind][higher] = np.broadcast_to(size, higher.shape)[higher]


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
class _Place:
    """The layers at one place of a chunk, from its first."""

    exists: Numbers  # has the chunk as many layers?
    passes: Passes
    dense: _Unit
    experts: _Unit


class _Ranks:
    """One pipeline rank of each of n layouts."""

    def __init__(self, job: Job, layouts: Layouts, rank: Numbers, work: Work) -> None:
        self.job, self.layouts, self.rank, self.work = job, layouts, rank, work
        self.sizes = Sizes(job, layouts, work)
        self.gathers = layouts.zero == 3  # for each pass
        self.reduces = layouts.zero >= 2  # after each backward pass
        self.chunks = [
            self._places(chunk) for chunk in range(int(chunks_a_rank(layouts).max(initial=1)))
        ]

    # What there is

    def _places(self, chunk: int) -> list[_Place]:
        config, layouts = self.job.config, self.layouts
        stage = np.minimum(self.stage(chunk), layouts.stages - 1)
        begin, end = layer_range(config, layouts, stage)
        is_moe = np.array([kind.moe for kind in config.layer_kinds])
        places = []
        for place in range(int((end - begin).max(initial=0))):
            moe = is_moe[np.minimum(begin + place, config.num_layers - 1)]
            spared = (layouts.recompute_layers > 0) & (place >= layouts.recompute_layers)
            mode = np.where((layouts.recompute == "full") & spared, "none", layouts.recompute)
            passes, dense, experts = self._alike(moe, mode)
            places.append(_Place((begin + place < end) * 1.0, passes, dense, experts))
        return places

    def _alike(self, moe: Numbers, mode: Numbers) -> tuple[Passes, _Unit, _Unit]:
        """Of a layer that is a mixture or not, and recomputed so or so."""
        code = moe.tobytes() + mode.tobytes()
        if code not in self._known:
            passes = dense = experts = None
            for is_moe in np.unique(moe):
                kind = LayerKind(bool(is_moe))
                units = self._units(kind)
                dense = _choose(moe == is_moe, units[0], dense)
                experts = _choose(moe == is_moe, units[1], experts)
                for name in np.unique(mode):
                    here = (moe == is_moe) & (mode == name)
                    passes = _choose(here, layer_passes(self.sizes, kind, str(name)), passes)
            self._known[code] = passes, dense, experts
        return self._known[code]

    @cached_property
    def _known(self) -> dict[bytes, Any]:
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
        return chunk_stage(self.layouts, self.rank, chunk)

    def first(self, chunk: int) -> Numbers:
        return (self.stage(chunk) == 0) * 1.0

    def last(self, chunk: int) -> Numbers:
        return (self.stage(chunk) == self.layouts.stages - 1) * 1.0

    def root(self, chunk: int) -> _Unit:
        """What is outside the layers."""
        return self.lookup_unit(chunk) + self.head_unit(chunk)

    def lookup_unit(self, chunk: int) -> _Unit:
        return self._unit(embedding_weights(self.job.config)).times(self.first(chunk))

    def head_unit(self, chunk: int) -> _Unit:
        unit = self._unit(head_weights(self.job.config))
        if self.job.config.tied_embeddings:
            apart = self.layouts.stages > 1
            unit += self._unit([embedding_weight(self.job.config)]).times(apart)
        return unit.times(self.last(chunk))

    def whole(self, chunk: int) -> _Unit:
        total = self.root(chunk)
        for place in self.chunks[chunk]:
            total += (place.dense + place.experts).times(place.exists)
        return total

    # What one micro-batch leaves

    def kept(self, chunk: int) -> Numbers:
        """Between its passes through a chunk."""
        total = self.first(chunk) * self.lookup_kept
        total = total + np.where(self.last(chunk), self.head_kept, self.sizes.hidden)
        return total + sum(place.exists * place.passes.kept for place in self.chunks[chunk])

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
        sharded = sum(self.whole(chunk).shard for chunk in range(len(self.chunks)))
        return {
            "weights": state.weights,
            "gradients": state.gradients - sharded,
            "optimizer": state.optimizer,
        }

    def between(self, moment: Moment) -> dict[str, Numbers]:
        """As a pass begins, with what ZeRO has gathered and accumulated in all chunks."""
        state = dict(self.base)
        for chunk, held in enumerate(moment.in_flight):
            unit, accumulated = self.whole(chunk), moment.accumulated[chunk]
            if held:
                state["weights"] = state["weights"] + unit.gathered * ~self.gathers
            if accumulated:
                whole = np.where(self.reduces, unit.shard, unit.gradients)
                state["gradients"] = state["gradients"] + whole
        resident = self.inputs + self.sizes.hidden * moment.messages
        for chunk, held in enumerate(moment.in_flight):
            resident = resident + (held - (chunk == moment.chunk)) * self.kept(chunk)
        return {**state, "activations": resident, "temporary": 0.0}

    def pass_through(self, moment: Moment, here: Numbers, worst: _Worst) -> None:
        if moment.forward:
            self._forward(moment, here, worst)
        else:
            self._backward(moment, here, worst)

    def _forward(self, moment: Moment, here: Numbers, worst: _Worst) -> None:
        s, chunk = self.sizes, moment.chunk
        state = self.between(moment)
        root, first, last = self.root(chunk), self.first(chunk), self.last(chunk)
        # Weights are gathered for each forward pass, or for the first one of a step.
        starts = moment.in_flight[chunk] == 1 and not moment.accumulated[chunk]
        gathers = self.gathers | bool(starts)
        state["weights"] = state["weights"] + root.gathered * self.gathers
        alive = first * self.lookup_kept
        before = root.gathered * gathers  # what the last gather left behind
        lookup = alive + first * (s.wide + s.sp * s.hidden)
        worst.offer(here, _add(state, activations=alive, temporary=lookup - alive + before))
        for place in self.chunks[chunk]:
            there = here & (place.exists > 0)
            units, passes = place.dense + place.experts, place.passes
            gathered = units.gathered * self.gathers
            # What is gathered last leaves its message behind, until the next one has come.
            flat = gathers * np.where(
                place.experts.gathered > 0, place.experts.gathered, place.dense.gathered
            )
            kept = alive + s.hidden
            copying = _add(state, weights=gathered, activations=kept, temporary=before + flat)
            worst.offer(there, copying)
            work = alive + passes.forward - kept
            worst.offer(
                there, _add(state, weights=gathered, activations=kept, temporary=flat + work)
            )
            alive = alive + place.exists * passes.kept
            before = np.where(place.exists > 0, flat, before)
        loss = s.short * self.logits + (INT64 + 3 * FP32) * s.tokens + before
        there = here & (last > 0)
        worst.offer(there, _add(state, activations=alive + self.head_kept, temporary=loss))

    def _backward(self, moment: Moment, here: Numbers, worst: _Worst) -> None:
        s, chunk, element = self.sizes, moment.chunk, self.sizes.element
        state = self.between(moment)
        first, last = self.first(chunk), self.last(chunk)
        reduces = self.reduces | moment.last
        accumulated = moment.accumulated[chunk]
        # The stage's output and its gradient stay as long as the pass.
        ends = 2 * s.hidden * (1 - last)
        state["activations"] = state["activations"] + ends
        head, lookup = self.head_unit(chunk), self.lookup_unit(chunk)
        state["weights"] = state["weights"] + head.gathered * self.gathers
        alive = self.kept(chunk) - s.hidden * (1 - last)
        places = self.chunks[chunk]
        there = here & (last > 0)
        ahead = places[-1].dense + places[-1].experts  # the last layer's weights are on their way
        ahead = ahead.gathered * self.gathers
        loss = s.short * self.logits + ahead
        worst.offer(there, _add(state, activations=alive, temporary=loss))
        # The head's product: the logits' gradient, and those of its input and its matrix.
        alive = alive - last * self.head_kept
        matrix = element * self.columns * self.job.config.hidden_size
        sharded = head.gathered > 0
        product = self.logits + 2 * s.sp * s.wide + s.hidden
        product = product + matrix * np.where(sharded, 1.0, s.short) + ahead
        norm = 2 * s.hidden + FP32 * s.held
        worst.offer(there, _add(state, activations=alive + norm, temporary=product))
        whole_gradients = matrix * sharded * last
        worst.offer(
            there,
            _add(
                state,
                activations=alive + norm - s.hidden,
                temporary=s.hidden + (3 + s.short) * s.fp32(s.hidden) + whole_gradients,
            ),
        )
        on_the_way: Numbers = 0.0
        given = 1 - last  # is the gradient of a layer's output the stage's?
        for number in reversed(range(len(places))):
            place = places[number]
            there = here & (place.exists > 0)
            units, passes = place.dense + place.experts, place.passes
            gathered = units.gathered * self.gathers
            following = places[number - 1].dense + places[number - 1].experts
            prefetched = following.gathered * self.gathers if number else 0.0
            alive = alive - place.exists * passes.kept
            there_now = _add(state, weights=gathered)
            gradient = s.hidden * (1 - given)
            if number + 1 == len(places) or np.any(given):
                copying = np.where(given > 0, gathered, 0.0)
                worst.offer(
                    there,
                    _add(
                        there_now,
                        activations=alive + passes.kept,
                        temporary=copying + whole_gradients + on_the_way,
                    ),
                )
            worst.offer(
                there,
                _add(
                    there_now,
                    activations=alive + passes.old,
                    temporary=passes.backward
                    - passes.old
                    - s.hidden * given
                    + prefetched
                    + on_the_way
                    + whole_gradients,
                ),
            )
            # The layer is through: its gradients are reduced, or added up in fp32.
            short = passes.gradients
            added = 0.0 if accumulated else units.gradients - short * 2 / 3
            if accumulated and moment.last:
                short = short * self.reduces  # they have joined the others
            if moment.last:
                resharded = place.exists * units.gathered * ~self.gathers
                state["weights"] = state["weights"] - resharded
            reducing = np.where(reduces, units.padded, added)
            worst.offer(
                there,
                _add(
                    state,
                    activations=alive,
                    temporary=s.hidden + short + reducing + prefetched + whole_gradients,
                ),
            )
            result = np.where(reduces, units.shard, units.gradients)
            if not accumulated:
                state["gradients"] = state["gradients"] + place.exists * result
            elif moment.last:
                change = np.where(self.reduces, 0.0, units.shard - units.gradients)
                state["gradients"] = state["gradients"] + place.exists * change
            on_the_way = np.where(
                place.exists > 0, np.where(reduces, units.padded, 0.0), on_the_way
            )
            given = np.where(place.exists > 0, 0.0, given)
        self._look_up(
            here, worst, state, alive, on_the_way, whole_gradients, reduces, accumulated, chunk
        )

    def _look_up(
        self, here, worst, state, alive, on_the_way, whole_gradients, reduces, accumulated, chunk
    ) -> None:
        s, first, root = self.sizes, self.first(chunk), self.root(chunk)
        lookup = self.lookup_unit(chunk)
        sharded = lookup.gathered > 0
        matrix = s.element * self.columns * self.job.config.hidden_size * sharded * first
        rows = s.hidden + s.wide * s.sp + s.wide * (self.layouts.tp > 1)
        rows = rows + s.fp32(s.wide) * s.short * ~sharded
        temporary = rows + matrix + on_the_way + whole_gradients
        worst.offer(here & (first > 0), _add(state, activations=alive, temporary=temporary))
        reducing = np.where(reduces, root.padded, 0.0 if accumulated else root.gradients)
        both = matrix + whole_gradients
        worst.offer(here, _add(state, activations=alive, temporary=both + reducing))

    def step(self, here: Numbers, worst: _Worst) -> None:
        """The optimizer's: gradients that ranks share are summed in one message each."""
        state = after_step(self.work)
        hidden = self.job.config.hidden_size
        tied = FP32 * self.columns * hidden * self.work.sums_embedding
        sharded = sum(self.whole(chunk).shard for chunk in range(len(self.chunks)))
        copies = sharded * (self.layouts.dp_replicate > 1)
        kinds = {
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": self.inputs,
            "temporary": np.maximum(tied, copies),
        }
        worst.offer(here, kinds)


def _add(kinds: dict[str, Numbers], **more: Numbers) -> dict[str, Numbers]:
    return {kind: size + more.get(kind, 0.0) for kind, size in kinds.items()}


def _choose(here: Numbers, yes: Any, no: Any | None) -> Any:
    """`yes` where that holds, else `no`, of two records of numbers."""
    if no is None:
        return yes
    values = {
        f.name: np.where(here, getattr(yes, f.name), getattr(no, f.name)) for f in fields(yes)
    }
    return type(yes)(**values)
