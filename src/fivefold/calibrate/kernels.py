"""One process: the operations of our program, one by one, as it calls them.

In a layer an operation finds its operands where others have left them, and not in the nearest
cache, where its own last call would leave them. So each has several copies of its operands, which
take turns, and its results are kept as long; and a backward pass goes through the oldest of several
forward passes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.calibrate.clock import Clock
from fivefold.calibrate.grid import Grid, Shape
from fivefold.calibrate.points import Point, Sizes
from fivefold.model.layers import Embedding, RMSNorm, causal_attention, gated, rotate
from fivefold.model.linear import add_product, product
from fivefold.model.loss import cross_entropy, no_join
from fivefold.model.moe import grouped_product, grouped_weight_gradient
from fivefold.parallel.context.flash import block_attention, block_attention_backward
from fivefold.parallel.data.run import LocalParameter
from fivefold.train.optimizer import AdamW
from fivefold.train.runfile import Optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
APART_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""What the copies of operands take together: more than the cache of a core (of a GPU)."""
MOST_COPIES = 64
ROTATED_HEAD = 64
VOCABULARY = 1024
FP8_CAPABILITY = (8, 9)
"""The first of NVIDIA's GPUs that multiply in 8 bits (Ada; CUDA programming guide)."""

Pass = tuple[Callable[[], Tensor], list[Tensor]]
"""A forward pass, and the inputs whose gradients the backward pass makes."""


class Kernels:
    """Measures the operations of a grid on one device."""

    def __init__(self, grid: Grid, clock: Clock) -> None:
        self.grid, self.clock, self.device = grid, clock, clock.device
        self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.dtype = DTYPES[self.precision]

    def _copies(self, elements: int) -> range:
        """How many copies of operands with so many elements in all."""
        apart = APART_BYTES[self.device.type] // (elements * self.dtype.itemsize)
        return range(max(1, min(MOST_COPIES, apart)))

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def _input(self, *shape: int) -> Tensor:
        return self._random(*shape).requires_grad_()

    def _one(
        self,
        what: str,
        sizes: Sizes,
        calls: Sequence[Callable[[], object]],
        precision: str | None = None,
    ) -> Point:
        """A point of calls that take turns."""
        turns = itertools.cycle(calls)
        kept = deque(maxlen=len(calls))
        timed = self.clock.one(lambda: kept.append(next(turns)()))
        return Point(what, sizes, timed.wall_s, timed.cpu_s, precision or self.precision)

    def _two(self, what: str, sizes: Sizes, passes: Sequence[Pass]) -> Iterator[Point]:
        """The points of forward and backward passes that take turns."""
        turns = itertools.cycle(passes)
        made: deque[Tensor] = deque()

        def forward() -> None:
            call, inputs = next(turns)
            for x in inputs:
                x.grad = None
            made.append(call())

        def backward() -> None:
            made.popleft().backward(grad)

        forward()
        grad = torch.ones_like(made[0])
        backward()
        for _ in passes[1:]:
            forward()
        timed = self.clock.two(forward, backward)
        for part, s in zip(("forward", "backward"), timed, strict=True):
            yield Point(what, {"part": part, **sizes}, s.wall_s, s.cpu_s, self.precision)

    # Products

    def products(self) -> Iterator[Point]:
        """The three products of a linear layer: y = x w^T, dx = dy w, dw += dy^T x."""
        for shape in self.grid.products:
            yield from self._products(shape, self.precision)
        on_gpu = self.device.type == "cuda"
        for shape in self.grid.short_products:
            yield from self._products(shape, "fp32" if on_gpu else "bf16")
        if on_gpu and torch.cuda.get_device_capability() >= FP8_CAPABILITY:
            for shape in self.grid.short_products:
                yield self._product_in_8_bits(shape)

    def _products(self, shape: Shape, precision: str) -> Iterator[Point]:
        m, n, k = shape
        random = partial(self._random, dtype=DTYPES[precision])
        sums = partial(torch.zeros, n, k, device=self.device)
        operands = [
            (random(m, k), random(n, k), random(m, n), sums())
            for _ in self._copies(m * k + n * k + m * n)
        ]
        parts = {
            "forward": lambda rows, weight, grad, total: product(rows, weight.t()),
            "input": lambda rows, weight, grad, total: product(grad, weight),
            "weight": lambda rows, weight, grad, total: add_product(total, grad.t(), rows),
        }
        for part, call in parts.items():
            calls = [partial(call, *each) for each in operands]
            yield self._one("product", {"part": part, "m": m, "n": n, "k": k}, calls, precision)

    def _product_in_8_bits(self, shape: Shape) -> Point:
        m, n, k = shape
        a, b = (self._random(*s).to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
        one = torch.ones((), device=self.device)

        def call() -> Tensor:
            return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )

        return self._one("product", {"part": "forward", "m": m, "n": n, "k": k}, [call], "fp8")

    def grouped(self) -> Iterator[Point]:
        """The same of experts: `groups` products of `m` rows each."""
        for groups, m, n, k in self.grid.grouped:
            counts = [m] * groups
            operands = []
            for _ in self._copies(groups * (m * k + n * k + m * n)):
                weight = nn.Parameter(self._random(groups, n, k))
                weight.main_grad = torch.zeros(groups, n, k, device=self.device)  # pyright: ignore
                rows, grad = self._random(groups * m, k), self._random(groups * m, n)
                operands.append((rows, weight.detach(), grad, weight))
            parts = {
                "forward": lambda x, w, g, p, c=counts: grouped_product(x, w.transpose(1, 2), c),
                "input": lambda x, w, g, p, c=counts: grouped_product(g, w, c),
                "weight": lambda x, w, g, p, c=counts: grouped_weight_gradient(p, g, x, w.shape, c),
            }
            for part, call in parts.items():
                sizes = {"part": part, "groups": groups, "m": m, "n": n, "k": k}
                yield self._one("grouped", sizes, [partial(call, *each) for each in operands])

    # Attention

    def attention(self) -> Iterator[Point]:
        """Causal attention of whole sequences, and of one block of a ring."""
        for batch, heads, kv_heads, head_dim, sequence in self.grid.attention:
            sizes: Sizes = {
                "batch": batch,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "sequence": sequence,
            }
            wide, narrow = (sequence, batch, heads, head_dim), (sequence, batch, kv_heads, head_dim)
            operands = [
                [self._input(*wide), self._input(*narrow), self._input(*narrow)]
                for _ in self._copies(2 * sequence * batch * (heads + kv_heads) * head_dim)
            ]
            passes = [(partial(causal_attention, *qkv, None), qkv) for qkv in operands]
            yield from self._two("attention", sizes, passes)
            yield from self._blocks(sizes, operands)

    def _blocks(self, sizes: Sizes, operands: list[list[Tensor]]) -> Iterator[Point]:
        """What a ring does with a block before its own: every score counts."""
        forwards, backwards = [], []
        for qkv in operands:
            q, k, v = (x.detach().permute(1, 2, 0, 3).contiguous() for x in qkv)
            out, lse = block_attention(q, k, v, False, None)
            grad = torch.ones_like(out)
            forwards.append(partial(block_attention, q, k, v, False, None))
            backwards.append(
                partial(block_attention_backward, grad, q, k, v, out, lse, False, None)
            )
        for part, calls in (("forward", forwards), ("backward", backwards)):
            yield self._one("attention_block", {"part": part, **sizes}, calls)

    # Light operations

    def light(self) -> Iterator[Point]:
        """Norms, rotation, activation, residual sum and lookup, by rows and width."""
        for rows, width in self.grid.light:
            operands = [
                (self._input(rows, 1, width), self._input(rows, 1, width))
                for _ in self._copies(4 * rows * width)
            ]
            passes: dict[str, list[Pass]] = {
                "rms_norm": self._norms(operands, width),
                "rotate": self._rotations(operands, rows),
                "gated": [(partial(gated, x, y), [x, y]) for x, y in operands],
                "residual": [(partial(torch.add, x, y), [x, y]) for x, y in operands],
                "embedding": self._lookups(operands, rows, width),
            }
            for op, each in passes.items():
                yield from self._two("light", {"op": op, "rows": rows, "width": width}, each)
        yield from self._losses()

    def _norms(self, operands: list[tuple[Tensor, Tensor]], width: int) -> list[Pass]:
        norm = RMSNorm(width, 1e-5).to(self.device)
        _with_main_grad(norm.weight, self._random(width, dtype=torch.float32))
        return [(partial(norm, x), [x]) for x, _ in operands]

    def _rotations(self, operands: list[tuple[Tensor, Tensor]], rows: int) -> list[Pass]:
        angles = self._random(rows, 1, 1, ROTATED_HEAD // 2, dtype=torch.float32)
        heads = [x.detach().unflatten(-1, (-1, ROTATED_HEAD)).requires_grad_() for x, _ in operands]
        return [(partial(rotate, x, (angles, angles)), [x]) for x in heads]

    def _lookups(self, operands: list[tuple[Tensor, Tensor]], rows: int, width: int) -> list[Pass]:
        table = Embedding(VOCABULARY, width, self.dtype).to(self.device)
        _with_main_grad(table.weight, self._random(VOCABULARY, width, dtype=torch.float32))
        ids = [torch.randint(VOCABULARY, (rows, 1), device=self.device) for _ in operands]
        return [(partial(table, each), []) for each in ids]

    def _losses(self) -> Iterator[Point]:
        for rows, vocabulary in self.grid.losses:
            labels = torch.randint(vocabulary, (rows,), device=self.device)
            logits = [self._input(rows, vocabulary) for _ in self._copies(rows * vocabulary)]
            passes = [(partial(cross_entropy, z, labels, 0, no_join), [z]) for z in logits]
            sizes: Sizes = {"op": "cross_entropy", "rows": rows, "width": vocabulary}
            yield from self._two("light", sizes, passes)

    # What is not of a layer

    def memory(self) -> Iterator[Point]:
        """Copies and sums into memory that is there, and copies into new memory, of one array again
        and again. `bytes` are those of one array: a copy reads and writes as many, a sum reads
        twice as many."""
        for size in self.grid.memory_bytes:
            a, b, c = (torch.ones(size // 4, device=self.device) for _ in range(3))
            calls = {
                "copy": partial(c.copy_, a),
                "add": partial(torch.add, a, b, out=c),
                "clone": a.clone,
            }
            for op, call in calls.items():
                yield self._one("memory", {"op": op, "bytes": size}, [call], "fp32")

    def host(self) -> Iterator[Point]:
        """What a call costs beside its work: an operation on one number, and a node of autograd."""
        x = torch.ones(1, device=self.device)
        yield self._one("host", {"part": "forward", "op": "operation"}, [partial(x.add_, 0.0)])
        y = torch.ones(1, device=self.device, requires_grad=True)
        yield from self._two("host", {"op": "node"}, [(partial(_Nothing.apply, y), [y])])

    def optimizer(self) -> Iterator[Point]:
        """The norm of the gradients, and the update with AdamW."""
        for tensors, elements in self.grid.optimizer:
            layers = {f"w{i}": nn.Linear(elements, 1, bias=False) for i in range(tensors)}
            stage = nn.ModuleDict(layers).to(self.device)
            parameters = [
                LocalParameter(name, p, p.detach(), torch.full_like(p, 1e-3), 1)
                for name, p in stage.named_parameters()
            ]
            gradients = [x.grad for x in parameters]
            norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
            calls = {
                "norm": partial(norm, gradients, 2, dtype=torch.float64),
                "update": partial(
                    AdamW([stage], Optimizer(lr=1e-4)).step, parameters, lr=1e-4, grad_scale=1.0
                ),
            }
            for op, call in calls.items():
                sizes: Sizes = {"op": op, "tensors": tensors, "elements": elements}
                yield self._one("optimizer", sizes, [call], "fp32")


class _Nothing(torch.autograd.Function):
    """A node that does nothing, so that what it takes is what nodes take."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def _with_main_grad(p: nn.Parameter, value: Tensor) -> None:
    """A parameter as the data-parallel split leaves it (see fivefold.model.parameters)."""
    p.data = value
    p.main_grad = torch.zeros_like(value)  # pyright: ignore[reportAttributeAccessIssue]
    p.main_value = value  # pyright: ignore[reportAttributeAccessIssue]
