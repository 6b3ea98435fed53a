"""One process: the operations of our program, one by one, as it calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fivefold.calibrate.clock import Clock
from fivefold.calibrate.grid import Grid
from fivefold.calibrate.points import Point, Sizes
from fivefold.model.layers import Embedding, RMSNorm, causal_attention, gated, rotate
from fivefold.model.linear import add_product, product
from fivefold.model.loss import cross_entropy, no_join
from fivefold.model.moe import grouped_product, grouped_weight_gradient
from fivefold.parallel.data.run import LocalParameter
from fivefold.parallel.sequence.flash import block_attention, block_attention_backward
from fivefold.train.optimizer import AdamW
from fivefold.train.runfile import Optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROTATED_HEAD = 64
VOCABULARY = 1024
FP8_CAPABILITY = (8, 9)
"""The first of NVIDIA's GPUs that multiply in 8 bits (Ada; CUDA programming guide)."""


class Kernels:
    """Measures the operations of a grid on one device."""

    def __init__(self, grid: Grid, clock: Clock) -> None:
        self.grid, self.clock, self.device = grid, clock, clock.device
        self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.dtype = DTYPES[self.precision]

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def _one(
        self, what: str, call: Callable[[], object], sizes: Sizes, precision: str | None = None
    ) -> Point:
        timed = self.clock.one(call)
        return Point(what, sizes, timed.wall_s, timed.cpu_s, precision or self.precision)

    def _two(
        self, what: str, forward: Callable[[], Tensor], inputs: list[Tensor], sizes: Sizes
    ) -> Iterator[Point]:
        """A forward pass and the backward pass to `inputs`."""
        made: list[Tensor] = []
        grads: list[Tensor] = []

        def run_forward() -> None:
            made[:] = [forward()]

        def run_backward() -> None:
            if not grads:
                grads.append(torch.ones_like(made[0]))
            for x in inputs:
                x.grad = None
            made[0].backward(grads[0])

        timed = self.clock.two(run_forward, run_backward)
        for part, s in zip(("forward", "backward"), timed, strict=True):
            yield Point(what, {"part": part, **sizes}, s.wall_s, s.cpu_s, self.precision)

    # Products

    def products(self) -> Iterator[Point]:
        """The three products of a linear layer: y = x w^T, dx = dy w, dw += dy^T x."""
        for shape in self.grid.products:
            yield from self._products(shape, self.precision)
        others = ("fp32",) if self.device.type == "cuda" else ("bf16",)
        for precision in others:
            for shape in self.grid.short_products:
                yield from self._products(shape, precision)
        if self.device.type == "cuda" and torch.cuda.get_device_capability() >= FP8_CAPABILITY:
            for shape in self.grid.short_products:
                yield self._product_in_8_bits(shape)

    def _products(self, shape: tuple[int, int, int], precision: str) -> Iterator[Point]:
        m, n, k = shape
        dtype = DTYPES[precision]
        rows, weight, grad = (self._random(*s, dtype=dtype) for s in ((m, k), (n, k), (m, n)))
        main_grad = torch.zeros(n, k, device=self.device)
        calls = {
            "forward": lambda: product(rows, weight.t()),
            "input": lambda: product(grad, weight),
            "weight": lambda: add_product(main_grad, grad.t(), rows),
        }
        for part, call in calls.items():
            yield self._one("product", call, {"part": part, "m": m, "n": n, "k": k}, precision)

    def _product_in_8_bits(self, shape: tuple[int, int, int]) -> Point:
        m, n, k = shape
        a, b = (self._random(*s).to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
        one = torch.ones((), device=self.device)

        def call() -> Tensor:
            return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )

        return self._one("product", call, {"part": "forward", "m": m, "n": n, "k": k}, "fp8")

    def grouped(self) -> Iterator[Point]:
        """The same of experts: `groups` products of `m` rows each."""
        for groups, m, n, k in self.grid.grouped:
            rows, grad = self._random(groups * m, k), self._random(groups * m, n)
            weight = nn.Parameter(self._random(groups, n, k))
            weight.main_grad = torch.zeros(groups, n, k, device=self.device)  # pyright: ignore
            values, counts = weight.detach(), [m] * groups
            calls = {
                "forward": lambda r=rows, v=values, c=counts: grouped_product(
                    r, v.transpose(1, 2), c
                ),
                "input": lambda g=grad, v=values, c=counts: grouped_product(g, v, c),
                "weight": lambda p=weight, g=grad, r=rows, v=values, c=counts: (
                    grouped_weight_gradient(p, g, r, v.shape, c)
                ),
            }
            for part, call in calls.items():
                sizes = {"part": part, "groups": groups, "m": m, "n": n, "k": k}
                yield self._one("grouped", call, sizes)

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
            q, k, v = (self._random(*s).requires_grad_() for s in (wide, narrow, narrow))
            call = lambda q=q, k=k, v=v: causal_attention(q, k, v, None)  # noqa: E731
            yield from self._two("attention", call, [q, k, v], sizes)
            yield from self._blocks(q, k, v, sizes)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> Iterator[Point]:
        """What a ring does with a block before its own: every score counts."""
        q, k, v = (x.detach().permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        out, lse = block_attention(q, k, v, False, None)
        grad = torch.ones_like(out)
        calls = {
            "forward": lambda: block_attention(q, k, v, False, None),
            "backward": lambda: block_attention_backward(grad, q, k, v, out, lse, False, None),
        }
        for part, call in calls.items():
            yield self._one("attention_block", call, {"part": part, **sizes})

    # Light operations

    def light(self) -> Iterator[Point]:
        """Norms, rotation, activation, residual sum and lookup, by rows and width."""
        for rows, width in self.grid.light:
            x, y = (self._random(rows, 1, width).requires_grad_() for _ in range(2))
            norm = RMSNorm(width, 1e-5).to(self.device)
            _with_main_grad(norm.weight, self._random(width, dtype=torch.float32))
            heads = x.detach().view(rows, 1, -1, ROTATED_HEAD).requires_grad_()
            half = self._random(rows, 1, 1, ROTATED_HEAD // 2, dtype=torch.float32)
            table = Embedding(VOCABULARY, width, self.dtype).to(self.device)
            _with_main_grad(table.weight, self._random(VOCABULARY, width, dtype=torch.float32))
            ids = torch.randint(VOCABULARY, (rows, 1), device=self.device)
            calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
                "rms_norm": (lambda norm=norm, x=x: norm(x), [x]),
                "rotate": (lambda x=heads, a=half: rotate(x, (a, a)), [heads]),
                "gated": (lambda x=x, y=y: gated(x, y), [x, y]),
                "residual": (lambda x=x, y=y: x + y, [x, y]),
                "embedding": (lambda table=table, ids=ids: table(ids), [table.weight]),
            }
            for op, (call, inputs) in calls.items():
                sizes: Sizes = {"op": op, "rows": rows, "width": width}
                yield from self._two("light", call, inputs, sizes)
        yield from self._losses()

    def _losses(self) -> Iterator[Point]:
        for rows, vocabulary in self.grid.losses:
            logits = self._random(rows, vocabulary).requires_grad_()
            labels = torch.randint(vocabulary, (rows,), device=self.device)
            call = lambda z=logits, y=labels: cross_entropy(z, y, 0, no_join)  # noqa: E731
            sizes: Sizes = {"op": "cross_entropy", "rows": rows, "width": vocabulary}
            yield from self._two("light", call, [logits], sizes)

    def memory(self) -> Iterator[Point]:
        """Copies and sums into memory that is there, and copies into new memory. `bytes` are those
        of one array: a copy reads and writes as many, a sum reads twice as many."""
        for size in self.grid.memory_bytes:
            a, b, c = (torch.ones(size // 4, device=self.device) for _ in range(3))
            calls = {
                "copy": lambda a=a, c=c: c.copy_(a),
                "add": lambda a=a, b=b, c=c: torch.add(a, b, out=c),
                "clone": lambda a=a: a.clone(),
            }
            for op, call in calls.items():
                yield self._one("memory", call, {"op": op, "bytes": size}, "fp32")

    def host(self) -> Iterator[Point]:
        """What a call costs beside its work: an operation on one number, and a node of autograd."""
        x = torch.ones(1, device=self.device)
        yield self._one("host", lambda: x.add_(0.0), {"part": "forward", "op": "operation"})
        y = torch.ones(1, device=self.device, requires_grad=True)
        yield from self._two("host", lambda: _Nothing.apply(y), [y], {"op": "node"})

    def optimizer(self) -> Iterator[Point]:
        """The norm of the gradients, and the update with AdamW."""
        for tensors, elements in self.grid.optimizer:
            layers = {f"w{i}": nn.Linear(elements, 1, bias=False) for i in range(tensors)}
            stage = nn.ModuleDict(layers).to(self.device)
            parameters = [
                LocalParameter(name, p, p.detach(), torch.full_like(p, 1e-3), 1)
                for name, p in stage.named_parameters()
            ]
            update = AdamW([stage], Optimizer(lr=1e-4))
            calls = {
                "norm": lambda ps=parameters: torch._foreach_norm(  # pyright: ignore
                    [p.grad for p in ps], 2, dtype=torch.float64
                ),
                "update": lambda ps=parameters, u=update: u.step(ps, 1e-4, 1.0),
            }
            for op, call in calls.items():
                sizes: Sizes = {"op": op, "tensors": tensors, "elements": elements}
                yield self._one("optimizer", call, sizes, "fp32")


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
