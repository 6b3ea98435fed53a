"""A plan as a DeepSpeed configuration.

DeepSpeed takes a JSON file; what it does not read from there (pipeline stages, recomputation) is
set in the training program's own code, and the notes say how. Meanings are from
deepspeed/runtime/config.py, deepspeed/runtime/zero/config.py, deepspeed/module_inject/
auto_ep_folding.py, deepspeed/runtime/pipe/ and docs/_pages/config-json.md.
"""

from __future__ import annotations

import json
from typing import TypeAlias

from fivefold.interop.planned import Export, Planned, command, comment, script
from fivefold.layout.notation import ORDER

CHECKED_AGAINST = "DeepSpeed 0.19.6, commit edaa7221267243c7be7fb49c5d5f5c4fb97b4641 (2026-08-22)"

Setting: TypeAlias = int | str | dict[str, "Setting"]


def export(planned: Planned) -> Export:
    """DeepSpeed's configuration, and a script that starts a program of yours with it."""
    notes = _notes(planned)
    words = command([["--deepspeed", "--deepspeed_config", "deepspeed.json"]])
    program = f'"${{TRAIN_SCRIPT:?your program}}" {words}'
    text = script(comment(planned, CHECKED_AGAINST, notes), planned, program)
    settings = json.dumps(_settings(planned), indent=2) + "\n"
    return Export({"deepspeed.json": settings, "deepspeed.sh": text}, notes)


def _settings(planned: Planned) -> dict[str, Setting]:
    layout, precision = planned.layout, planned.plan.precision
    zero: dict[str, Setting] = {"stage": layout.zero}
    if layout.zero:
        zero["overlap_comm"] = True
    if layout.zero == 3 and layout.dp_replicate > 1:
        zero["mics_shard_size"] = layout.dp_shard * layout.cp
    settings: dict[str, Setting] = {
        "train_batch_size": planned.plan.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": zero,
    }
    if precision != "fp32":
        settings["fp16" if precision == "fp16" else "bf16"] = {"enabled": True}
    settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if layout.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.ulysses > 1:
        settings["sequence_parallel_size"] = layout.ulysses
    if layout.ep > 1:
        settings["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    return settings


def _notes(planned: Planned) -> list[str]:
    candidates = {**_pipeline_notes(planned), **_other_notes(planned)}
    notes = [note for note, applies in candidates.items() if applies]
    notes.append(
        f"the model and the sequence length of {planned.plan.sequence_length} tokens are the "
        "program's; data, optimizer and checkpoints are not part of a plan"
    )
    return notes


def _pipeline_notes(planned: Planned) -> dict[str, bool]:
    layout = planned.layout
    method = "uniform" if planned.has_even_stages else "parameters"
    return {
        f"pp {layout.pp} is set in the program: deepspeed.pipe.PipelineModule(num_stages="
        f'{layout.pp}, partition_method="{method}")': layout.pp > 1,
        f"layers a stage {list(planned.layers)} have no counterpart: PipelineModule balances by "
        "number of layers or of parameters": layout.pp > 1 and not planned.has_even_stages,
        f"vpp {layout.vpp} has no counterpart: DeepSpeed has no virtual pipeline stages": (
            layout.vpp > 1
        ),
        f"schedule={layout.schedule} has no counterpart: DeepSpeed's pipeline runs 1F1B": (
            layout.pp > 1 and layout.schedule != "1f1b"
        ),
        f"DeepSpeed refuses zero {layout.zero} with pipeline parallelism: zero1 is the most": (
            layout.pp > 1 and layout.zero >= 2
        ),
    }


def _other_notes(planned: Planned) -> dict[str, bool]:
    layout, precision = planned.layout, planned.plan.precision
    return {
        "sp has no counterpart: AutoTP keeps whole sequences on every tp rank": layout.sp,
        f"ulysses {layout.ulysses} also needs UlyssesSPAttentionHF.register_with_transformers in "
        "the program": layout.ulysses > 1,
        f"ring {layout.ring} has no counterpart: DeepSpeed splits sequences by Ulysses only": (
            layout.ring > 1
        ),
        f"etp {layout.etp} has no counterpart: DeepSpeed keeps experts whole (AutoEP refuses it)": (
            planned.config.moe is not None and layout.etp > 1
        ),
        "DeepSpeed refuses tp beside ep together with pp, ulysses or zero3": (
            layout.tp > 1
            and layout.ep > 1
            and (layout.pp > 1 or layout.ulysses > 1 or layout.zero == 3)
        ),
        f"AutoEP refuses tp {layout.tp} with ep 1 and is left off: AutoTP splits the experts": (
            planned.config.moe is not None and layout.tp > 1 and layout.ep == 1
        ),
        f"dp_replicate {layout.dp_replicate} is MiCS (mics_shard_size), which needs "
        "deepspeed.zero.MiCS_Init in the program": layout.zero == 3 and layout.dp_replicate > 1,
        f"dp_replicate {layout.dp_replicate} has no counterpart at zero {layout.zero}: the state "
        "is sharded over all of dp": layout.zero in (1, 2) and layout.dp_replicate > 1,
        f"recompute={layout.recompute} is set in the program: deepspeed.checkpointing.checkpoint "
        "or the model's gradient_checkpointing_enable() recompute whole layers": (
            layout.recompute != "none"
        ),
        f"{precision} has no counterpart in the configuration: bf16 is exported": (
            precision in ("fp8", "mxfp8", "nvfp4")
        ),
        "multi-token prediction is the program's own": planned.mtp_layers > 0,
        f"order={'-'.join(layout.order)} has no counterpart: DeepSpeed places ranks as "
        f"{'-'.join(ORDER)}": not planned.has_rank_order(ORDER),
    }
