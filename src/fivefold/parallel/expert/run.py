"""Expert parallelism: how tokens reach the experts that the router chose for them.

Each rank of the ep axis holds num_experts / ep experts. An all-to-all takes every token to the
ranks of its k experts, another brings the results back. Where the experts themselves are split
over the tp ranks (etp = tp), a token is sent to one of them only, and gathered among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.model.moe import MoE, on_host
from fivefold.model.transformer import Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending
from fivefold.parallel.mesh import Axes


def apply(stage: Stage, axes: Axes) -> None:
    """Let tokens travel to the experts of other ep and etp ranks."""
    for module in stage.modules():
        if isinstance(module, MoE):
            module.token_dispatcher = AllToAllDispatcher(axes)


class AllToAllDispatcher:
    """The token dispatcher of `fivefold.model.moe` over the ranks of a layout."""

    def __init__(self, axes: Axes) -> None:
        self.ep, self.etp, self.sequence = axes.ep, axes.etp, axes.sequence
        # Without megatron SP the tp ranks hold the same tokens: each routes a slice of them.
        self.slices = axes.tp.accounted_as("ep") if not axes.layout.sp else None

    def scatter_tokens(self, x: Tensor) -> Tensor:
        if self.slices is None or self.slices.size == 1:
            return x
        return _Slice.apply(x, self.slices)

    def gather_tokens(self, y: Tensor) -> Tensor:
        if self.slices is None or self.slices.size == 1:
            return y
        return _Unslice.apply(y.contiguous(), self.slices)

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        return comm.all_reduce(counts, self.sequence)

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, DispatchState]:
        state = DispatchState(rows.shape[0], counts, self.ep, self.etp)
        return DispatchStart.apply(rows, state), state

    def finish_dispatch(
        self, travelling: tuple[Tensor, DispatchState]
    ) -> tuple[Tensor, list[int], DispatchState]:
        rows, state = travelling
        rows = DispatchWait.apply(rows, state)
        if self.etp.size > 1:
            rows = _GatherRows.apply(rows, self.etp, state.gathered)
        if state.by_expert is not None:
            rows = rows.index_select(0, state.by_expert)
        return rows, state.local_counts, state

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        if state.by_expert is not None:
            rows = rows.index_select(0, state.by_expert.argsort())
        if self.etp.size > 1:
            rows = _SumRows.apply(rows, self.etp, state.gathered)
        return Combine.apply(rows, state)


class DispatchState:
    """One dispatch: row counts by rank, and the order of the arrived rows by expert.

    `send` and `receive` [ep]: rows to and from each ep rank. `gathered` [etp]: rows that arrived
    at each etp rank. `local_counts` [local experts]: rows that each expert works on.
    """

    def __init__(self, owned: int, counts: Tensor, ep: Axis, etp: Axis) -> None:
        """`owned`: rows that this rank sends; `counts` int64 [num_experts] of them by expert."""
        self.owned, self.ep = owned, ep
        arriving = comm.all_to_all(counts, ep).view(1, -1)
        if etp.size > 1:
            arriving = comm.all_gather(arriving, etp)
        own = on_host(counts, owned).view(ep.size, -1)
        here = on_host(arriving, owned).view(etp.size, ep.size, -1)  # from etp and ep rank, expert
        self.send = own.sum(1).tolist()
        self.receive = here[etp.index].sum(1).tolist()
        self.gathered = here.sum((1, 2)).tolist()
        self.local_counts = here.sum((0, 1)).tolist()
        # Rows arrive from each rank sorted by expert; with several sources they are sorted anew.
        self.by_expert = None
        if ep.size * etp.size > 1:
            experts = torch.arange(here.shape[2], device=counts.device)
            expert_of_row = experts.repeat(ep.size * etp.size)
            expert_of_row = expert_of_row.repeat_interleave(
                arriving.flatten(), output_size=sum(self.local_counts)
            )
            self.by_expert = expert_of_row.argsort(stable=True)
        self.under_way: Pending | None = None

    def wait(self) -> Tensor:
        """The rows that are under way, once they have arrived."""
        assert self.under_way is not None
        rows = self.under_way.wait()
        self.under_way = None
        return rows


class DispatchStart(torch.autograd.Function):
    """Rows begin to travel from the tokens' rank to the experts' ranks; nothing is in their tensor
    until `DispatchWait`. In the backward pass `DispatchWait` sends the gradients and
    `DispatchStart` waits for them.

    What is computed between the two in the forward pass, autograd computes between them backward,
    for it runs first what was recorded last. So it overlaps messages in both passes."""

    @staticmethod
    def forward(ctx, rows: Tensor, state: DispatchState) -> Tensor:
        ctx.state = state
        out, state.under_way = comm.start_all_to_all_rows(
            rows, state.ep, state.send, state.receive, state.owned
        )
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.state.wait(), None


class DispatchWait(torch.autograd.Function):
    """Waits for the rows of `DispatchStart`; backward, begins to send their gradients."""

    @staticmethod
    def forward(ctx, rows: Tensor, state: DispatchState) -> Tensor:
        ctx.state = state
        state.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        state = ctx.state
        _, state.under_way = comm.start_all_to_all_rows(
            grad, state.ep, state.receive, state.send, state.owned
        )
        return grad, None  # of the right shape; `DispatchStart` has the gradient that comes


class Combine(torch.autograd.Function):
    """Sends rows from the experts' ranks back to the tokens' ranks; backward, the reverse."""

    @staticmethod
    def forward(ctx, rows: Tensor, state: DispatchState) -> Tensor:
        ctx.state = state
        return comm.all_to_all_rows(rows, state.ep, state.receive, state.send, state.owned)

    @staticmethod
    def backward(ctx, grad: Tensor):
        state = ctx.state
        return comm.all_to_all_rows(grad, state.ep, state.send, state.receive, state.owned), None


class _GatherRows(torch.autograd.Function):
    """Gathers the rows that arrived at all etp ranks; backward, sums and scatters gradients."""

    @staticmethod
    def forward(ctx, rows: Tensor, axis: Axis, counts: list[int]) -> Tensor:
        ctx.axis, ctx.counts = axis, counts
        return comm.all_gather_rows(rows, axis, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return comm.reduce_scatter_rows(grad, ctx.axis, ctx.counts), None, None


class _SumRows(torch.autograd.Function):
    """Sums the etp ranks' partial results, keeps the rows that arrived here; backward gathers."""

    @staticmethod
    def forward(ctx, rows: Tensor, axis: Axis, counts: list[int]) -> Tensor:
        ctx.axis, ctx.counts = axis, counts
        return comm.reduce_scatter_rows(rows, axis, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return comm.all_gather_rows(grad, ctx.axis, ctx.counts), None, None


class _Slice(torch.autograd.Function):
    """[s, ...] on all tp ranks -> this rank's slice [s / tp, ...]; backward gathers gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.index].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return comm.all_gather(grad.contiguous(), ctx.axis), None


class _Unslice(torch.autograd.Function):
    """Gathers slices [s / tp, ...] to [s, ...]. Its gradient is the same on all tp ranks, so the
    backward pass takes this rank's slice of it."""

    @staticmethod
    def forward(ctx, y: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return comm.all_gather(y, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.chunk(ctx.axis.size)[ctx.axis.index].contiguous(), None
