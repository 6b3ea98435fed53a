"""A plan as overrides of a NeMo Megatron-Bridge recipe.

Megatron-Bridge runs Megatron-Core, so everything follows from Megatron-LM's arguments by another
name. The names are those of scripts/translate_mlm_to_bridge.py and of the configuration classes in
src/megatron/bridge/training/config.py. The recipe is the one whose defaults are Megatron-LM's,
or for latent attention, whose sizes that one has no keys for, DeepSeek-V3's.
"""

from __future__ import annotations

from fivefold.interop import megatron
from fivefold.interop.megatron_options import (
    EXPERT_LAYOUT,
    EXPERTS,
    LATENT,
    LAYOUT,
    MODEL,
    Value,
    parse_pattern,
)
from fivefold.interop.planned import Export, Planned, command, comment, script

CHECKED_AGAINST = (
    "NeMo Megatron-Bridge 0.7.0, commit 067f987df03b8355b03192d88d70f1709fedf51a (2026-08-22)"
)

FIELDS = (*MODEL, *LATENT, *EXPERTS, *LAYOUT, *EXPERT_LAYOUT)
NAMES = {f"--{option.name}": option.nemo for option in FIELDS if option.nemo} | {
    "--num-query-groups": "model.num_query_groups",
    "--kv-channels": "model.kv_channels",
    "--tokenizer-type": "tokenizer.tokenizer_type",
    "--qk-layernorm": "model.qk_layernorm",
    "--add-qkv-bias": "model.add_qkv_bias",
    "--attention-dropout": "model.attention_dropout",
    "--hidden-dropout": "model.hidden_dropout",
    "--window-size": "model.window_size",
    "--window-attn-skip-freq": "model.window_attn_skip_freq",
    "--position-embedding-type": "model.position_embedding_type",
    "--max-position-embeddings": "model.max_position_embeddings",
    "--rotary-base": "model.rotary_base",
    "--use-rope-scaling": "model.rope_scaling",
    "--rope-scaling-factor": "model.rope_scaling_factor",
    "--multi-latent-attention": "model.multi_latent_attention",
    "--moe-layer-freq": "model.moe_layer_freq",
    "--moe-grouped-gemm": "model.moe_grouped_gemm",
    "--moe-token-dispatcher-type": "model.moe_token_dispatcher_type",
    "--moe-router-score-function": "model.moe_router_score_function",
    "--moe-router-enable-expert-bias": "model.moe_router_enable_expert_bias",
    "--seq-length": "dataset.seq_length",
    "--global-batch-size": "train.global_batch_size",
    "--context-parallel-size": "model.context_parallel_size",
    "--cp-comm-type": "model.cp_comm_type",
    "--hierarchical-context-parallel-sizes": "model.hierarchical_context_parallel_sizes",
    "--num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "--use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--ckpt-format": "checkpoint.ckpt_format",
    "--recompute-granularity": "model.recompute_granularity",
    "--recompute-method": "model.recompute_method",
    "--recompute-num-layers": "model.recompute_num_layers",
}
"""The key of each argument whose value carries over."""

COMBINED = {
    "--swiglu": ["model.gated_linear_unit=true", "model.activation_func=silu"],
    "--disable-bias-linear": ["model.add_bias_linear=false"],
    "--untie-embeddings-and-output-weights": ["model.share_embeddings_and_output_weights=false"],
    "--group-query-attention": [],  # follows from model.num_query_groups
}

RECIPE = "vanilla_gpt_pretrain_config"
LATENT_RECIPE = "deepseek_v3_pretrain_1024gpu_h100_bf16_config"
LEFT_OVER = (
    "--pipeline-model-parallel-layout",
    "--num-virtual-stages-per-pipeline-rank",
    "--mtp-num-layers",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
)
"""What LATENT_RECIPE sets on its own and a plan may not have."""

PRECISION_ARGUMENTS = ("--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format")
PRECISIONS = {
    "fp16": "fp16_mixed",
    "bf16": "bf16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""`mixed_precision` of the ConfigContainer (training/mixed_precision.py)."""


def export(planned: Planned) -> Export:
    """A script that starts a recipe of Megatron-Bridge with the plan's overrides."""
    arguments, notes = megatron.options(planned)
    overrides = [
        override
        for name, value in arguments.items()
        if name not in PRECISION_ARGUMENTS
        for override in _overrides(name, value)
    ]
    precision = PRECISIONS.get(planned.plan.precision)
    if precision is None:
        notes.append(f"{planned.plan.precision} has no mixed_precision recipe; it is left out")
    else:
        overrides.append(f"mixed_precision={precision}")
    if planned.layout.zero >= 2:
        overrides.append("dist.use_megatron_fsdp=true")
        if "--use-tp-pp-dp-mapping" in arguments:
            notes.append("Megatron-Bridge refuses this rank order with FSDP (training/config.py)")
    notes.append(
        "data, learning rate, length of the run and checkpoints are not part of a plan: give "
        "train.train_iters, optimizer.lr and so on to the script, which passes them on"
    )
    recipe = RECIPE
    if planned.config.mla is not None:
        recipe = LATENT_RECIPE
        overrides += [f"{NAMES[name]}=null" for name in LEFT_OVER if name not in arguments]
        notes.append(f"settings that the plan does not have are those of {recipe}")
    start = ["scripts/training/run_recipe.py", "--recipe", recipe, "--mode", "pretrain"]
    program = command([start, *([override] for override in overrides)])
    text = script(comment(planned, CHECKED_AGAINST, notes), planned, program)
    return Export({"nemo.sh": text}, notes)


def _overrides(name: str, value: Value) -> list[str]:
    if name in COMBINED:
        return COMBINED[name]
    return [f"{NAMES[name]}={_hydra(name, value)}"]


def _hydra(name: str, value: Value) -> str:
    """A value in the grammar of Hydra's overrides, where brackets are lists and quotes protect."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return _list(value)
    if name == "--window-size":
        return _list(str(value).split(","))
    if name in ("--moe-layer-freq", "--window-attn-skip-freq"):
        return _list(parse_pattern(value)) if isinstance(value, str) else str(value)
    if name == "--pipeline-model-parallel-layout":
        return f'"{value}"'
    return str(value)


def _list(values: list[int] | list[str]) -> str:
    return f"[{','.join(map(str, values))}]"
