"""What a layer of this program allocates, operation by operation, for many layouts at once.

This follows `fivefold.model` and the splits' `run.py`: each function is one of theirs and says what
it allocates, what stays for the backward pass and what goes when. `fivefold trace` runs the program
itself and compares (tests/train/test_trace.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fivefold.layout.batch import LayoutBatch
from fivefold.model.config import LayerKind, MoEConfig
from fivefold.model.weights import layer_weights
from fivefold.parallel.workload import FP32, RankWorkload
from fivefold.plan.engines import Job
from fivefold.plan.memory.allocation_trace import Phase, Tape
from fivefold.plan.time.operations import Numbers, tokens

INT64 = 8
NOTHING = Phase(0.0, 0.0, 0.0, 0.0, False)
RANDOM_STATE = 24
"""The seed and offset of the flash kernel, which keeps them though nothing is dropped."""


@dataclass(frozen=True)
class Passes:
    """What one layer takes for one micro-batch. The peaks count from nothing: forward from before
    its input is there, backward from before all that it kept."""

    kept: Numbers  # from its forward to its backward pass; its input is a part of that
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]
    gradients: Numbers  # of sharded weights, as autograd made them
    expert_gradients: Numbers
    deferred_weight_grads: Numbers  # from the backward pass for the input to that for the weights
    closing: Numbers  # of that, the gradient that came in
    weights: Phase  # the pass for the weights, from nothing but what was put off


def layer_passes(
    sizes: Sizes, kind: LayerKind, recompute: str, split: bool = False, accumulated: bool = False
) -> Passes:
    """Of one layer that is recomputed so: "none", "selective" or "full". With `split` the backward
    pass is that for the input alone. `accumulated`: are there gradients of earlier micro-batches?
    """
    forward = Tape(saving=recompute != "full")
    _Forward(sizes, kind, forward).layer(recompute == "selective")
    forward.end_phase()
    kept = forward.alive - sizes.hidden  # but for what it hands on

    backward = Tape(saving=True)
    if recompute == "full":
        backward.take(x=sizes.hidden)
        backward.turn()
        # The gradient is gathered before anything asks for what was not kept; not for experts.
        gathered = sizes.wide * sizes.sp * (not kind.moe)
        backward.take(gradient=sizes.hidden, whole_gradient=gathered)
        _Forward(sizes, kind, backward).compute(again=True)
        backward.phases = []
        backward.free("whole_gradient")
    else:
        _Forward(sizes, kind, backward).layer(recompute == "selective")
        backward.free("out")
        backward.turn()
        backward.take(gradient=sizes.hidden)
    work = _Backward(sizes, kind, backward, split, accumulated)
    work.layer(recompute)
    backward.end_phase()
    left = backward.alive - sizes.hidden
    gradients, deferred_weight_grads = (0.0, left) if split else (left, 0.0)
    experts = 0.0
    if kind.moe and not split:
        experts = sizes.expert_elements * sizes.element * sizes.waits(True, accumulated)
    closing = work.closing_gradient if split else 0.0
    weights = work.weight_pass(deferred_weight_grads) if split else NOTHING
    forwards, backwards = tuple(forward.phases), tuple(backward.phases)
    return Passes(
        kept, forwards, backwards, gradients, experts, deferred_weight_grads, closing, weights
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one micro-batch on one rank; 1 or 0 for what is asked with a name
    such as `sp`."""

    job: Job
    layouts: LayoutBatch
    work: RankWorkload

    @property
    def element(self) -> int:
        return self.job.element_bytes

    @property
    def short(self) -> int:
        """Are elements shorter than those of fp32, so that arithmetic in fp32 needs copies?"""
        return int(self.element < FP32)

    @cached_property
    def tokens(self) -> Numbers:
        """Tokens on one context-parallel rank."""
        return tokens(self.job, self.layouts)

    @cached_property
    def sp(self) -> Numbers:
        return (self.layouts.sp_degree > 1) * 1.0

    @cached_property
    def ring(self) -> Numbers:
        return (self.layouts.ring > 1) * 1.0

    @cached_property
    def ulysses(self) -> Numbers:
        return (self.layouts.ulysses > 1) * 1.0

    @cached_property
    def held(self) -> Numbers:
        """Tokens between layers."""
        return self.tokens / self.layouts.sp_degree

    @cached_property
    def hidden(self) -> Numbers:
        """Hidden states between layers."""
        return self.element * self.job.config.hidden_size * self.held

    @cached_property
    def wide(self) -> Numbers:
        """Those of all tokens here: gathered, or a product's partial sums."""
        return self.element * self.job.config.hidden_size * self.tokens

    @cached_property
    def query(self) -> Numbers:
        heads = self.job.config.num_heads / self.layouts.tp
        return self.element * self.tokens * heads * self.job.config.head_dim

    @cached_property
    def kv_heads(self) -> Numbers:
        return self.job.config.num_kv_heads / np.minimum(
            self.layouts.tp, self.job.config.num_kv_heads
        )

    @cached_property
    def key(self) -> Numbers:
        """Keys, or values, of all tokens here."""
        return self.element * self.tokens * self.kv_heads * self.job.config.head_dim

    @cached_property
    def spread_key(self) -> Numbers:
        """As attention reads them: repeated where ulysses has more ranks than there are heads."""
        return self.key * np.maximum(1.0, self.layouts.ulysses / self.kv_heads)

    @cached_property
    def log_sums(self) -> Numbers:
        """A number for each query and head."""
        return FP32 * self.query / self.element / self.job.config.head_dim

    @cached_property
    def angles(self) -> Numbers:
        """Cosine and sine in a short float."""
        length = self.job.sequence_length / self.layouts.cp
        return self.short * self.element * length * self.job.config.head_dim

    def fp32(self, size: Numbers) -> Numbers:
        """Of the same elements in fp32."""
        return size * (FP32 / self.element)

    def weight(self, name: str) -> Numbers:
        """Elements of a weight on one rank, by the end of its name."""
        return self._weights[name]

    @cached_property
    def _weights(self) -> dict[str, Numbers]:
        kinds = dict.fromkeys(LayerKind(kind.moe) for kind in self.job.config.layer_kinds)
        return {
            weight.name.removesuffix(".weight").split(".", 1)[-1]: self.work.sizes(weight).local
            for kind in kinds
            for weight in layer_weights(self.job.config, kind)
        }

    def sharded(self, expert: bool) -> Numbers:
        """Does FSDP2 hold such weights?"""
        layouts = self.layouts
        shards = layouts.edp_shard if expert else layouts.dp_shard * layouts.cp
        return ((layouts.zero > 0) & (shards > 1)) * 1.0

    @cached_property
    def joins(self) -> Numbers:
        """Does autograd add to the gradients of earlier micro-batches? It does where FSDP2 leaves
        them whole and in the precision they have."""
        return (self.layouts.zero == 1) * (1.0 - self.short)

    def waits(self, expert: bool, accumulated: bool) -> Numbers:
        """Do gradients of such weights wait until FSDP2's unit is through? Not those that are
        added up one by one, in a buffer or by autograd."""
        return self.sharded(expert) * (1 - self.joins * accumulated)

    # Mixtures

    @property
    def moe(self) -> MoEConfig:
        assert self.job.config.moe is not None
        return self.job.config.moe

    @cached_property
    def routed(self) -> Numbers:
        """Tokens that one rank routes."""
        return self.tokens / self.layouts.tp

    @cached_property
    def copies(self) -> Numbers:
        """Of them, one for each chosen expert."""
        return self.routed * self.moe.experts_per_token

    @cached_property
    def travels(self) -> Numbers:
        """Are the experts on several ranks?"""
        return (self.layouts.ep * self.layouts.etp > 1) * 1.0

    @cached_property
    def crosses(self) -> Numbers:
        return (self.layouts.ep > 1) * 1.0

    @cached_property
    def split(self) -> Numbers:
        """Is each expert on several ranks?"""
        return (self.layouts.etp > 1) * 1.0

    @cached_property
    def arrived(self) -> Numbers:
        """Copies that arrive at the busiest rank."""
        return self.copies * self.job.busiest(self.layouts.ep)

    @cached_property
    def assembled(self) -> Numbers:
        """Copies that its experts work on, with those that arrived at its tp peers."""
        return self.arrived * self.layouts.etp

    @cached_property
    def expert_elements(self) -> Numbers:
        """Of the weights of one layer's experts."""
        names = ("gate_proj", "up_proj", "down_proj")
        return sum(self.weight(f"experts.{name}") for name in names)

    def rows(self, count: Numbers) -> Numbers:
        return self.element * self.job.config.hidden_size * count

    @cached_property
    def expert_width(self) -> Numbers:
        width = self.moe.expert_intermediate_size / self.layouts.etp
        return self.element * width * self.assembled


class _Forward:
    """The forward pass of one layer, from `x` to `out`. The names are those of the program, as far
    as it has any."""

    def __init__(self, sizes: Sizes, kind: LayerKind, tape: Tape) -> None:
        self.s, self.kind, self.t = sizes, kind, tape

    def layer(self, selective: bool) -> None:
        self.t.take(x=self.s.hidden)
        self.compute(selective)

    def compute(self, selective: bool = False, again: bool = False) -> None:
        """`again`: recomputed, which ends with the last tensor that the backward pass needs."""
        s, t = self.s, self.t
        self.norm("norm1", s.hidden, s.held)
        t.save("norm1.out")
        self.attention(selective)
        t.leave("norm1.out")
        t.take(middle=s.hidden)
        t.save("middle")
        self.norm("norm2", s.hidden, s.held)
        t.save("norm2.out")
        if self.kind.moe:
            self.moe(again)
        else:
            self.mlp("mlp", "", again)
        t.leave("attention.y")
        if not again:
            t.take(out=s.hidden)
            t.free("moe.y" if self.kind.moe else "mlp.y")
        t.leave("norm2.out", "middle")

    def norm(self, name: str, size: Numbers, rows: Numbers) -> None:
        s, t = self.s, self.t
        t.take(sum=FP32 * rows, **{f"{name}.scale": FP32 * rows})
        t.take(whole=s.fp32(size) * s.short)
        t.take(**{f"{name}.out": size})
        t.free("whole", "sum")
        t.save(f"{name}.scale")
        t.leave(f"{name}.scale")

    def attention(self, selective: bool) -> None:
        s, t = self.s, self.t
        t.take(gathered=s.wide * s.sp)
        t.take(q=s.query, k=s.key, v=s.key)
        t.free("gathered")
        raw = ["q", "k"]
        if s.job.config.qk_norm:
            t.save("q", "k")
            self.norm("q_norm", s.query, s.log_sums / FP32)
            self.norm("k_norm", s.key, s.log_sums / s.query * s.key / FP32)
            raw += ["q_norm.out", "k_norm.out"]
        t.take(angles=2 * s.angles, rotated_q=s.query, rotated_k=s.key)
        t.save("angles")
        saving, t.saving = t.saving, t.saving and not selective
        self.core()
        t.saving = saving
        if selective:
            t.save("rotated_q", "rotated_k", "v")
        t.save("direct", "flat")
        t.take(partial=s.wide * s.sp, **{"attention.y": s.hidden})
        t.free("partial")
        if t.saving and not selective:  # ulysses keeps what it exchanged instead
            t.cut(rotated_q=s.query * s.ulysses, rotated_k=s.key * s.ulysses, v=s.key * s.ulysses)
        t.leave("angles", "rotated_q", "rotated_k", "v", "direct", "result", "flat", *raw)

    def core(self, again: bool = False) -> None:
        """From rotated queries and keys to what the output projection reads: `direct`, which the
        kernel wrote itself, or `flat`, a copy in the order of the sequence."""
        s, t = self.s, self.t
        # Ulysses: keys repeated, all sorted by rank, then exchanged.
        t.take(repeated=2 * s.spread_key * (s.spread_key > s.key))
        t.take(sorted=s.query * s.ulysses)
        t.take(exchanged=s.query * s.ulysses)
        t.free("sorted")
        t.take(exchanged=s.spread_key * s.ulysses)
        t.pass_by(2 * s.spread_key * s.ulysses)
        t.take(exchanged=s.spread_key * s.ulysses)
        t.free("repeated")
        self.ring()
        t.take(
            direct=s.query * self.is_direct,
            result=s.query * s.ulysses * (1 - s.ring),
            log_sums=s.log_sums + (1 - s.ring) * RANDOM_STATE,
        )
        t.save("rotated_q", "rotated_k", "v", "exchanged", "direct", "result", "log_sums")
        t.take(rounded=s.query * s.short * s.ring * s.ulysses)
        if not again:
            t.take(arrived=s.query * s.ulysses)
            t.take(flat=s.query * (1 - self.is_direct))
            t.free("arrived")
        t.free("rounded")
        t.leave("log_sums", "exchanged", "ring_result")

    @property
    def is_direct(self) -> Numbers:
        """Does the projection read what attention wrote? Not where that is exchanged, or rounded
        after a ring has added it up in fp32."""
        return (1 - self.s.ulysses) * (1 - self.s.ring * self.s.short)

    def ring(self) -> None:
        """Keys and values are here, and on their way; a block's result joins that of the others in
        fp32. The first block takes most, or the second, beside the result."""
        s, t, on = self.s, self.t, self.s.ring
        t.take(kv=2 * s.spread_key * on, travelling=2 * s.spread_key * on)
        t.take(part=s.query * on)
        t.pass_by(2 * s.query * on)  # keys and values for each query head
        t.take(ring_result=s.fp32(s.query) * on * (1 - self.is_direct))
        t.save("ring_result")
        t.pass_by((2 * s.query + s.query / 2) * on)
        t.pass_by(s.fp32(s.query) / 2 * on)
        t.free("kv", "travelling", "part")

    def mlp(self, name: str, prefix: str, again: bool = False) -> None:
        s, t = self.s, self.t
        width = self.width(prefix)
        t.take(gathered=s.wide * s.sp)
        t.take(**{f"{name}.gate": width, f"{name}.up": width})
        t.free("gathered")
        t.take(**{f"{name}.act": width})
        t.save(f"{name}.gate", f"{name}.up", f"{name}.act")
        if again:
            t.pass_by(s.wide)  # an autograd function saves its operands when it is through
        else:
            t.take(partial=s.wide * s.sp, **{f"{name}.y": s.hidden})
            t.free("partial")
        t.leave(f"{name}.gate", f"{name}.up", f"{name}.act")

    def width(self, prefix: str) -> Numbers:
        """The hidden layer of a dense MLP."""
        rows = self.s.weight(f"{prefix}gate_proj") / self.s.job.config.hidden_size
        return self.s.element * self.s.tokens * rows

    def moe(self, again: bool) -> None:
        s, t, moe = self.s, self.t, self.s.moe
        shared = moe.shared_intermediate_size > 0
        if shared:
            self.mlp("shared", "shared_expert.")
            if moe.shared_gate:
                t.take(**{"shared.scale": 2 * s.element * s.held, "shared.scaled": s.hidden})
                t.save("shared.scale", "shared.y")
        self.route()
        t.take(tokens=s.rows(s.copies))
        t.take(trip=INT64 * s.assembled * s.travels)
        t.take(arrived=s.rows(s.arrived) * s.crosses)
        t.pass_by(s.rows(s.assembled) * 2 * s.split)
        t.take(assembled=s.rows(s.assembled) * s.split)
        t.free("arrived")
        t.take(sorted=s.rows(s.assembled) * s.travels)
        t.free("assembled")
        # The experts' input: the tokens' copies themselves where nothing travels.
        if np.any(s.travels):
            t.take(tokens=-s.rows(s.copies) * s.travels)
        t.save("tokens", "sorted")
        t.save("trip", always=True)
        t.end_phase()
        width = s.expert_width
        t.take(**{"experts.gate": width, "experts.up": width})
        t.take(**{"experts.act": width})
        t.save("experts.gate", "experts.up", "experts.act")
        t.take(experts=s.rows(s.assembled))
        t.end_phase(experts=True)
        t.leave("experts.gate", "experts.up", "experts.act")
        t.take(unsorted=s.rows(s.assembled) * s.travels, back=INT64 * s.assembled * s.travels)
        t.save("back")
        t.take(experts=-s.rows(s.assembled) * s.travels)
        t.take(received=s.rows(s.assembled) * s.split)
        t.pass_by(s.fp32(s.rows(s.arrived)) * s.split)
        t.take(unsorted=-s.rows(s.assembled) * s.split)
        t.take(home=s.rows(s.copies) * s.crosses)
        t.take(received=-s.rows(s.assembled) * s.split * s.crosses)
        t.take(unsorted=-s.rows(s.assembled) * (1 - s.split) * s.crosses)
        t.take(chosen=s.rows(s.copies))
        t.save("chosen")
        t.take(weighted=s.rows(s.copies), **{"moe.y": s.hidden})
        t.free("weighted")  # then comes the balance loss, the last that a backward pass needs
        if again:
            t.free("moe.y")
        else:
            t.pass_by(s.wide * (1 - s.sp) * (s.layouts.tp > 1))
        t.leave("tokens", "sorted", "chosen", "back", "route")
        t.free("experts", "unsorted", "received", "home")
        if shared:
            if not again:
                t.pass_by(s.hidden)
            if moe.shared_gate:
                t.leave("shared.scale", "shared.y")
                t.free("shared.scaled")
            else:
                t.leave("shared.y")

    def route(self) -> None:
        """Probabilities, choice and order, which the backward pass needs, as numbers and places."""
        s, t, moe = self.s, self.t, self.s.moe
        scores = FP32 * s.routed * moe.num_experts
        weights = s.element * s.copies if s.short else 0.0
        if moe.norm_topk_prob:
            weights = weights + FP32 * (s.routed + s.copies * (1 - s.short))
        t.take(logits=s.element * s.routed * moe.num_experts)
        t.pass_by(2 * scores * s.short)
        places = 3 * INT64 * s.copies  # of the chosen experts, and of tokens in order and back
        t.take(route=scores + places + FP32 * s.copies + weights)
        t.free("logits")
        t.save("route")


@dataclass(frozen=True)
class _PutOff:
    """Products for the gradients of weights that share an input."""

    weights: list[str]
    gathered: Numbers  # while they are made
    operands: Numbers  # which they let go


class _Backward:
    """The backward pass of one layer: from `gradient` to that of its input, of the same name.

    Where it is `split`, products for the weights are put off, and keep what they multiply."""

    def __init__(
        self, sizes: Sizes, kind: LayerKind, tape: Tape, split: bool, accumulated: bool
    ) -> None:
        self.s, self.kind, self.t = sizes, kind, tape
        self.split, self.accumulated = split, accumulated
        self.deferred_weight_grads: list[_PutOff] = []

    def products(self, weights: list[str], operands: list[str], gathered: Numbers = 0.0) -> None:
        """For the gradients of weights; then what they have multiplied goes. Or they are put off
        with that, and what a product shares with its peers is `gathered` again then."""
        t = self.t
        if self.split:
            self.deferred_weight_grads.append(
                _PutOff(weights, gathered, sum(t.sizes[each] for each in operands))
            )
            t.keep(*operands)
            return
        for weight in weights:
            self.weight(weight)
        t.free(*operands)

    def weight_pass(self, left: Numbers) -> Phase:
        """What was put off, in its order."""
        t = Tape(saving=False)
        self.t = t
        t.take(left=left)
        t.turn()
        for each in self.deferred_weight_grads:
            t.take(gathered=each.gathered)
            for weight in each.weights:
                self.weight(weight)
            t.free("gathered")
            t.cut(left=each.operands)
        t.end_phase()
        return t.phases[0]

    def layer(self, recompute: str) -> None:
        if self.kind.moe:
            self.moe()
        else:
            self.mlp("mlp", "")
        self.norm("norm2", "middle")
        self.t.end_phase()
        self.attention(recompute)
        self.norm("norm1", "x")

    def weight(self, name: str) -> None:
        """Of a weight: a product that is added to a buffer, or that FSDP2 gets."""
        s, t = self.s, self.t
        expert = name.startswith("experts.")
        sharded = s.sharded(expert)
        size = s.element * s.weight(name)
        # Products in fp32 are added without a temporary.
        t.pass_by(size * np.where(sharded > 0, 1.0, s.short))
        waits = size * s.waits(expert, self.accumulated)
        t.take(**{"expert_gradients" if expert else "gradients": waits})

    def closing(self, weight: str, operands: list[str], size: Numbers, result: str) -> None:
        """The product that closes a part."""
        s, t = self.s, self.t
        t.take(gathered=s.wide * s.sp, **{result: size})
        self.products([weight], ["gathered", *operands])

    def opening(self, weights: list[str], gradients: list[str]) -> None:
        """Products that share an input, whose gradient is dh."""
        s, t = self.s, self.t
        gathered = s.wide * s.sp
        t.take(partial=gathered, gathered=gathered * (not self.split), dh=s.hidden)
        self.products(weights, gradients, gathered)
        t.free("partial", "gathered")

    def mlp(self, name: str, prefix: str) -> None:
        t = self.t
        width = _Forward(self.s, self.kind, t).width(prefix)
        self.closing(f"{prefix}down_proj", [f"{name}.act"], width, "dact")
        t.pass_by(2 * width)
        t.take(dgate=width, dup=width)
        t.free("dact", f"{name}.gate", f"{name}.up")
        self.opening([f"{prefix}gate_proj", f"{prefix}up_proj"], ["dgate", "dup"])

    def norm(self, name: str, operand: str) -> None:
        """From dh to a gradient that is added to the one that passed by."""
        s, t = self.s, self.t
        self.products([], [f"{name}.out"])
        self.norm_passes(s.hidden)
        t.free(f"{name}.scale", operand)
        t.pass_by(s.hidden)
        t.free("dh")
        if self.split and (name == "norm1" or self.closes_mlp):
            # The product that closed the part has multiplied the gradient that came in.
            t.take(closing=s.hidden * (1 - s.sp))
            self.products([], ["closing"])

    @property
    def closes_mlp(self) -> bool:
        """Is there a dense product at the end of the layer?"""
        return not self.kind.moe or self.s.moe.shared_intermediate_size > 0

    @property
    def closing_gradient(self) -> Numbers:
        """The gradient that comes in, where a product that is put off holds on to it as it is."""
        scaled = self.kind.moe and self.s.moe.shared_gate
        return self.s.hidden * (1 - self.s.sp) * (self.closes_mlp and not scaled)

    def norm_passes(self, size: Numbers) -> None:
        s, whole = self.s, self.s.fp32(size)
        self.t.pass_by((3 + s.short) * whole)
        self.t.pass_by(3 * whole + s.short * size)

    def attention(self, recompute: str) -> None:
        s, t, config = self.s, self.t, self.s.job.config
        self.closing("o_proj", ["flat", *["direct"] * self.split], s.query, "dflat")
        if self.split:
            t.take(direct=0.0)
        if recompute == "selective":
            t.free("direct")
            _Forward(s, self.kind, t).core(again=True)
        if recompute != "none":  # nothing else holds what was computed again
            t.cut(ring_result=t.sizes["ring_result"] * s.short)
        t.take(sorted=s.query * s.ulysses)
        t.take(dresult=s.query * s.ulysses)
        t.free("sorted")
        t.take(dflat=-s.query * s.ulysses)
        self.kernel()
        t.take(dq=s.query, dk=s.spread_key, dv=s.spread_key)
        t.free("direct", "result", "log_sums", "ring_result", "exchanged")
        t.pass_by(2 * s.query * s.ulysses)
        t.take(dk=s.key - s.spread_key, dv=s.key - s.spread_key)
        t.free("dflat", "dresult", "rotated_q", "rotated_k", "v")
        t.pass_by(s.query)
        t.free("angles")
        if config.qk_norm:
            self.norm_passes(s.key)
            t.free("k", "k_norm.scale")
            self.norm_passes(s.query)
            t.free("q", "q_norm.scale")
        self.opening(["q_proj", "k_proj", "v_proj"], ["dq", "dk", "dv"])

    def kernel(self) -> None:
        """What the kernel takes inside, and a ring's keys, values and gradients under way."""
        s, t = self.s, self.t
        results = s.query + 2 * s.spread_key
        grouped = s.query > 1.5 * s.spread_key  # do several query heads share a key here?
        inside = s.fp32(s.query) + s.log_sums + 2 * s.query * grouped
        t.pass_by((results + inside) * (1 - s.ring))
        # Of a ring: the result in short floats, the query's gradient in fp32; keys and values for
        # each query head, their gradients, the query's, and what the kernel takes inside.
        keys, fp32_keys = 2 * s.spread_key, 2 * s.fp32(s.spread_key)
        whole = s.query * s.short + s.fp32(s.query)
        inside = s.fp32(s.query) + s.log_sums
        t.pass_by((whole + 2 * keys + 5 * s.query + np.maximum(inside, keys)) * s.ring)
        # Later blocks are halves. Gradients of keys are at home, then also in the block before and
        # under way; keys travel on, but to nobody from the last rank.
        inside = np.maximum(inside / 2, keys)
        second = whole + keys + fp32_keys + 5.5 * s.query + inside
        third = whole + keys + 3 * fp32_keys + 5 * s.query + inside
        t.pass_by((second + keys * (s.layouts.ring > 2)) * s.ring)
        t.pass_by((third + keys * (s.layouts.ring > 3)) * (s.layouts.ring > 2))

    def moe(self) -> None:
        s, t, moe = self.s, self.t, self.s.moe
        rows, copies = s.rows(s.assembled), s.rows(s.copies)
        t.pass_by(2 * copies)
        t.take(dchosen=copies)
        t.free("chosen")
        t.take(dhome=copies)
        t.free("dchosen")
        t.take(darrived=s.rows(s.arrived) * s.crosses)
        t.take(dhome=-copies * s.crosses)
        t.pass_by((rows * 2) * s.split)
        t.take(dassembled=rows * s.split)
        t.free("darrived")
        t.take(dexperts=rows * s.travels)
        t.take(dassembled=-rows * s.split)
        t.take(dhome=-copies * (1 - s.crosses) * s.travels)
        t.end_phase()
        width = s.expert_width
        t.take(dact=width)
        self.products(["experts.down_proj"], ["dhome", "dexperts", "experts.act"])
        t.free("dassembled", "back")
        t.pass_by(2 * width)
        t.take(dgate=width, dup=width)
        t.free("dact", "experts.gate", "experts.up")
        t.pass_by(2 * rows)
        t.take(drows=rows)
        operands = ["dgate", "dup", "tokens", "sorted"]
        self.products(["experts.gate_proj", "experts.up_proj"], operands)
        t.end_phase(*([] if self.split else ["expert_gradients"]), experts=True)
        # Another tensor of the same size takes the place of the rows' gradient, once or twice.
        t.pass_by(rows * s.travels)
        t.pass_by((rows + s.fp32(s.rows(s.arrived))) * s.split)
        # It stays while it travels home, and the shared expert works beside it.
        t.take(dtokens=copies * s.crosses)
        t.free("trip")
        if moe.shared_intermediate_size:
            self.shared_expert()
        # The gradient of the rows is the one that has come home, if it has left.
        t.take(drows=-rows * s.crosses)
        own = s.rows(s.routed)
        t.take(dh=s.hidden)
        t.free("drows", "dtokens", "route")
        if self.split:  # the router's product, and the tokens where they are a part of norm2.out
            t.take(router=s.element * s.routed * moe.num_experts)
            self.products([], ["router"])
        t.pass_by(2 * own)  # the router's and the sum
        if moe.shared_intermediate_size:
            t.pass_by(s.hidden)
            t.take(dh=-s.hidden)

    def shared_expert(self) -> None:
        s, t = self.s, self.t
        scaled = s.hidden * s.moe.shared_gate
        t.pass_by(2 * scaled)
        t.take(dscale=scaled)
        if s.moe.shared_gate:
            t.free("shared.scale", "shared.y")
        self.mlp("shared", "shared_expert.")
        t.pass_by(scaled)
        t.free("dscale")
