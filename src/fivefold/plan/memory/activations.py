"""What one layer keeps for its backward pass, by operation, for many layouts at once.

Activations are what the backward pass of each operation needs (Korthikanti et al.,
arXiv:2205.05198, section 4; Transformer Engine's modules for fused norms, activation functions,
attention and experts). The log-sum-exp that fused attention keeps (4 bytes a head and token, below
0.1 % of a layer) and routing indices are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.arrays import Elementwise
from fivefold.layout.batch import LayoutBatch
from fivefold.model.config import LayerKind, MoEConfig
from fivefold.parallel.workload import FP32
from fivefold.plan.engines import Job
from fivefold.plan.time.operations import tokens


@dataclass(frozen=True)
class LayerBytes:
    """Of one micro-batch in one layer of a kind; arrays [n]."""

    kept: dict[str, Elementwise]  # without recomputation, by operation
    selective: Elementwise  # with selective recomputation
    input: Elementwise  # what full recomputation starts from
    backward: Elementwise  # the largest temporaries of its backward pass

    @property
    def whole(self) -> Elementwise:
        """What is kept without recomputation, in all."""
        return sum(self.kept.values())


def layer_activations(job: Job, layouts: LayoutBatch, kind: LayerKind) -> LayerBytes:
    """What one layer keeps of one micro-batch for its backward pass, and what that needs."""
    config, engine, tp = job.config, job.engine, layouts.tp
    element = job.element_bytes
    t = tokens(job, layouts)
    hidden = element * config.hidden_size * t / layouts.sp_degree
    # An input of products: quantized by some programs, as it was gathered by others.
    gathered = layouts.sp_degree if engine.keeps_gathered_inputs else 1
    product_input = _input_bytes(job) / element * hidden * gathered
    kept = {"norm_input": hidden, "norm_output": product_input}
    recomputed = {"norm_output"}  # cheap to compute again
    attention, scores, attention_backward = _attention(job, layouts, t)
    kept |= attention
    if config.norms_per_layer > 1:
        kept |= {"mlp_norm_input": hidden, "mlp_norm_output": product_input}
        recomputed.add("mlp_norm_output")
    if config.norms_per_layer > 2:
        kept["output_norm_inputs"] = 2 * hidden
    if config.dropout:
        kept["dropout_masks"] = 2 * hidden / element
    if kind.moe:
        assert config.moe is not None
        mlp, mlp_backward = _experts(job, layouts, config.moe, t)
        # The router reads what the norm wrote in bf16, whatever the experts' precision.
        kept["mlp_norm_output"] = hidden
    else:
        mlp, mlp_backward = _mlp(job, config.intermediate_size * t / tp, "mlp")
    kept |= mlp
    recomputed |= {name for name in mlp if name.endswith("activation")}
    if config.mla is not None:  # projections up from the latent vectors
        recomputed |= {"query", "key", "value"}
    if kind.mtp:
        kept["mtp_entry"] = 6 * hidden  # two norms' inputs and the joined input of a product
    whole = sum(kept.values())
    if engine.selective == "attention":
        selective = whole - scores
    elif engine.selective == "elementwise":
        selective = whole - sum(kept[name] for name in recomputed)
    else:
        selective = _every_second_product(config.gated_mlp, kept, hidden)
    travelling = 2 * element * config.hidden_size * t * (layouts.sp_degree > 1)
    backward = np.maximum(attention_backward, mlp_backward) + 2 * hidden + travelling
    return LayerBytes(kept, selective, hidden, backward)


def _input_bytes(job: Job) -> float:
    """Bytes kept of an element of a product's input: 8-bit products keep the quantized one."""
    return 1.0 if _quantized(job) else float(job.element_bytes)


def _quantized(job: Job) -> bool:
    return job.engine.quantized_inputs and job.precision not in ("bf16", "fp16", "fp32")


def _attention(
    job: Job, layouts: LayoutBatch, t: Elementwise
) -> tuple[dict[str, Elementwise], Elementwise, Elementwise]:
    """What it keeps, the part of it that are scores, and its backward pass's temporaries."""
    config, tp, element = job.config, layouts.tp, job.element_bytes
    heads = config.num_heads / tp
    # Grouped heads: no rank has less than one, and Ulysses' exchange gives each of its ranks one.
    kv_heads = np.maximum(config.num_kv_heads / tp, layouts.ulysses)
    query = element * t * heads * config.qk_head_dim
    key = element * t * kv_heads * config.qk_head_dim
    value = element * t * kv_heads * config.v_head_dim
    output = element * t * heads * config.v_head_dim
    kept = {"query": query, "key": key, "value": value, "attention_output": output}
    if config.qk_norm:
        kept["qk_norm_inputs"] = query + key
    if config.mla is not None:
        kept["latents"] = _latents(job, layouts, t)
    # The exchange back leaves two: what attention wrote, and what the projection reads.
    exchanged = output * (layouts.ulysses > 1)
    projection = output / 2 if _quantized(job) else 0.0
    kept["projection_input"] = np.maximum(exchanged, projection)
    scores: Elementwise = 0.0
    backward = query + key + value + output
    if job.engine.flash_attention:
        backward = backward + 2 * query  # the query's gradient is summed in fp32
    else:
        # Softmax's result; with dropout also its mask and its result.
        each = 5 if config.dropout else 2
        one = t * heads * job.sequence_length / layouts.ring
        kept["scores"] = scores = each * one
        backward = backward + 2 * element * one
    return kept, scores, backward


def _latents(job: Job, layouts: LayoutBatch, t: Elementwise) -> Elementwise:
    """The narrow vectors of latent attention before and after their norm."""
    mla = job.config.mla
    assert mla is not None
    ranks = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    before = job.element_bytes * (ranks + mla.qk_rope_head_dim)
    return t * (before + _input_bytes(job) * ranks) / layouts.sp_degree


def _mlp(job: Job, width: Elementwise, name: str) -> tuple[dict[str, Elementwise], Elementwise]:
    """`width`: elements of the hidden layer of all tokens on this rank."""
    gated, fused = job.config.gated_mlp, job.engine.fused_kernels
    first = job.element_bytes * width * (2 if gated else 1)
    kept = {f"{name}_hidden": first, f"{name}_activation": _input_bytes(job) * width}
    if gated and not fused:
        kept[f"{name}_gate_activation"] = (
            job.element_bytes * width
        )  # of the gate alone, for the product
    return kept, first


def _experts(
    job: Job, layouts: LayoutBatch, moe: MoEConfig, t: Elementwise
) -> tuple[dict[str, Elementwise], Elementwise]:
    config = job.config
    copies = routed_copies(job, layouts)
    kept = {
        "router": 3 * FP32 * moe.num_experts * t / layouts.tp,  # logits, scores, their choice
        "experts_input": _input_bytes(job) * config.hidden_size * copies,
    }
    mlp, backward = _mlp(job, copies * moe.expert_intermediate_size / layouts.etp, "experts")
    kept |= mlp
    if not job.engine.fused_kernels:
        kept["experts_output"] = (
            job.element_bytes * config.hidden_size * copies
        )  # weighted after the experts
    if moe.shared_intermediate_size:
        kept |= _mlp(job, t * moe.shared_intermediate_size / layouts.tp, "shared")[0]
    # Beside the hidden layer's gradient: that of the experts' output or input, and of the copies
    # that travel.
    return kept, backward + 2 * job.element_bytes * config.hidden_size * copies


def routed_copies(job: Job, layouts: LayoutBatch) -> Elementwise:
    """Copies of tokens that the busiest expert rank receives from one micro-batch, array [n].

    Each tp rank routes its own slice of the tokens; a split expert needs all slices.
    """
    moe = job.config.moe
    assert moe is not None
    mean = tokens(job, layouts) / layouts.tp * moe.experts_per_token * layouts.etp
    return mean * job.busiest(layouts.ep)


def _every_second_product(
    gated: bool, kept: dict[str, Elementwise], hidden: Elementwise
) -> Elementwise:
    """torchtitan's selective recomputation: what goes into a layer, and the results of attention
    and of every second product, which in a llama are query, value, gate and the MLP's last."""
    first = sum(kept.get(f"{name}_hidden", 0.0) for name in ("mlp", "experts", "shared"))
    gate = first / (2 if gated else 1)
    attention = kept["query"] + kept["value"] + kept["attention_output"]
    return 2 * hidden + attention + gate + kept.get("experts_input", 0.0)
