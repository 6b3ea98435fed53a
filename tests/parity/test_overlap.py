"""Messages travel while something is computed. What is held is an order of events, told by the
trace of real processes: issued before, waited for after. How long anything takes plays no part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import perf_counter
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.layout.notation import Layout
from fivefold.model import linear
from fivefold.model.config import ModelConfig
from fivefold.model.moe import MoE
from fivefold.parallel.comm import Recorder
from fivefold.parallel.context import run as sequence
from fivefold.parallel.expert.run import AllToAllDispatcher
from fivefold.parallel.mesh import make_axes
from fivefold.step_trace import Message, StepTrace, Work
from fivefold.train.launch import launch
from fivefold.train.trainer import Trainer
from tests.parity.harness import TINY_D, layout_for, make_trainer, random_samples, tiny

SHARED = tiny("qwen2_moe")
SAMPLES = random_samples(128)


def traces_of(
    config: ModelConfig, text: str, modules: Callable[[Trainer], dict[str, nn.Module]]
) -> list[StepTrace]:
    """The second step of each rank, in which the work of these modules is noted too."""

    def work() -> StepTrace:
        trainer = make_trainer(config, layout_for(text, config, SAMPLES), SAMPLES)
        for name, module in modules(trainer).items():
            note(name, module, trainer.recorder)
        for step in range(2):
            trainer.step(step, 1e-3)
        return trainer.step_trace

    return launch(work, layout_for(text, config, SAMPLES).world_size, timeout_s=120)


def note(name: str, module: nn.Module, recorder: Recorder) -> None:
    """Notes work called `NAME forward` and `NAME backward`."""
    began: list[float] = []

    def noted(phase: str) -> None:
        recorder.step_trace.work.append(Work(f"{name} {phase}", began.pop(), perf_counter()))

    def before(module: nn.Module, inputs: tuple) -> tuple:
        began.append(perf_counter())
        x, *rest = inputs
        if x.requires_grad:
            x = x.view_as(x)  # its gradient is that of this module alone
            x.register_hook(lambda grad: noted("backward"))
        return x, *rest

    def after(module: nn.Module, inputs: tuple, output) -> None:
        noted("forward")
        first: Tensor = output[0] if isinstance(output, tuple) else output
        first.register_hook(lambda grad: began.append(perf_counter()))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def layers(trainer: Trainer) -> dict[str, nn.Module]:
    return {
        f"layer {number}": layer
        for stage in trainer.stages.values()
        for number, layer in stage.layers.items()
    }


def messages(trace: StepTrace, split: str, phase: str, op: str) -> list[Message]:
    return [m for m in trace.messages if (m.split, m.phase, m.op) == (split, phase, op)]


def beside(trace: StepTrace, message: Message) -> list[str]:
    """What was computed, from start to end, while the message was under way."""
    assert message.wait_start_s is not None
    return [
        work.name
        for work in trace.work
        if message.start_s <= work.start_s and work.end_s <= message.wait_start_s
    ]


# --- tensor -------------------------------------------------------------------------------------


def test_the_inputs_gradients_are_summed_beside_the_weights_gradients() -> None:
    """With and without megatron SP: what the layers before wait for goes first."""
    for text, op in (("tp2 mb2", "all_reduce"), ("tp2 sp mb2", "reduce_scatter")):
        for trace in traces_of(TINY_D, text, note_weight_gradients):
            sums = [m for m in trace.messages if m.axis == "tp" and m.phase == "backward"]
            sums = [m for m in sums if m.op == op]
            assert len(sums) >= 2 * len(LAYERS)
            hidden = ["weight gradients" in beside(trace, message) for message in sums]
            assert sum(hidden) >= 2 * len(LAYERS)


def note_weight_gradients(trainer: Trainer) -> dict[str, nn.Module]:
    """Notes the work on the gradients of several weights that share an input; in this process."""
    real = linear.weight_gradients

    def noted(parameters, of_weights):
        def measured():
            with trainer.recorder.step_trace.doing("weight gradients"):
                return of_weights()

        return real(parameters, measured)

    linear.weight_gradients = noted
    return {}


# --- data ---------------------------------------------------------------------------------------

LAYERS = range(8)  # of TINY_D


def test_gradients_are_summed_while_the_layer_before_goes_backward() -> None:
    """ZeRO 0. The head comes first, then the layers from the last to the first, the embedding."""
    for trace in traces_of(TINY_D, "dp2 mb2", layers):
        sums = messages(trace, "dp", "backward", "all_reduce")
        assert len(sums) == 2 + len(LAYERS)
        for number, message in zip([*reversed(LAYERS)], sums, strict=False):
            assert f"layer {number} backward" in beside(trace, message)
        waits = [message.wait_start_s or 0.0 for message in sums]
        assert waits == sorted(waits)  # the first is done first


def test_gradients_of_chunks_are_summed_beside_their_own_last_backward_pass() -> None:
    """Pipeline rank 0 has the layers 0 and 1, and 4 and 5: those go backward first."""
    for trace in traces_of(TINY_D, "pp2 vpp2 dp2 mb1", layers)[:2]:
        sums = messages(trace, "dp", "backward", "all_reduce")
        order = [5, 4, 1, 0]
        for number, message in zip(order[1:], sums, strict=False):
            assert f"layer {number} backward" in beside(trace, message)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_scattered_while_the_layer_before_goes_backward(zero: int) -> None:
    """One at a time: a message has ended before the next is issued."""
    micro_batches = 2
    for trace in traces_of(TINY_D, f"dp2 zero{zero} mb2", layers):
        sums = messages(trace, "dp", "backward", "reduce_scatter")
        units = 1 + len(LAYERS)
        assert len(sums) == units * (micro_batches if zero > 1 else 1)
        for start in range(0, len(sums), units):
            for number, message in zip([*reversed(LAYERS)][1:], sums[start:], strict=False):
                assert f"layer {number} backward" in beside(trace, message)
        for message, following in itertools.pairwise(sums):
            assert message.end_s is not None and message.end_s <= following.start_s


def test_weights_are_gathered_while_the_layer_before_goes_forward() -> None:
    """ZeRO 3. First comes what is outside of the layers."""
    for trace in traces_of(TINY_D, "dp2 zero3 mb2", layers):
        gathers = messages(trace, "dp", "forward", "all_gather")
        units = 1 + len(LAYERS)
        assert len(gathers) == 2 * units
        for start in (0, units):
            _, _, *following = gathers[start : start + units]
            for number, message in zip(LAYERS, following, strict=False):
                assert f"layer {number} forward" in beside(trace, message)


def test_weights_are_gathered_while_the_layer_after_goes_backward() -> None:
    """ZeRO 3. Those of the last layer are gathered beside the head's backward pass."""
    for trace in traces_of(TINY_D, "dp2 zero3 mb2", layers):
        gathers = messages(trace, "dp", "backward", "all_gather")
        assert len(gathers) == 2 * len(LAYERS)
        for start in (0, len(LAYERS)):
            _, *following = gathers[start : start + len(LAYERS)]
            for number, message in zip([*reversed(LAYERS)], following, strict=False):
                assert f"layer {number} backward" in beside(trace, message)


def test_experts_are_gathered_beside_the_layer_around_them() -> None:
    """ZeRO 3. Forward beside their own layer's attention, backward beside the layer after."""
    config = tiny("qwen3_moe")
    four = range(config.num_layers)

    def attentions(trainer: Trainer) -> dict[str, nn.Module]:
        [stage] = trainer.stages.values()
        named = {f"attention {n}": layer.self_attn for n, layer in stage.layers.items()}
        return named | layers(trainer)

    for trace in traces_of(config, "dp4 ep2 zero3 mb2", attentions):
        gathers = messages(trace, "dp", "forward", "all_gather")
        experts = [m for m in gathers if m.axis == "edp_shard"]
        assert len(experts) == len(four)
        for number, message in zip(four, experts, strict=True):
            assert f"attention {number} forward" in beside(trace, message)
        gathers = messages(trace, "dp", "backward", "all_gather")
        _, *experts = [m for m in gathers if m.axis == "edp_shard"]
        for number, message in zip([*reversed(four)], experts, strict=False):
            assert f"layer {number} backward" in beside(trace, message)


# --- pipeline -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["pp2 mb1", "pp2 vpp2 mb1"])
def test_what_the_next_action_needs_is_received_beside_the_present_one(text: str) -> None:
    for trace in traces_of(TINY_D, text, lambda trainer: {}):
        received = [message for message in trace.messages if message.op == "receive"]
        alone = [message for message in received if not beside(trace, message)]
        assert len(received) >= 8 and len(alone) <= 1  # the first, in a rank's first action


def test_what_an_action_sends_is_not_waited_for_before_the_next_one() -> None:
    for trace in traces_of(TINY_D, "pp2 mb1", lambda trainer: {}):
        actions = [work for work in trace.work if "micro-batch" in work.name]
        sent = [m for m in trace.messages if m.split == "pp" and m.op == "send"]
        assert len(sent) == 8
        for message in sent:
            assert message.wait_start_s is None or message.wait_start_s >= actions[-1].end_s


# --- sequence -----------------------------------------------------------------------------------


def test_keys_and_values_travel_beside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[Recorder] = []

    def noted(function: Callable, name: str) -> Callable:
        def call(*args):
            with recorders[0].step_trace.doing(name):
                return function(*args)

        return call

    forward, backward = sequence.block_attention, sequence.block_attention_backward
    monkeypatch.setattr(sequence, "block_attention", noted(forward, "attention forward"))
    monkeypatch.setattr(sequence, "block_attention_backward", noted(backward, "attention backward"))

    def remember(trainer: Trainer) -> dict[str, nn.Module]:
        recorders.append(trainer.recorder)
        return {}

    for trace in traces_of(TINY_D, "ring4 mb4", remember):
        sent = messages(trace, "cp", "forward", "send")
        assert len(sent) == 2 * 3 * len(LAYERS)  # 2 micro-batches, 3 of 4 steps
        assert all("attention forward" in beside(trace, message) for message in sent)
        sent = messages(trace, "cp", "backward", "send")
        assert len(sent) == 2 * 6 * len(LAYERS)
        hidden = ["attention backward" in beside(trace, message) for message in sent]
        assert sum(hidden) == 2 * 5 * len(LAYERS)  # but for the last gradients' way home


# --- experts ------------------------------------------------------------------------------------


def test_tokens_travel_to_their_experts_beside_the_shared_expert() -> None:
    def shared(trainer: Trainer) -> dict[str, nn.Module]:
        [stage] = trainer.stages.values()
        mixtures = {n: layer.mlp for n, layer in stage.layers.items()}
        return {f"shared {n}": cast(MoE, mixture).shared_expert for n, mixture in mixtures.items()}

    four = range(SHARED.num_layers)
    for trace in traces_of(SHARED, "dp2 ep2 mb4", shared):
        # Of a layer's three, the first says how many rows come and the last brings them back.
        forward = messages(trace, "ep", "forward", "all_to_all")
        assert len(forward) == 3 * len(four)
        for number, message in zip(four, forward[1::3], strict=True):
            assert f"shared {number} forward" in beside(trace, message)
        backward = messages(trace, "ep", "backward", "all_to_all")
        assert len(backward) == 2 * len(four)
        for number, message in zip([*reversed(four)], backward[1::2], strict=True):
            assert f"shared {number} backward" in beside(trace, message)


def test_the_gradients_of_travelling_rows_are_those_that_arrive() -> None:
    """Autograd is handed the shape of a gradient while the rows of it are under way."""

    def work() -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        axes = make_axes(Layout(dp=2, ep=2), rank, Recorder(), kv_heads=4)
        dispatcher = AllToAllDispatcher(axes)
        rows = torch.ones(6, 3, requires_grad=True)
        aside = torch.ones(2, requires_grad=True)
        travelling = dispatcher.dispatch(rows, torch.tensor([1, 2, 3, 0]))
        beside = (aside * 2).sum()
        arrived, _, trip = dispatcher.finish_dispatch(travelling)
        weights = torch.arange(float(len(arrived))).unsqueeze(1) + 10 * rank
        (dispatcher.combine(arrived * weights, trip).sum() + beside).backward()
        assert rows.grad is not None and aside.grad is not None
        return rows.grad, aside.grad

    # Expert 0 and 1 are on rank 0, where the rows arrive in the order of experts, then of ranks.
    first, second = launch(work, 2)
    assert first[0][:, 0].tolist() == [0, 2, 3, 10, 11, 12]
    assert second[0][:, 0].tolist() == [1, 4, 5, 13, 14, 15]
    assert first[1].tolist() == second[1].tolist() == [2, 2]
