"""A plan as arguments of Megatron-LM's pretrain_gpt.py.

The options that stand for one field, and the release that meanings are from, are in
`megatron_options`; here are those that stand for several fields or for a part of one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from fivefold.interop.megatron_options import (
    CHECKED_AGAINST,
    EXPERT_LAYOUT,
    EXPERTS,
    LATENT,
    LAYOUT,
    LLAMA3_SCALING,
    MODEL,
    PIPELINE_BEFORE_DATA,
    SHARDING,
    Options,
    Value,
    pattern,
    write_fields,
)
from fivefold.interop.planned import Export, Planned, command, comment, script
from fivefold.layout.notation import ORDER
from fivefold.model.config import ModelConfig, MoEConfig

STRATEGIES = {stage: strategy for strategy, stage in SHARDING.items()}
PADDING = 128
"""--make-vocab-size-divisible-by, which Megatron multiplies by tp."""


def export(planned: Planned) -> Export:
    """A script that starts Megatron-LM with the plan's arguments."""
    arguments, notes = options(planned)
    notes.append(
        "data, learning rate, length of the run and checkpoints are not part of a plan: give "
        "--train-iters, --lr and so on to the script, which passes them on"
    )
    words = [words_of(name, value) for name, value in arguments.items()]
    text = script(
        comment(planned, CHECKED_AGAINST, notes),
        planned,
        command([["pretrain_gpt.py"], *words]),
        _environment(planned),
    )
    return Export({"megatron.sh": text}, notes)


def words_of(name: str, value: Value) -> list[str]:
    """One argument as the words of a command line."""
    if value is True:
        return [name]
    values = value if isinstance(value, list) else [value]
    return [name, *map(str, values)]


def options(planned: Planned) -> tuple[Options, list[str]]:
    """All arguments that follow from the plan, and notes on what has no argument."""
    notes: list[str] = []
    arguments: Options = {
        **_model(planned.config, planned, notes),
        **_precision(planned),
        **_splits(planned, notes),
        **_pipeline(planned, notes),
        **_data_parallel(planned, notes),
        **_recompute(planned),
    }
    return arguments, notes


# The model


def _model(config: ModelConfig, planned: Planned, notes: list[str]) -> Options:
    _note_model(config, planned, notes)
    arguments: Options = {
        **write_fields(MODEL, replace(config, mtp_layers=planned.mtp_layers)),
        "--tokenizer-type": "NullTokenizer",
        **_attention(config),
        **_positions(config, planned, notes),
    }
    if config.qk_norm or config.mla is not None:  # with latent attention, norms of its vectors
        arguments["--qk-layernorm"] = True
    if config.qkv_bias and not config.output_bias:
        arguments["--add-qkv-bias"] = True
    if not config.dropout:  # Megatron's default is 0.1
        arguments |= {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}
    if config.moe is not None:
        arguments |= _experts(config.moe, config, notes)
    return arguments


def _attention(config: ModelConfig) -> Options:
    arguments: Options = {}
    if config.mla is not None:
        arguments |= {"--multi-latent-attention": True, **write_fields(LATENT, config.mla)}
    else:
        arguments["--kv-channels"] = config.head_dim
    if config.num_kv_heads != config.num_heads:
        arguments["--group-query-attention"] = True
        arguments["--num-query-groups"] = config.num_kv_heads
    width = max(config.windows or (0,))
    if width:
        # Megatron counts the keys to the left and right of the query's own.
        arguments["--window-size"] = f"{width - 1},0"
        windowed = [int(window > 0) for window in config.windows or ()]
        arguments["--window-attn-skip-freq"] = pattern(windowed)
    return arguments


def _positions(config: ModelConfig, planned: Planned, notes: list[str]) -> Options:
    """Megatron wants the longest position that there can be, whatever the embedding."""
    sequence_length = planned.plan.sequence_length
    if config.learned_positions:
        longest = max(config.learned_positions, sequence_length)
        if longest > config.learned_positions:
            notes.append(
                f"the model has {config.learned_positions} learned positions and Megatron needs "
                f"one for each of the {sequence_length} tokens: --max-position-embeddings is raised"
            )
        return {
            "--position-embedding-type": "learned_absolute",
            "--max-position-embeddings": longest,
        }
    arguments: Options = {
        "--position-embedding-type": "rope",
        "--max-position-embeddings": sequence_length,
        "--rotary-base": round(config.rope_theta),
    }
    if config.rope_theta != round(config.rope_theta):
        notes.append(f"--rotary-base takes whole numbers: {config.rope_theta} is rounded")
    scaling = config.rope_scaling
    if scaling is None:
        return arguments
    if scaling == {**LLAMA3_SCALING, "factor": scaling.get("factor")}:
        arguments |= {"--use-rope-scaling": True, "--rope-scaling-factor": scaling["factor"]}
    else:
        notes.append(
            f"rope scaling {scaling} is not exported: --use-rope-scaling knows only Llama 3.1's "
            "(it changes no time and no memory)"
        )
    return arguments


def _experts(moe: MoEConfig, config: ModelConfig, notes: list[str]) -> Options:
    arguments: Options = {
        **write_fields(EXPERTS, moe),
        "--moe-layer-freq": 1 if all(moe.layers) else pattern(map(int, moe.layers)),
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }
    if moe.router_bias and config.family == "gpt_oss":
        notes.append("the router's bias has no argument: its weights are fewer by one an expert")
    elif moe.router_bias:
        arguments["--moe-router-score-function"] = "sigmoid"
        arguments["--moe-router-enable-expert-bias"] = True
    return arguments


def _note_model(config: ModelConfig, planned: Planned, notes: list[str]) -> None:
    biases = {config.output_bias}
    if config.moe is None or not all(config.moe.layers):
        biases.add(config.mlp_bias)
    if config.moe is not None:
        biases.add(config.moe.expert_bias)
    mixed_windows = {window for window in config.windows or () if window}
    unknown = {
        "biases on some of attention, MLP and experts only (--disable-bias-linear is for all)": (
            len(biases) > 1 or config.output_bias > config.qkv_bias
        ),
        f"{config.norms_per_layer} norms a layer (Megatron's GPT has 2)": (
            config.norms_per_layer != 2
        ),
        "norms of queries and keys beside those of latent vectors": (
            config.mla is not None and config.qk_norm
        ),
        "attention and MLP side by side": config.parallel_attention,
        f"windows of different widths {sorted(mixed_windows)} (the widest is exported)": (
            len(mixed_windows) > 1
        ),
        "a gate in the MLP that is not SwiGLU's (--swiglu, which costs the same, is)": (
            config.gated_mlp and config.family.startswith(("gemma", "gpt_oss"))
        ),
        "layers without rotary embedding and experts whose inputs are scaled": (
            config.family.startswith("llama4")
        ),
        "groups of experts that a token is limited to": (
            config.mla is not None and config.moe is not None
        ),
    }
    notes += [
        f"the model has {what}, which is not exported" for what, has in unknown.items() if has
    ]
    unit = PADDING * planned.layout.tp
    padded = -(-config.vocab_size // unit) * unit
    if padded != config.vocab_size:
        notes.append(
            f"Megatron pads the vocabulary of {config.vocab_size} to {padded}, a multiple of "
            f"{PADDING} x tp {planned.layout.tp}"
        )


# The precision and the splits


def _precision(planned: Planned) -> Options:
    """The recipe of fp8 is Megatron's default, delayed scaling."""
    by_precision: dict[str, Options] = {
        "fp32": {},
        "fp16": {"--fp16": True},
        "bf16": {"--bf16": True},
        "fp8": {"--bf16": True, "--fp8-format": "hybrid"},
        "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
        "nvfp4": {"--bf16": True, "--fp4-format": "e2m1"},
    }
    return by_precision[planned.plan.precision]


def _splits(planned: Planned, notes: list[str]) -> Options:
    layout = planned.layout
    arguments: Options = {
        **write_fields(LAYOUT, layout),
        "--context-parallel-size": layout.cp,
        "--seq-length": planned.plan.sequence_length,
        "--global-batch-size": planned.plan.global_batch,
    }
    if layout.cp > 1:
        arguments["--cp-comm-type"] = _sequence_kind(layout.ulysses, layout.ring)
    if layout.ulysses > 1 and layout.ring > 1:
        arguments["--hierarchical-context-parallel-sizes"] = [layout.ulysses, layout.ring]
    if planned.config.moe is not None:
        arguments |= write_fields(EXPERT_LAYOUT, layout)
        if layout.ep > 1 and layout.tp > 1 and not layout.sp:
            notes.append("Megatron warns that ep with tp must have --sequence-parallel: add sp")
    kv_heads = max(1, planned.config.num_kv_heads // layout.tp)
    if kv_heads % layout.ulysses:
        notes.append(
            f"a2a needs a multiple of {layout.ulysses} kv heads on a tp rank and there are "
            f"{kv_heads}: fivefold repeats them, Megatron does not"
        )
    return arguments | _rank_order(planned, notes)


def _rank_order(planned: Planned, notes: list[str]) -> Options:
    layout = planned.layout
    if planned.has_rank_order(ORDER):
        return {}
    if planned.has_rank_order(PIPELINE_BEFORE_DATA):
        if planned.config.moe is not None and layout.edp != layout.dp:
            notes.append(
                f"Megatron refuses order={'-'.join(PIPELINE_BEFORE_DATA)} where edp {layout.edp} "
                f"is not dp {layout.dp} (parallel_state.py)"
            )
        return {"--use-tp-pp-dp-mapping": True}
    notes.append(
        f"order={'-'.join(layout.order)} has no counterpart: Megatron places ranks as "
        f"{'-'.join(ORDER)} (or {'-'.join(PIPELINE_BEFORE_DATA)})"
    )
    return {}


def _sequence_kind(ulysses: int, ring: int) -> str:
    if ulysses > 1 and ring > 1:
        return "a2a+p2p"
    return "a2a" if ulysses > 1 else "p2p"


def _pipeline(planned: Planned, notes: list[str]) -> Options:
    layout = planned.layout
    arguments: Options = {}
    if layout.schedule != "1f1b":
        runs = "interleaved 1F1B" if layout.vpp > 1 else "1F1B"
        notes.append(f"schedule={layout.schedule} has no counterpart: Megatron runs {runs}")
    if layout.pp == 1:
        return arguments
    if planned.has_even_stages:
        if layout.vpp > 1:
            arguments["--num-virtual-stages-per-pipeline-rank"] = layout.vpp
        return arguments
    arguments["--pipeline-model-parallel-layout"] = pipeline_layout(
        planned.layers, planned.mtp_layers
    )
    return arguments


def pipeline_layout(layers: tuple[int, ...], mtp_layers: int) -> str:
    """`Et*7|(t*8|)*14t*7L`: E is the embedding, t a layer, m a module of multi-token prediction
    and L the loss; `|` ends a virtual stage."""
    first, *middle, last = (f"t*{count}" for count in layers)
    runs = ((stage, len(list(run))) for stage, run in groupby(middle))
    inner = "".join(f"({stage}|)*{times}" if times > 1 else f"{stage}|" for stage, times in runs)
    return f"E{first}|{inner}{last}{'m' * mtp_layers}L"


def _data_parallel(planned: Planned, notes: list[str]) -> Options:
    """Megatron shards over dp and cp together, as fivefold does; experts over edp."""
    layout = planned.layout
    arguments: Options = {}
    if layout.dp * layout.cp > 1:
        arguments["--overlap-grad-reduce"] = True
    if layout.zero == 0:
        return arguments
    arguments |= {"--use-distributed-optimizer": True, "--overlap-param-gather": True}
    if layout.dp_replicate > 1:
        arguments["--num-distributed-optimizer-instances"] = layout.dp_replicate
    if layout.zero >= 2:
        arguments |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": STRATEGIES[layout.zero],
            "--ckpt-format": "fsdp_dtensor",
        }
        if layout.tp > 1 or layout.cp > 1:
            notes.append(
                "Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset, tp and cp want it at 1 on "
                "GPUs before Blackwell: Megatron warns and the overlap of one of them is lost"
            )
    return arguments


def _recompute(planned: Planned) -> Options:
    layout = planned.layout
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":  # of "core_attn", Megatron's default
        return {"--recompute-granularity": "selective"}
    # Both methods count within a virtual stage, as recompute=full:N does.
    some = layout.recompute_layers > 0
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "block" if some else "uniform",
        "--recompute-num-layers": layout.recompute_layers if some else 1,
    }


def _environment(planned: Planned) -> str:
    """Overlapped messages must be queued in order on GPUs before Blackwell (arguments.py)."""
    layout = planned.layout
    if layout.zero >= 2 or layout.tp * layout.cp == 1:
        return ""
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
