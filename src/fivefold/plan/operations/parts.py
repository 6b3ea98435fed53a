"""Operations that several parts of a layer consist of: norms, linear layers, the gated MLP."""

from __future__ import annotations

from dataclasses import replace

from fivefold.parallel.workload import FP32
from fivefold.plan.operations.operation import Bytes, Operation
from fivefold.plan.operations.sizes import Sizes
from fivefold.plan.time import operations as compute
from fivefold.plan.time.operations import Matmul


def norm(s: Sizes, name: str, reads: str, size: Bytes, rows: Bytes) -> Operation:
    """RMSNorm of `rows` rows, in fp32."""
    whole, short = s.fp32(size), s.structure.short
    scale = f"{name}.scale"
    return Operation(
        name,
        "norm",
        (reads,),
        {f"{name}.out": size},
        {scale: FP32 * rows},
        saved=(reads, scale),
        workspace=whole * short + FP32 * rows,
        backward_peaks=((3 + short) * whole, 3 * whole + short * size),
    )


def linears(
    s: Sizes,
    name: str,
    reads: str,
    makes: dict[str, Bytes],
    weights: tuple[str, ...],
    products: tuple[Matmul, ...],
) -> Operation:
    """Linear layers that share their input, which megatron sequence parallelism gathers."""
    return Operation(
        name,
        "matmul",
        (reads,),
        makes,
        saved=(reads,),
        workspace=s.gathered,
        backward_workspace=s.gathered,  # the partial sums of the input's gradient
        weights=weights,
        gathered=s.gathered,
        products=products,
    )


def row_parallel(
    s: Sizes,
    name: str,
    reads: str,
    size: Bytes,
    weight: str,
    product: Matmul,
    holds: tuple[str, ...],
) -> list[Operation]:
    """The row-parallel linear layer of a part, and the sum over the tp ranks: an all-reduce in
    place, or with sp a reduce-scatter."""
    linear = Operation(
        weight, "matmul", (reads,), {f"{name}.y": s.wide}, saved=(reads,), weights=(weight,)
    )
    linear = replace(linear, products=(product,), holds=holds)
    if not s.structure.sp:
        return [linear]
    reduce = Operation(
        f"{name}.reduce", "collective", (f"{name}.partial",), {f"{name}.y": s.hidden}, holds=holds
    )
    return [replace(linear, makes={f"{name}.partial": s.wide}, holds=()), reduce]


def activation(name: str, gate: str, up: str, size: Bytes) -> Operation:
    """silu(gate) * up, which keeps its inputs."""
    saved = (gate, up)
    return Operation(
        name, "elementwise", saved, {name: size}, saved=saved, backward_peaks=(2 * size,)
    )


def mlp(s: Sizes, name: str, prefix: str, reads: str) -> list[Operation]:
    """The gated MLP; `prefix` begins the names of its weights."""
    config = s.job.config
    rows = s.weight(f"{prefix}gate_proj") / config.hidden_size
    width = s.element * s.tokens * rows
    size = s.moe.shared_intermediate_size if prefix else config.intermediate_size
    opening, closing = compute.mlp_products(name, config, s.tokens, size, s.layouts.tp)
    gate, up, act = f"{name}.gate", f"{name}.up", f"{name}.act"
    return [
        linears(
            s,
            f"{name}.in",
            reads,
            {gate: width, up: width},
            (f"{prefix}gate_proj", f"{prefix}up_proj"),
            (opening,),
        ),
        activation(act, gate, up, width),
        *row_parallel(s, name, act, width, f"{prefix}down_proj", closing, (gate, up, act)),
    ]
