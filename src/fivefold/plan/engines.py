"""What a plan holds fixed: the model, the cluster, the batch, the precision and the program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fivefold.cluster.cluster import Cluster
from fivefold.model.config import ModelConfig
from fivefold.parallel.workload import ELEMENT_BYTES


@dataclass(frozen=True)
class Engine:
    """What the training program does beside its arithmetic: what it hides, fuses and keeps.

    The defaults describe a well-tuned Megatron-Core run; `ENGINES` has others. None of these is a
    number of seconds: they say which messages can run beside which compute, and the time that
    stays exposed follows from that.
    """

    name: str = "megatron"
    flash_attention: bool = True  # one kernel that never writes the score matrix to memory
    tuned_attention: bool = True  # the device's fastest attention kernel; False: FlashAttention-2
    fused_kernels: bool = True  # norms, residuals and activations in few passes over memory
    pipelined_tensor_messages: bool = False  # TP messages cut in pieces beside their product
    hidden_tensor_backward: bool = True  # TP messages of the backward pass beside a product
    overlapped_gradients: bool = True  # data-parallel reduction beside the backward pass
    overlapped_replicas: bool = True  # HSDP's sum over replicas too; False: after it
    overlapped_weights: bool = True  # data-parallel weight gathers beside the forward pass
    overlapped_ring: bool = True  # keys and values travel beside attention
    fused_experts: bool = False  # permutation, quantization and activation inside the products
    once_a_node: bool = False  # a token that several experts of a node want goes there once
    overlapped_experts: bool = False  # dispatch and combine beside another micro-batch
    cuda_graphs: bool = False  # no time lost between kernels
    flat_shards: bool = True  # ZeRO shards flat buffers; False: rows of each weight, padded
    gradient_bytes: int = 4  # of one accumulated gradient element
    gradient_copy_bytes: int = 0  # of copies of it that are held beside
    reduced_bytes: int = 4  # of one gradient element on the wire
    gathered_bytes: int = 2  # of one weight element on the wire
    dispatched_bytes: int = 2  # of one element on its way to the experts
    optimizer_bytes: int = 12  # fp32 master weight and two moments of an element
    host_optimizer: bool = False  # optimizer state lives in host memory
    # What recompute=selective recomputes: "attention", "elementwise" operations (norms, activation
    # functions; also projections up from latent vectors), or "products": every second product and
    # all that is no product and no attention.
    selective: str = "attention"
    loss_bytes: int = 2  # alive for each logit in the loss: 2 is in place, in 16 bits
    split_loss_bytes: int = 0  # more of them where tp splits the vocabulary
    loss_chunk: int = 0  # tokens whose logits are alive at a time, 0 = of a whole micro-batch
    step_bytes: int = 0  # an optimizer-state element needs beside it during the optimizer step
    bucket_bytes: float = 0.0  # of communication buckets that stay
    placeholder_gradients: bool = True  # products add to the main gradient, and return empty ones
    quantized_inputs: bool = True  # 8-bit products keep their inputs in 8 bits for backward
    keeps_gathered_inputs: bool = False  # tp products keep inputs as sp gathered them
    keeps_stage_outputs: bool = False  # a pipeline stage's output stays until its backward pass
    keeps_gathered: bool = False  # ZeRO 3 in a pipeline gathers and reduces once a step


PRODUCT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Bytes of an element of a product's inputs, by precision: the precisions that can be planned."""

ENGINES = {
    "megatron": Engine(),
    "nemo": Engine(
        "nemo", pipelined_tensor_messages=True, gradient_bytes=2, reduced_bytes=2, loss_bytes=10
    ),
    "fsdp": Engine(
        "fsdp",
        tuned_attention=False,
        selective="products",
        loss_bytes=12,  # log-softmax, and the gradients before and after it, in fp32
        split_loss_bytes=4,  # which is several operations then
        placeholder_gradients=False,
        quantized_inputs=False,
        keeps_gathered_inputs=True,
        keeps_stage_outputs=True,
        keeps_gathered=True,
    ),
    "deepspeed": Engine(
        "deepspeed",
        overlapped_gradients=False,  # its pipeline reduces after the last micro-batch
        overlapped_weights=False,
        tuned_attention=False,
        fused_kernels=False,
        gradient_bytes=2,
        loss_bytes=6,  # 16-bit logits, and their softmax in fp32
        step_bytes=4,  # an fp32 gradient
        bucket_bytes=2e9,  # to reduce and to gather, of 5e8 16-bit elements each
        placeholder_gradients=False,
        keeps_stage_outputs=True,
    ),
    # DeepSeek-V3's own program (arXiv:2412.19437, sections 3.2 and 3.3): dispatch in fp8, once to
    # each node and beside another micro-batch; moments in 16 bits.
    "deepseek": Engine(
        "deepseek",
        once_a_node=True,
        dispatched_bytes=1,
        overlapped_experts=True,
        fused_experts=True,
        optimizer_bytes=8,
        selective="elementwise",
    ),
    "fivefold": Engine(
        "fivefold",
        tuned_attention=False,
        fused_kernels=False,
        loss_bytes=12,
        placeholder_gradients=False,
        quantized_inputs=False,
        hidden_tensor_backward=False,
        overlapped_replicas=False,
        flat_shards=False,
    ),
}


@dataclass(frozen=True)
class Job:
    """All that every layout of one search shares."""

    config: ModelConfig
    cluster: Cluster
    sequence_length: int  # tokens
    global_batch: int  # sequences of one optimizer step
    precision: str = "bf16"  # of the products: fp32, bf16, fp16, fp8, mxfp8, nvfp4
    engine: Engine = field(default_factory=Engine)
    mtp: bool = False  # train the multi-token-prediction modules too
    imbalance: float = 1.0  # tokens of the busiest expert rank, over the mean

    def busiest(self, ep: Any) -> Any:
        """Tokens of the busiest of `ep` expert ranks over the mean: at most all of them."""
        return np.minimum(self.imbalance, ep)

    @property
    def activations(self) -> str:
        """The precision of activations, gathered weights and what travels: bf16, or fp32."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def element_bytes(self) -> int:
        """Of an element in that precision."""
        return ELEMENT_BYTES[self.activations]

    @property
    def is_low_precision(self) -> bool:
        """Are products done in 8 bits or fewer?"""
        return PRODUCT_BYTES[self.precision] < 2
