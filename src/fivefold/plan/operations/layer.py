"""The operations of a dense layer in the order of the model (`model.layers`, `model.transformer`)
and of what tensor and context parallelism add (`parallel.tensor.run`, `parallel.context.run`)."""

from __future__ import annotations

from dataclasses import replace

from fivefold.model.config import LayerKind
from fivefold.plan.operations import ring
from fivefold.plan.operations.mixture import mixture
from fivefold.plan.operations.operation import INPUT, Bytes, Operation
from fivefold.plan.operations.parts import linears, mlp, norm, row_parallel
from fivefold.plan.operations.sizes import Sizes
from fivefold.plan.time import operations as compute

RANDOM_STATE = 24
"""The seed and offset of the flash kernel, which keeps them though nothing is dropped."""


def layer_operations(s: Sizes, kind: LayerKind) -> tuple[list[Operation], range]:
    """The forward pass of one layer, from `x` to `out`; and which of its operations selective
    recomputation runs again: the attention between its projections."""
    before, core, after = _attention(s, kind)
    part = mixture(s) if kind.moe else mlp(s, "mlp", "", "norm2.out")
    name = next(name for each in reversed(part) for name in each.makes)
    # Variables of `Layer._compute`: the attention's output until the MLP's replaces it.
    part[-1] = replace(part[-1], holds=(*part[-1].holds, "attention.y"))
    rest = [
        *after,
        _sum("middle", (INPUT, "attention.y"), s.hidden),
        norm(s, "norm2", "middle", s.hidden, s.held),
        *part,
        _sum("out", ("middle", name), s.hidden, holds=("norm2.out",)),
    ]
    return [*before, *core, *rest], range(len(before), len(before) + len(core))


def _sum(name: str, reads: tuple[str, ...], size: Bytes, holds: tuple[str, ...] = ()) -> Operation:
    """A residual sum."""
    return Operation(name, "elementwise", reads, {name: size}, passes=reads, holds=holds)


def _attention(
    s: Sizes, kind: LayerKind
) -> tuple[list[Operation], list[Operation], list[Operation]]:
    """The norm and the opening projections, the attention between them, the closing one."""
    config = s.job.config
    *opening, closing = compute.attention_products(config, s.layouts, s.tokens)
    sizes = {"q": s.query, "k": s.key, "v": s.key}
    weights = ("q_proj", "k_proj", "v_proj")
    before = [
        norm(s, "norm1", INPUT, s.hidden, s.held),
        linears(s, "qkv", "norm1.out", sizes, weights, tuple(opening)),
    ]
    query, key = "q", "k"
    if config.qk_norm:
        rows = s.tokens * s.heads, s.tokens * s.kv_heads
        before.append(norm(s, "q_norm", "q", s.query, rows[0]))
        before.append(norm(s, "k_norm", "k", s.key, rows[1]))
        query, key = "q_norm.out", "k_norm.out"
    before += [_rotate(s, "rotated_q", query, s.query), _rotate(s, "rotated_k", key, s.key)]
    core = _core(s, kind)
    output = next(iter(core[-1].makes))
    # `Attention.forward` has these until it returns.
    holds = (*dict.fromkeys(("q", "k", "v", query, key, core_output(s), "norm1.out")),)
    after = row_parallel(s, "attention", output, s.query, "o_proj", closing, holds)
    return before, core, after


def core_output(s: Sizes) -> str:
    """The tensor that the attention between the projections ends with."""
    return "flat" if s.structure.ulysses else "result"


def _rotate(s: Sizes, name: str, reads: str, size: Bytes) -> Operation:
    angles = f"{name}.angles"
    return Operation(
        name, "elementwise", (reads,), {name: size}, {angles: s.angles}, saved=(angles,)
    )


def _core(s: Sizes, kind: LayerKind) -> list[Operation]:
    """From rotated queries and keys to what the output projection reads: attention of whole
    sequences inside ulysses' exchanges, or a ring."""
    inputs = ("rotated_q", "rotated_k", "v")
    inner = ("exchanged_q", "exchanged_k", "exchanged_v") if s.structure.ulysses else inputs
    attention = compute.attention(s.job, s.layouts, kind, s.tokens)
    if s.structure.ring > 1:
        kernel = ring.operation(s, inner, attention)
    else:
        results = s.query + 2 * s.spread_key
        inside = s.fp32(s.query) + s.log_sums + 2 * s.query * s.structure.grouped
        kernel = Operation(
            "flash",
            "attention",
            inner,
            {"result": s.query},
            {"log_sums": s.log_sums + RANDOM_STATE},
            saved=(*inner, "result", "log_sums"),
            backward_peaks=(results + inside,),
            attention=attention,
        )
    if not s.structure.ulysses:
        return [replace(kernel, holds=(*kernel.holds, *inputs))]
    back = Operation(
        "heads_to_sequence",
        "collective",
        ("result",),
        {"flat": s.query},
        holds=inputs,
        workspace=s.query,
        backward_workspace=s.query,
    )
    return [*_exchanges(s), replace(kernel, holds=(*kernel.holds, *inner)), back]


def _exchanges(s: Sizes) -> list[Operation]:
    """Ulysses: kv heads repeated where there are too few, all sorted by rank, then exchanged."""
    operations = []
    key, value = "rotated_k", "v"
    if s.structure.repeated:
        for name in (key, value):
            made = {f"repeated_{name}": s.spread_key}
            operations.append(Operation(f"repeat_{name}", "copy", (name,), made))
        key, value = f"repeated_{key}", f"repeated_{value}"
    sources = ("rotated_q", "q", s.query), (key, "k", s.spread_key), (value, "v", s.spread_key)
    for source, name, size in sources:
        operations.append(
            Operation(
                f"sequence_to_heads_{name}",
                "collective",
                (source,),
                {f"exchanged_{name}": size},
                workspace=size,
                backward_workspace=size,
                holds=(key, value) if name == "v" else (),
            )
        )
    return operations
