"""Pipeline parallelism: how one rank works through its row of a schedule's table.

The table says in which order this rank does which forward and backward passes; messages follow
from it. The receive that the next action needs is posted before the present action computes, so
that messages overlap computation; every channel is one-way and is read in the order in
which it is written, which `proof.validate` has proved. Where the next stage is on this same rank
(the bottom of a V schedule), nothing is sent.

A backward pass in two parts computes the gradient of the stage's input and sends it. It puts the
work on the weights' gradients into a list; the table says when to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fivefold.layout.actions import Action
from fivefold.model.parameters import deferred_weight_grads
from fivefold.model.transformer import MicroBatch, Stage
from fivefold.parallel import comm
from fivefold.parallel.comm import Axis, Pending
from fivefold.parallel.data.run import DataParallel
from fivefold.parallel.mesh import Axes
from fivefold.parallel.pipeline.table import Message, Schedule, Step


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


@dataclass
class _Progress:
    """The state of this rank in one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    sums: StepSums
    weights_left: dict[int, int]  # by stage, micro-batches whose weight gradients are to come
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    deferred_weight_grads: dict[tuple[int, int], list[Callable[[], None]]] = field(
        default_factory=dict
    )
    arriving: dict[Action, Pending] = field(default_factory=dict)  # by the action that waits
    handed_over: dict[Action, Tensor] = field(default_factory=dict)  # by the action that made it
    leaving: list[Pending] = field(default_factory=list)


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
        self.rank = axes.coordinates["pp"]
        self.hidden_shape = hidden_shape
        self.like = torch.empty(0, dtype=dtype, device=device)
        self.steps = schedule.steps(self.rank)
        self.before: Callable[[Action], None] | None = None
        """Called before each action, by profilers and by tests that disturb a run."""

    def run_step(self, micro_batches: Sequence[MicroBatch]) -> StepSums:
        """Forward and backward passes of one optimizer step."""
        zero = torch.zeros((), device=self.like.device)
        sums = StepSums(zero, zero.clone())
        left = {stage: self.schedule.micro_batches for stage in self.stages}
        self._now = _Progress(micro_batches, sums, left)
        for data in self.data.values():
            data.begin_step()
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            if self.before:
                self.before(step.action)
            self._post_receive(step)
            if following:
                self._post_receive(following)
            with self.axes.recorder.step_trace.doing(step.action):
                self._run(step)
        for pending in self._now.leaving:
            pending.wait()
        return sums

    def _run(self, step: Step) -> None:
        kind = step.action.kind
        self.axes.recorder.phase = "forward" if kind == "F" else "backward"
        if kind == "F":
            self._forward(step)
        elif kind == "B":
            self._backward(step)
        elif kind == "I":
            self._input_gradient(step)
        else:
            self._weight_gradients(step.action)

    def _forward(self, step: Step) -> None:
        now, action = self._now, step.action
        batch, stage = now.micro_batches[action.micro_batch], self.stages[action.stage]
        x = self._received(step)
        x = batch.tokens if x is None else x.requires_grad_()
        out, balance = stage(x, batch)
        if balance is not None:
            now.sums.balance += balance.detach()
        if step.sends:
            self._send(out.detach(), step)
        else:
            now.sums.loss += out.detach()
        now.in_flight[action.stage, action.micro_batch] = _InFlight(x, out, balance)

    def _backward(self, step: Step) -> None:
        data = self.data[step.action.stage]
        data.begin_backward(last_micro_batch=self._is_last_for_weights(step.action))
        self._run_autograd(step)
        data.end_backward()

    def _input_gradient(self, step: Step) -> None:
        _, stage, micro_batch = step.action
        self.data[stage].begin_backward(last_micro_batch=False, weights=False)
        with deferred_weight_grads(
            self._now.deferred_weight_grads.setdefault((stage, micro_batch), [])
        ):
            self._run_autograd(step)

    @torch.no_grad()  # as in autograd's own backward pass
    def _weight_gradients(self, action: Action) -> None:
        _, stage, micro_batch = action
        data = self.data[stage]
        data.begin_backward(last_micro_batch=self._is_last_for_weights(action))
        work = self._now.deferred_weight_grads.pop((stage, micro_batch))
        work.reverse()
        while work:  # each piece lets go of what it has kept
            work.pop()()
        data.end_weights()

    def _is_last_for_weights(self, action: Action) -> bool:
        self._now.weights_left[action.stage] -= 1
        return self._now.weights_left[action.stage] == 0

    def _run_autograd(self, step: Step) -> None:
        """Autograd's backward pass of a stage and micro-batch."""
        kept = self._now.in_flight.pop((step.action.stage, step.action.micro_batch))
        grad = self._received(step)
        if kept.balance is None:
            torch.autograd.backward([kept.out], [grad])
        else:
            torch.autograd.backward([kept.out, kept.balance], [grad, None])
        if step.sends:
            assert kept.x.grad is not None
            self._send(kept.x.grad, step)

    # Messages

    def _post_receive(self, step: Step) -> None:
        """Begin to receive what the step needs, once."""
        message = step.receives
        if message is None or message.rank == self.rank or step.action in self._now.arriving:
            return
        axis = self._channel(message, arrives=True)
        self._now.arriving[step.action] = comm.start_receive(self.hidden_shape, self.like, axis)

    def _received(self, step: Step) -> Tensor | None:
        """Wait for the tensor [s, b, hidden] that the step needs; None where it needs none."""
        message = step.receives
        if message is None:
            return None
        if message.rank == self.rank:
            return self._now.handed_over.pop(message.produced_by)
        return self._now.arriving.pop(step.action).wait()

    def _send(self, x: Tensor, step: Step) -> None:
        """Begin to send x [s, b, hidden], or keep it for the next stage on this rank."""
        message = step.sends
        assert message is not None
        if message.rank == self.rank:
            self._now.handed_over[step.action] = x
            return
        leaving = [pending for pending in self._now.leaving if not pending.is_done()]
        leaving.append(comm.start_send(x, self._channel(message, arrives=False)))
        self._now.leaving = leaving

    def _channel(self, message: Message, arrives: bool) -> Axis:
        carries = "forward" if message.produced_by.kind == "F" else "backward"
        source, target = (message.rank, self.rank) if arrives else (self.rank, message.rank)
        return self.axes.channels[carries, source, target]
