"""A plan as a torchtitan configuration.

A torchtitan run is a Python function that returns a `Trainer.Config`; its command line options are
frozen and will go (torchtitan/config/README.md). So the export is such a function, made from the
shipped configuration of the model. Meanings are from torchtitan/config/configs.py,
torchtitan/distributed/parallel_dims.py, pipeline_parallel.py and activation_checkpoint.py.
"""

from __future__ import annotations

from fivefold.interop.planned import Export, Planned, command, comment, script
from fivefold.layout.notation import ORDER
from fivefold.layout.stages import stage_ranges
from fivefold.model.config import ModelConfig

CHECKED_AGAINST = "torchtitan 0.2.2, commit b5bcd76c66d0acb1a08b176d9639425bc55e0b2a (2026-08-21)"

MODELS = {
    ("llama", 4096, 32, 0): ("llama3", "llama3_8b", "8B"),
    ("llama", 8192, 80, 0): ("llama3", "llama3_70b", "70B"),
    ("llama", 16384, 126, 0): ("llama3", "llama3_405b", "405B"),
    ("qwen3", 1024, 28, 0): ("qwen3", "qwen3_0_6b", "0.6B"),
    ("qwen3", 2048, 28, 0): ("qwen3", "qwen3_1_7b", "1.7B"),
    ("qwen3", 5120, 40, 0): ("qwen3", "qwen3_14b", "14B"),
    ("qwen3", 5120, 64, 0): ("qwen3", "qwen3_32b", "32B"),
    ("qwen3_moe", 2048, 48, 128): ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    ("deepseek_v3", 7168, 61, 256): ("deepseek_v3", "deepseek_v3_671b", "671B"),
}
"""Module, configuration and flavor by (family, hidden size, layers, experts)."""

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""`pipeline_parallel_schedule`: the names of torch.distributed.pipelining."""

CONVERTERS = {
    "fp8": ("Float8LinearConverter", 'filter_fqns=["lm_head"]'),
    "mxfp8": ("MXFP8LinearConverter", 'fqns=["layers"]'),
    "nvfp4": ("NVFP4LinearConverter", 'fqns=["layers"]'),
}
"""What makes the products of the layers, not the head's, narrow: class and its selection."""


def export(planned: Planned) -> Export:
    """A module that holds torchtitan's configuration, and a script that starts it."""
    notes = _notes(planned)
    head = comment(planned, CHECKED_AGAINST, notes)
    module, config = ["--module", "fivefold_torchtitan"], ["--config", "planned"]
    program = command([["-m", "torchtitan.train"], module, config])
    setup = 'export PYTHONPATH="$(dirname "$0"):${PYTHONPATH:-}"\n'
    files = {
        "fivefold_torchtitan.py": head + _configuration(planned),
        "torchtitan.sh": script(head, planned, program, setup),
    }
    return Export(files, notes)


def _configuration(planned: Planned) -> str:
    imports = [
        "from torchtitan.config import ParallelismConfig",
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        "from torchtitan.trainer import Trainer",
    ]
    shipped = _shipped(planned.config)
    if shipped is None:
        base = NO_BASE
    else:
        base = ""
        module, function, _ = shipped
        imports.append(f"from torchtitan.models.{module}.config_registry import {function} as base")
    lines = [
        "config = base()",
        f"config.parallelism = ParallelismConfig(\n{_keywords(_parallelism(planned))}    )",
        *(f"config.training.{name} = {value!r}" for name, value in _training(planned).items()),
        f"config.activation_checkpoint = {_activation_checkpoint(planned)}",
    ]
    if planned.plan.precision in CONVERTERS and shipped is not None:
        module, _, flavor = shipped
        converter, selection = CONVERTERS[planned.plan.precision]
        imports.append(f"from torchtitan.components.quantization import {converter}")
        imports.append(f"from torchtitan.models.{module} import model_registry")
        lines += [
            "config.compile.enable = True",
            f"converter = {converter}.Config(model_compile_enabled=True, {selection})",
            f"config.model_spec = model_registry({flavor!r}, converters=[converter])",
        ]
    body = "".join(f"    {line}\n" for line in [*lines, "return config"])
    header = "\n".join(sorted(imports))
    return f"\n{header}\n\n\n{base}def planned() -> Trainer.Config:\n{body}"


NO_BASE = """def base() -> Trainer.Config:
    raise NotImplementedError("torchtitan ships no configuration of this model: return one here")


"""


def _shipped(config: ModelConfig) -> tuple[str, str, str] | None:
    experts = 0 if config.moe is None else config.moe.num_experts
    return MODELS.get((config.family, config.hidden_size, config.num_layers, experts))


def _keywords(values: dict[str, object]) -> str:
    return "".join(f"        {name}={value!r},\n" for name, value in values.items())


def _parallelism(planned: Planned) -> dict[str, object]:
    layout = planned.layout
    shards = layout.zero > 0
    values: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp_replicate if shards else layout.dp,
        "data_parallel_shard_degree": layout.dp_shard if shards else 1,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.sp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        interleaved = layout.vpp > 1 and layout.schedule == "1f1b"
        schedule = "Interleaved1F1B" if interleaved else SCHEDULES.get(layout.schedule, "1F1B")
        values |= {
            "pipeline_parallel_schedule": schedule,
            "num_pp_microbatches": layout.accumulation,
            "module_fqns_per_model_part": _modules_of_stages(planned.layers),
        }
    if planned.config.moe is not None:
        values["expert_parallel_degree"] = layout.ep
    return values


def _modules_of_stages(layers: tuple[int, ...]) -> list[list[str]]:
    """The modules of each virtual stage by name, in model order."""
    stages = [[f"layers.{layer}" for layer in stage] for stage in stage_ranges(layers)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def _training(planned: Planned) -> dict[str, int | str]:
    """torchtitan counts tokens, not sequences; accumulation follows from the two counts."""
    length = planned.plan.sequence_length
    values: dict[str, int | str] = {
        "max_context_length": length,
        "num_tokens_per_microbatch_per_dp_rank": planned.layout.micro_batch * length,
        "num_tokens_per_train_step": planned.plan.global_batch * length,
    }
    if planned.plan.precision == "fp32":
        values["mixed_precision_param"] = "float32"
    return values


def _activation_checkpoint(planned: Planned) -> str:
    modes = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
    return modes[planned.layout.recompute]


def _notes(planned: Planned) -> list[str]:
    layout, config = planned.layout, planned.config
    unshared_experts = layout.zero == 0 and layout.cp * layout.tp % layout.ep > 0
    candidates = {
        "torchtitan ships no configuration of this model: base() in the file must be written": (
            _shipped(config) is None
        ),
        "fp16 has no counterpart: torchtitan's mixed precision is bfloat16": (
            planned.plan.precision == "fp16"
        ),
        f"zero {layout.zero} has no counterpart: FSDP shards weights, gradients and optimizer "
        'state; fsdp_reshard_after_forward="never" keeps gathered weights until the backward '
        "pass, which is nearest": layout.zero in (1, 2),
        f"ep {layout.ep} must divide dp_shard 1 x cp {layout.cp} x tp {layout.tp} where zero is "
        "0, for torchtitan takes experts' ranks from what is sharded: use zero3": unshared_experts,
        f"etp {layout.etp} has no counterpart: torchtitan keeps experts whole over ep": (
            config.moe is not None and layout.etp > 1
        ),
        f"ulysses {layout.ulysses} has no counterpart: torchtitan's context parallelism gathers "
        "keys and values": layout.ulysses > 1,
        "ring is done as one gather of keys and values, not step by step beside attention": (
            layout.ring > 1
        ),
        "recompute=selective recomputes attention here; torchtitan's SelectiveAC keeps attention "
        "and products and recomputes the rest": layout.recompute == "selective",
        f"recompute=full:{layout.recompute_layers} has no counterpart: every layer is recomputed": (
            layout.recompute_layers > 0
        ),
        f"schedule={layout.schedule} has no counterpart: 1F1B is exported": (
            layout.pp > 1 and layout.schedule not in SCHEDULES
        ),
        f"order={'-'.join(layout.order)} has no counterpart: torchtitan places ranks as "
        f"{'-'.join(ORDER)}": not planned.has_rank_order(ORDER),
        "the experts' grouped products stay in bf16: only linear layers are converted": (
            config.moe is not None and planned.plan.precision in CONVERTERS
        ),
        "multi-token prediction is set in the model's own configuration, not here": (
            planned.mtp_layers > 0
        ),
    }
    notes = [note for note, applies in candidates.items() if applies]
    notes.append(
        "data, learning rate, length of the run and checkpoints are those of torchtitan's own "
        "configuration of the model"
    )
    return notes
