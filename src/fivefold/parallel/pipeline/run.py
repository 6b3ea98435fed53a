"""Pipeline parallelism: how one rank works through its row of a schedule's table.

The table says in which order this rank does which forward and backward passes; messages follow
from it. The receive that the next action needs is posted before the present action computes, so
that messages travel beside computation; every channel is one-way and is read in the order in
which it is written, which `schedules.validate` has proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.model.transformer import MicroBatch, Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending
from fivefold.parallel.data.run import DataParallel
from fivefold.parallel.mesh import Axes
from fivefold.parallel.pipeline.schedules import Action, Schedule, Step, messages


@dataclass
class StepSums:
    """Sums over this rank's micro-batches; zero where the rank does not compute them."""

    loss: Tensor  # token losses (last stage)
    balance: Tensor  # balance losses of this rank's mixtures


@dataclass
class _InFlight:
    """What is kept of a forward pass until its backward pass."""

    x: Tensor
    out: Tensor
    balance: Tensor | None


class PipelineRank:
    """One rank of the pipeline with its stages (one, or vpp chunks)."""

    def __init__(
        self,
        schedule: Schedule,
        stages: dict[int, Stage],
        data: dict[int, DataParallel],
        axes: Axes,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`stages` and `data` by virtual stage; `hidden_shape` [sequence, batch, hidden] of the
        hidden states that travel."""
        self.schedule, self.stages, self.data, self.axes = schedule, stages, data, axes
        self.hidden_shape = hidden_shape
        self.like = torch.empty(0, dtype=dtype, device=device)
        self.steps = messages(schedule, axes.coordinates["pp"])
        self.before: Callable[[Action], None] | None = None
        """Called ahead of each action: for whoever watches or disturbs a run."""

    def run_step(self, micro_batches: Sequence[MicroBatch]) -> StepSums:
        """Forward and backward passes of one optimizer step."""
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._arriving: dict[Action, Pending] = {}
        self._leaving: list[Pending] = []
        self._backwards_left = {s: self.schedule.micro_batches for s in self.stages}
        zero = torch.zeros((), device=self.like.device)
        sums = StepSums(zero, zero.clone())
        for data in self.data.values():
            data.begin_step()
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            if self.before:
                self.before(step.action)
            self._post_receive(step)
            if following:
                self._post_receive(following)
            with self.axes.recorder.spans.doing(step.action):
                if step.action.kind == "F":
                    self._forward(step, micro_batches[step.action.micro_batch], sums)
                else:
                    self._backward(step)
        for pending in self._leaving:
            pending.wait()
        return sums

    def _forward(self, step: Step, batch: MicroBatch, sums: StepSums) -> None:
        self.axes.recorder.phase = "forward"
        action = step.action
        stage = self.stages[action.stage]
        if step.receives:
            x = self._arriving.pop(action).wait().requires_grad_()
        else:
            x = batch.tokens
        out, balance = stage(x, batch)
        if balance is not None:
            sums.balance += balance.detach()
        if step.sends:
            self._send(out.detach(), self.axes.channels.forward_out)
        else:
            sums.loss += out.detach()
        self._in_flight[action.stage, action.micro_batch] = _InFlight(x, out, balance)

    def _backward(self, step: Step) -> None:
        self.axes.recorder.phase = "backward"
        action = step.action
        kept = self._in_flight.pop((action.stage, action.micro_batch))
        grad = self._arriving.pop(action).wait() if step.receives else None
        self._backwards_left[action.stage] -= 1
        data = self.data[action.stage]
        data.begin_backward(last_micro_batch=self._backwards_left[action.stage] == 0)
        if kept.balance is None:
            torch.autograd.backward([kept.out], [grad])
        else:
            torch.autograd.backward([kept.out, kept.balance], [grad, None])
        data.end_backward()
        if step.sends:
            assert kept.x.grad is not None
            self._send(kept.x.grad, self.axes.channels.backward_out)

    def _post_receive(self, step: Step) -> None:
        """Begin to receive what the step needs, once."""
        if step.receives is None or step.action in self._arriving:
            return
        channels = self.axes.channels
        axis = channels.forward_in if step.action.kind == "F" else channels.backward_in
        assert axis is not None
        self._arriving[step.action] = comm.start_receive(self.hidden_shape, self.like, axis)

    def _send(self, x: Tensor, axis: Axis | None) -> None:
        assert axis is not None
        self._leaving = [pending for pending in self._leaving if not pending.is_done()]
        self._leaving.append(comm.start_send(x, axis))
