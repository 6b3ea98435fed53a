"""The operations of a mixture of experts (`model.moe`) and of expert parallelism
(`parallel.expert.run`), in the order of the program: the shared expert runs while rows travel."""

from __future__ import annotations

from dataclasses import replace

from fivefold.parallel.workload import FP32
from fivefold.plan.operations.operation import Bytes, Operation
from fivefold.plan.operations.parts import activation, mlp
from fivefold.plan.operations.sizes import INT64, Sizes
from fivefold.plan.time import operations as compute
from fivefold.plan.time.operations import Matmul


def mixture(s: Sizes) -> list[Operation]:
    """From the second norm's output to what is added to the layer's input."""
    router, first, second = compute.expert_products(s.job, s.layouts, s.tokens)
    shared = _shared(s) if s.moe.shared_intermediate_size else []
    operations = [
        *_route(s, router),
        *_dispatch(s),
        *shared,
        *_arrive(s),
        *_experts(s, first, second),
        *_combine(s),
    ]
    if shared:
        whole = "moe.whole_y" if s.structure.routes_slices else "moe.y"
        reads = (whole, next(iter(shared[-1].makes)))
        total = {"moe.sum": s.hidden}
        operations.append(Operation("moe.sum", "elementwise", reads, total, passes=reads))
    # `MoE.forward` has these until it returns.
    unpermute = next(each for each in operations if each.name == "unpermute")
    held = {"route", "chosen", *unpermute.reads, *(shared[-1].reads if shared else ())}
    last = operations[-1]
    operations[-1] = replace(last, holds=(*last.holds, *sorted(held)))
    return operations


def _route(s: Sizes, router: Matmul) -> list[Operation]:
    """The router, and what its backward pass reads: probabilities, weights and indices."""
    scores = FP32 * s.routed * s.moe.num_experts
    weights: Bytes = s.element * s.copies if s.structure.short else 0.0
    if s.moe.norm_topk_prob:
        weights = weights + FP32 * (s.routed + s.copies * (not s.structure.short))
    indices = 3 * INT64 * s.copies  # chosen experts; token order by expert, and its inverse
    logits = s.element * s.routed * s.moe.num_experts
    # Without megatron sequence parallelism each tp rank routes a slice, a view.
    slice_ = Operation("slice", "collective", ("norm2.out",), {"tokens": 0.0})
    return [
        slice_ if s.structure.routes_slices else replace(slice_, passes=("norm2.out",)),
        Operation(
            "router",
            "matmul",
            ("tokens",),
            {"logits": logits},
            saved=("norm2.out",),
            gradients={"tokens": s.rows(s.routed)},
            weights=("gate",),
            products=(router,),
        ),
        Operation(
            "route",
            "elementwise",
            ("logits",),
            keeps={"route": scores + indices + FP32 * s.copies + weights},
            saved=("route",),
            peaks=(2 * scores * s.structure.short,),
        ),
    ]


def _dispatch(s: Sizes) -> list[Operation]:
    """Permutes the tokens' copies by expert and begins to send them."""
    made = {"rows": s.rows(s.copies)}
    own = {"tokens": s.rows(s.routed)}
    rows = Operation("rows", "copy", ("tokens",), made, gradients=own, holds=("norm2.out",))
    if not s.structure.dispatches:
        return [rows]
    # The state of the dispatch has the order of the rows that will have arrived.
    order = {"order": INT64 * s.assembled}
    makes: dict[str, Bytes] = {"arrived": 0.0}
    if s.structure.ep:
        makes = {"travelling": s.rows(s.arrived), "ticket": 0.0}
    start = Operation(
        "dispatch",
        "collective",
        ("rows",),
        makes,
        order,
        saved=("order",),
        lasting=("order",),
        passes=("rows",),
    )
    return [rows, start]


def _arrive(s: Sizes) -> list[Operation]:
    """Waits for the rows, gathers them over etp and sorts them by expert. The rows that were sent
    and received are held until then."""
    if not s.structure.dispatches:
        return []
    operations, source = [], "arrived"
    rows, arrived = s.rows(s.assembled), s.rows(s.arrived)
    if s.structure.ep:
        # Backward, this sends the gradients, and the dispatch waits for them.
        wait = Operation("wait", "collective", ("travelling", "ticket"), {"arrived": 0.0})
        leaving = {"travelling": s.rows(s.copies)}
        operations.append(replace(wait, passes=("ticket",), gradients=leaving))
    if s.structure.etp:
        gather = Operation("gather_rows", "collective", ("arrived",), {"assembled": rows})
        # The gradients of all peers arrive, and are added up in place of the first.
        sums = (rows + s.fp32(arrived),)
        source, arriving = "assembled", {"arrived": rows}
        operations.append(
            replace(gather, peaks=(2 * rows,), backward_peaks=sums, gradients=arriving)
        )
    holds = ("rows", *(("travelling",) if s.structure.ep else ()))
    arriving = {"arrived": arrived} if source == "arrived" else {}
    sort = Operation("sort", "copy", (source,), {"sorted": rows}, holds=holds, gradients=arriving)
    return [*operations, sort]


def _experts(s: Sizes, first: Matmul, second: Matmul) -> list[Operation]:
    rows, width = s.rows(s.assembled), s.expert_width
    source = "sorted" if s.structure.dispatches else "rows"
    gate, up, act = "experts.gate", "experts.up", "experts.act"
    return [
        Operation(
            "experts.in",
            "grouped",
            (source,),
            {gate: width, up: width},
            saved=(source,),
            backward_peaks=(2 * rows,),
            weights=("experts.gate_proj", "experts.up_proj"),
            products=(first,),
        ),
        activation(act, gate, up, width),
        Operation(
            "experts.out",
            "grouped",
            (act,),
            {"experts.y": rows},
            saved=(act,),
            holds=(gate, up, source),
            weights=("experts.down_proj",),
            products=(second,),
        ),
    ]


def _combine(s: Sizes) -> list[Operation]:
    """Restores the order of arrival, sends rows back to their tokens' ranks and weights them."""
    operations, source = [], "experts.y"
    rows, arrived, copies = s.rows(s.assembled), s.rows(s.arrived), s.rows(s.copies)
    if s.structure.dispatches:
        back = {"back": INT64 * s.assembled}
        unsort = Operation("unsort", "copy", (source,), {"unsorted": rows}, back, saved=("back",))
        operations.append(unsort)
        source = "unsorted"
    if s.structure.etp:
        # As many rows as there are arrive from all peers, and are added up in place of the first.
        peaks, own = (rows + s.fp32(arrived),), {source: rows}
        scatter = Operation("sum_rows", "collective", (source,), {"summed": rows}, peaks=peaks)
        operations.append(replace(scatter, backward_peaks=(2 * rows,), gradients=own))
        source = "summed"
    if s.structure.ep:
        sizes = {"summed": arrived} if source == "summed" else {}
        home = Operation("home", "collective", (source,), {"home": copies}, gradients=sizes)
        operations.append(home)
        source = "home"
    if s.structure.dispatches:
        operations[-1] = replace(operations[-1], holds=("sorted",))
    sizes = {source: copies}
    operations += [
        Operation("unpermute", "copy", (source,), {"chosen": copies}, gradients=sizes),
        Operation(
            "weigh",
            "elementwise",
            ("chosen",),
            {"moe.y": s.rows(s.routed)},
            saved=("chosen",),
            workspace=copies,
            backward_peaks=(2 * copies,),
        ),
        Operation("balance", "elementwise", keeps={"counts": 0.0}, saved=("route", "counts")),
    ]
    if s.structure.routes_slices:
        gather = Operation("gather_tokens", "collective", ("moe.y",), {"moe.whole_y": s.wide})
        # A slice of the gradient is a view of it.
        operations.append(replace(gather, passes=("moe.y",)))
    return operations


def _shared(s: Sizes) -> list[Operation]:
    """The shared expert, and the gate that scales it."""
    operations = mlp(s, "shared", "shared_expert.", "norm2.out")
    if not s.moe.shared_gate:
        return operations
    logit = {"shared.logit": s.element * s.held}
    linear = Operation("shared.gate", "matmul", ("norm2.out",), logit)
    product = Matmul("shared_gate", s.held, 1, s.job.config.hidden_size, split=False)
    scale = {"shared.scale": s.element * s.held}
    scaled = Operation("shared.scaled", "elementwise", ("shared.y", "shared.logit"), keeps=scale)
    return [
        *operations,
        replace(linear, saved=("norm2.out",), weights=("shared_expert_gate",), products=(product,)),
        replace(
            scaled,
            makes={"shared.scaled": s.hidden},
            saved=("shared.y", "shared.scale"),
            backward_peaks=(2 * s.hidden,),
        ),
    ]
