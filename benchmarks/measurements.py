"""Published measurements as jobs and layouts: what `accuracy.py` and `fit.py` predict.

A file has the columns of benchmarks/data/measurements.csv, one published figure a row. What a row
leaves blank is filled by the rules in this module, which know the training program that a source
used, never its result. A row that says too little is refused with the reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from fivefold.cluster.cluster import Cluster
from fivefold.cluster.load import load_cluster
from fivefold.errors import UserError
from fivefold.layout.notation import Layout
from fivefold.layout.stages import split_layers
from fivefold.model.config import ModelConfig, MoEConfig
from fivefold.model.counts import flops_per_token, head_flops_per_token, layer_flops_per_token
from fivefold.model.huggingface.presets import load_preset, preset_names
from fivefold.plan.engines import ENGINES, Engine, Job

MEASUREMENTS = Path(__file__).parent / "data" / "measurements.csv"

TRUST = {
    "A": "MLPERF DGXC MCMOE KORTH DSV3 SIMUMAX",
    "A-": "MB FOLD MEGASC L3 MPT TITAN ZB NEMO24 ZOO NEM15",
    "B": "SC21 MLM MLM1 MSMOE BLOOM INTERN NANO NEMOLS PRIMUS FMS MTNLG BBG",
}
"""How far a source is trusted, by the prefix of its rows; all others are C."""

CLUSTERS = {
    "V100": "dgx2-v100",
    "A100-40": "dgx-a100-40gb",
    "A100": "dgx-a100",
    "A800": "hgx-a800",
    "H100 SXM (96GB": "grand-teton-h100-96gb",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "H800": "hgx-h800",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "MI250": "frontier-mi250x",
    "MI300": "mi300x",
    "MI325": "mi325x",
    "MI350": "mi350x",
    "MI355": "mi355x",
}
"""Which catalogue entry a GPU's name begins."""

NETWORKS = {"BLOOM": 6.25e9, "INTERN": 6.25e9}
"""Scale-out bytes/s a GPU and direction of sources that say so: 4 x 100 Gbit/s a node."""

FULL_ATTENTION = [
    "DGXC",
    "MPT",
    "NEMO24",
    "MLPERF",
    "KORTH",
    "MEGASC",
    "FMS",
    "NEM15",
    "NANO",
    "MLM",
    "MLM1",
    "FOLD",
    "SC21",
    "BLOOM",
    "MTNLG",
    "BBG",
    "INTERN",
]
"""Sources whose FLOPs count the full square of attention; the others count its causal half."""


PRINTED_MEMORY = {
    "SIMUMAX": "allocated",  # "max_allocated over ranks"
    "ZB": "allocated",  # torch's counter, in GiB
    "DGXC": "allocated",  # NeMo's peak_memory_usage: max_memory_allocated, in bytes
    "MCMOE": "allocated",  # added up by its authors
    "NANO": "reserved",  # not stated; see PROGRAMS
    "TITAN": "reserved",  # torchtitan logs max_reserved
}
"""Which memory a source prints: what torch has allocated, what it has reserved, or, for all others,
what nvidia-smi shows of the device."""


@dataclass(frozen=True)
class Case:
    """One published figure, ready to be predicted."""

    id: str
    source: str  # prefix of the id
    cluster: str  # rows of one model on one GPU
    trust: str
    gpu: str
    job: Job
    choices: tuple[Layout, ...]  # one; or several that the row leaves open, the likeliest first
    step_s: float | None  # measured
    memory_bytes: float | None  # measured
    printed_memory: str = "device"  # which memory that is: allocated, reserved or device
    notes: str = field(repr=False, default="")

    @property
    def kind(self) -> str:
        return "MoE" if self.job.config.moe else "dense"


def read(path: Path = MEASUREMENTS) -> tuple[list[Case], list[tuple[str, str]]]:
    """The cases of a file, and (id, reason) of each row that cannot be taken."""
    cases, skipped = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file, restval=""), start=2):
            name = row.get("id") or f"line {number}"
            try:
                cases.append(case(_Row(row)))
            except UserError as error:
                skipped.append((name, str(error)))
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                skipped.append((name, f"the row cannot be read: {error}"))
    return cases, skipped


class _Row(dict[str, str]):
    """A row of a file that may lack columns: what is not there is blank."""

    def __missing__(self, name: str) -> str:
        return ""


def case(row: dict[str, str]) -> Case:
    """One row. UserError, with the reason, where it says too little."""
    source = row["id"].rsplit("-", 1)[0]
    config = _config(row)
    if source == "ZB":  # not stated; what its four memory figures a method say
        config = replace(config, dropout=True)
    cluster = _cluster(row, source)
    sequence_length = _count(row, "seq_len", default=1024 if source == "MLM1" else None)
    engine = _engine(row, source)
    mtp = "MTP on" in row["notes"] or "incl. MTP" in row["notes"] or source == "DSV3"
    layouts, global_batch = _layouts(row, source, config, mtp)
    job = Job(
        config=config,
        cluster=cluster,
        sequence_length=sequence_length,
        global_batch=global_batch,
        precision=_precision(row),
        engine=engine,
        mtp=mtp,
    )
    if job.precision != "bf16":  # which stands for the 16 bits of the device
        cluster.device.peak_flops(job.precision)  # refuses what it has no unit for
    step_s, memory_bytes = _step_s(row, source, job), _memory_bytes(row, source)
    if step_s is None and memory_bytes is None:
        raise UserError("no step time and no memory can be read from the row")
    trust = next((grade for grade, names in TRUST.items() if source in names.split()), "C")
    return Case(
        id=row["id"],
        source=source,
        cluster=row["cluster"] or f"{row['model_name']} | {row['gpu']}",
        trust=trust,
        gpu=row["gpu"],
        job=job,
        choices=layouts,
        step_s=step_s,
        memory_bytes=memory_bytes,
        printed_memory=PRINTED_MEMORY.get(source, "device"),
        notes=row["notes"],
    )


# --- The model.


def _config(row: dict[str, str]) -> ModelConfig:
    name = row["model_name"].lower().replace("internal-", "")
    layers, hidden = _count(row, "n_layers"), _count(row, "hidden")
    if name in preset_names():
        config = load_preset(name)
        if (config.num_layers, config.hidden_size) == (layers, hidden):
            return config
    if row["attention_kind"] not in ("", "mha", "mqa", "gqa", "mla"):
        raise UserError(f"{row['attention_kind']} layers are not modelled")
    if "hybrid" in row["notes"].lower() or "mamba" in row["notes"].lower():
        raise UserError("state-space layers are not modelled")
    if "lora" in row["notes"].lower():
        raise UserError("LoRA trains a part of the weights only, which is not modelled")
    if row["attention_kind"] == "mla":
        raise UserError(f"the widths of {row['model_name']}'s latent attention are not given")
    heads = _count(row, "n_heads", default=max(1, hidden // 128))
    head_dim = _count(row, "head_dim", default=hidden // heads)
    experts = _count(row, "moe_experts", default=0)
    moe = _moe(row, experts, layers) if experts > 1 else None
    width = _count(row, "ffn_hidden", default=_count(row, "moe_ffn_hidden", default=4 * hidden))
    gated = "mlp=2mat" not in row["notes"]
    return ModelConfig(
        family="measured",
        vocab_size=_count(row, "vocab", default=51_200),
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_count(row, "n_kv_heads", default=heads),
        head_dim=head_dim + head_dim % 2,
        tied_embeddings="tied embeddings" in row["notes"].replace("tied embeddings False", ""),
        qkv_bias=not gated,
        output_bias=not gated,
        mlp_bias=not gated,
        qk_norm="Qwen3" in row["model_name"],
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        moe=moe,
        gated_mlp=gated,
        norm_kind="rms" if gated else "layer",
    )


def _moe(row: dict[str, str], experts: int, layers: int) -> MoEConfig:
    width = _count(row, "moe_ffn_hidden")
    stated = row["moe_shared"]
    shared = re.search(r"ffn (\d+)", stated)
    shared_width = int(shared[1]) if shared else int(float(stated or 0)) * width
    frequency = row["moe_layer_freq_or_first_dense"].lower()
    dense = re.search(r"first (\d+)", frequency)
    first = int(dense[1]) if dense else 0
    every = 2 if re.search(r"(every|each) (second|other|2)|alternat", frequency) else 1
    return MoEConfig(
        num_experts=experts,
        experts_per_token=_count(row, "moe_topk"),
        expert_intermediate_size=width,
        shared_intermediate_size=shared_width,
        shared_gate=False,
        norm_topk_prob=True,
        aux_loss_coef=0.0,
        layers=tuple(i >= first and (i + 1) % every == 0 for i in range(layers)),
    )


# --- The machine and the program.


def _cluster(row: dict[str, str], source: str) -> Cluster:
    name = next((entry for gpu, entry in CLUSTERS.items() if row["gpu"].startswith(gpu)), None)
    if row["gpu"] == "(any)":
        name = "dgx-h200"
    if name is None:
        raise UserError(f"the catalogue has no {row['gpu']}")
    return _with_network(name, _count(row, "n_gpus"), NETWORKS.get(source))


@cache
def _with_network(name: str, gpus: int, bandwidth: float | None) -> Cluster:
    cluster = load_cluster(name, gpus)
    if bandwidth is None:
        return cluster
    inner, *outer = cluster.system
    slower = (replace(tier, bandwidth=bandwidth) for tier in outer)
    return replace(cluster, system=(inner, *slower))


def _precision(row: dict[str, str]) -> str:
    text = row["precision"].upper()
    if "NVFP4" in text:
        return "nvfp4"
    if "MX" in text:
        return "mxfp8"
    if "FP8" in text or "FLOAT8" in text:
        return "fp8"
    if text and "16" not in text:
        raise UserError(f"the precision {row['precision']} is not known")
    return "bf16"


FSDP, MEGATRON = ENGINES["fsdp"], ENGINES["megatron"]
PROGRAMS = {
    **dict.fromkeys(["MB", "DGXC", "MLPERF", "NEMO24", "NEMOLS"], ENGINES["nemo"]),
    **dict.fromkeys(["MPT", "TITAN", "HFULY", "LLAMA1"], FSDP),
    "BLOOM": ENGINES["deepspeed"],
    "DSV3": ENGINES["deepseek"],
    # Before fused losses and Transformer Engine.
    "ZB": replace(MEGATRON, loss_bytes=6),
    # Gradients in 16 bits, in DDP's buckets, and accumulated in fp32; eager activation functions.
    # The bytes a logit are the best of those tried on this source's memory figures.
    "NANO": replace(
        MEGATRON,
        gradient_copy_bytes=2 + 2,  # beside those accumulated in fp32
        loss_bytes=6,
        placeholder_gradients=False,
        keeps_stage_outputs=True,
        overlapped_gradients=False,
        overlapped_weights=False,
    ),
    # The slope of this source's memory over GPUs is 26 bytes a parameter: the optimizer step
    # copies gradients flat in 16 bits and in fp32, and runs for-each AdamW.
    "INTERN": replace(
        FSDP,
        overlapped_weights=False,
        gradient_bytes=2,
        reduced_bytes=2,
        step_bytes=12,
        keeps_gathered=False,
    ),
    "FMS": replace(FSDP, reduced_bytes=2),
}
"""The program of a source; that of all others is Megatron-Core."""
INFERRED = ("NANO", "INTERN", "ZB")
"""Sources whose memory habits are inferred from their own memory figures."""
BEFORE_FLASH = ["SC21", "KORTH", "MLM1", "BLOOM", "MTNLG", "BBG", "OPT", "NEOX", "GLM", "ZB"]
"""FlashAttention was published in May 2022; the programs of these sources are from before it, or,
as the memory of ZB says, do without it."""


def _engine(row: dict[str, str], source: str) -> Engine:
    """The program of a source, with what the row's notes say of it."""
    notes, engine = row["notes"], PROGRAMS.get(source, MEGATRON)
    if "MaxText" in notes or "PaXML" in notes:
        engine = FSDP
    if engine.name == "fsdp" and source != "INTERN":  # which has fused kernels of its own
        compiled = any(word in notes for word in ("torch.compile", "MaxText", "PaXML"))
        engine = replace(engine, fused_kernels=compiled)
    if "no TP/PP overlap" in notes:
        engine = replace(engine, overlapped_gradients=False, overlapped_weights=False)
    if "BF16 optimizer" in notes:  # accumulates in fp32
        engine = replace(engine, gradient_bytes=4, gradient_copy_bytes=2)
    graphs_on_gb_only = "CUDA graphs in GB" in notes and not row["gpu"].startswith("GB")
    hidden = ("A2A overlap" in notes and "no A2A overlap" not in notes) or "Scale-MoE:" in notes
    # Token dispatchers that send a token once to each node (DeepEP, HybridEP).
    once_a_node = "DeepEP" in notes or "HybridEP" in notes or source == "MB"
    pipelined = "AsyncTP" in notes or "async TP" in notes
    if source == "MB":
        engine = _megatron_bridge(engine, row)
    return replace(
        engine,
        flash_attention=source not in BEFORE_FLASH,
        cuda_graphs=engine.cuda_graphs or ("CUDA graphs" in notes and not graphs_on_gb_only),
        overlapped_experts=engine.overlapped_experts
        or hidden
        or "DualPipe" in row["pipeline_schedule"],
        once_a_node=engine.once_a_node or once_a_node,
        # Messages in pieces beside a product exist for 16 bits and plain fp8 products only.
        pipelined_tensor_messages=pipelined
        or (engine.pipelined_tensor_messages and _precision(row) in ("bf16", "fp8")),
        host_optimizer="optimizer-state offload" in notes,
        selective=_selective(row["recompute"], row["moe_experts"] not in ("", "0", "1")),
    )


def _megatron_bridge(engine: Engine, row: dict[str, str]) -> Engine:
    """What its recipes set (NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs): graphs for
    8B models, for NVFP4 and for mixtures on GB200 and GB300; a fused loss; expert messages beside
    other micro-batches on H100 and B300; and since release 26.06 fused expert kernels."""
    release = re.search(r"container (\d+\.\d+)", row["notes"])
    recent = release is not None and float(release[1]) >= 26.06
    mixture, on_grace = row["moe_experts"] not in ("", "0", "1"), row["gpu"].startswith("GB")
    small, nvfp4 = float(row["params_b"] or 100) < 10, "NVFP4" in row["precision"]
    return replace(
        engine,
        cuda_graphs=small or nvfp4 or (mixture and on_grace),
        loss_bytes=2,
        overlapped_experts=mixture and row["gpu"].startswith(("H100", "B300")),
        fused_experts=mixture and recent and "regression" not in row["notes"],
    )


def _selective(text: str, mixture: bool) -> str:
    """What a source's selective recomputation runs again; not said, what programs do first: light
    operations of mixtures, attention of others."""
    if "per-op" in text:
        return "products"
    if "attn" in text or "attention" in text:
        return "attention"
    light = any(word in text for word in ("norm", "act", "Norm"))
    return "elementwise" if light or (mixture and not text) else "attention"


# --- The layout.


def _layouts(
    row: dict[str, str], source: str, config: ModelConfig, mtp: bool
) -> tuple[tuple[Layout, ...], int]:
    gpus = _count(row, "n_gpus")
    tp, pp, cp = (_count(row, name, default=1) for name in ("tp", "pp", "cp"))
    dp = gpus // (tp * pp * cp)
    if tp * pp * cp * dp != gpus:
        raise UserError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    ep = _count(row, "ep", default=1) if config.moe else 1
    # Not said: Megatron's default, experts split like the other matrices, if EP leaves room.
    etp = _count(row, "etp", default=tp if ep <= dp * cp else 1) if config.moe else 1
    if tp * cp * dp % (ep * (etp if etp in (1, tp) else 1)):
        raise UserError(f"ep {ep} x etp {etp} does not divide the {tp * cp * dp} GPUs of a stage")
    if pp > config.num_layers:
        raise UserError(f"pp {pp} is more than the {config.num_layers} layers")
    zero, replicas = _zero(row, source, dp * cp, gpus)
    global_batch = _count(row, "global_batch", default=_batch_not_given(row, source, dp, pp))
    a2a = "a2a" in row["cp_kind"] or "all-to-all" in row["cp_kind"]
    schedule = _schedule(row)
    chosen = []
    for recompute, layers in _recomputes(row, config.num_layers // pp):
        for vpp in _chunks(row, config, pp):
            for micro_batch in _micro_batches(row, source, global_batch, dp, pp):
                chosen.append(
                    Layout(
                        tp=tp,
                        sp=tp > 1 and row["sp"] != "no",
                        pp=pp,
                        vpp=vpp,
                        dp=dp,
                        dp_replicate=replicas if zero else 1,
                        zero=zero,
                        ep=ep,
                        etp=etp if etp in (1, tp) else 1,
                        ulysses=cp if a2a else 1,
                        ring=1 if a2a else cp,
                        micro_batch=micro_batch,
                        accumulation=max(1, round(global_batch / (dp * micro_batch))),
                        recompute=recompute,
                        recompute_layers=layers if layers < config.num_layers // (pp * vpp) else 0,
                        schedule=schedule,
                        layers=_stages(config, pp * vpp) if mtp and pp > 1 else None,
                    )
                )
    return tuple(chosen), global_batch


def _batch_not_given(row: dict[str, str], source: str, dp: int, pp: int) -> int | None:
    """InternEvo's table has one micro-batch. Memory needs only that the pipeline is full."""
    if source == "INTERN":
        return dp
    if row["metric_name"] == "peak_memory":
        return dp * _count(row, "micro_batch", default=1) * (4 * pp if pp > 1 else 1)
    return None


def _stages(config: ModelConfig, stages: int) -> tuple[int, ...]:
    """Layers of each stage where the last one also has multi-token prediction: its module is a
    layer and a second head, and heads stay in 16 bits."""
    layer = layer_flops_per_token(config, config.layer_kinds[-1], 4096, causal=True)
    head = 1.5 * head_flops_per_token(config) / layer
    return split_layers(config.num_layers, stages, 0.5, 1 + 2 * head)


def _zero(row: dict[str, str], source: str, replicas: int, gpus: int) -> tuple[int, int]:
    """ZeRO stage, and over how many groups the state is only replicated."""
    text = row["zero_stage_or_fsdp"]
    group = re.search(r"group (\d+)", text)
    groups = max(1, replicas // int(group[1])) if group else 1
    if "FSDP=0" in text:
        return 1, 1
    if "SHARD_GRAD" in text:
        return 2, 1
    if text.startswith("HSDP"):
        return 3, max(1, replicas // _count(row, "gpus_per_node", default=8))
    if "FSDP" in text or "ZeRO-3" in text:
        return 3, groups
    if "ZeRO-0" in text or replicas == 1:
        return 0, 1
    if "ZeRO-1" in text or "distributed optimizer" in text:
        return 1, groups
    # Not said: Megatron-Core's recipes shard the optimizer; the programs of 2021 and 2022 did not.
    return (0 if _count(row, "year", default=2024) <= 2022 else 1), 1


def _recomputes(row: dict[str, str], layers: int) -> list[tuple[str, int]]:
    """Kinds of recomputation with the layers of a stage that are, 0 = all. Not said: the least that
    fits in memory."""
    text = row["recompute"]
    if text:
        mode = text.split()[0]
        if mode not in ("none", "selective", "full"):
            raise UserError(f"recompute {text!r} is not known")
        if text == "selective (mlp)":  # of the dense layers, which are few
            mode = "none"
        return [(mode, 0)]
    if row["gpu"].startswith("GB") and row["zero_stage_or_fsdp"].startswith("FSDP ("):
        return [("none", 0)]  # keeps activations in host memory instead
    some = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < layers]
    return [("none", 0), ("selective", 0), *(("full", n) for n in some), ("full", 0)]


def _chunks(row: dict[str, str], config: ModelConfig, pp: int) -> list[int]:
    """Chunks a pipeline rank. Not said, and the schedule neither: the best, for runs were tuned."""
    if pp == 1:
        return [1]
    if row["vpp"].isdigit():
        return [int(row["vpp"])]
    if row["vpp"] == "layers per stage":
        return [config.num_layers // pp]
    text = row["pipeline_schedule"].lower()
    if text and "interleaved" not in text and text != "1f1b-i":
        return [1]
    per_rank = config.num_layers // pp
    chunks = [v for v in range(2, 13) if per_rank % v == 0] or [1]
    return chunks if text else [1, *chunks]


def _micro_batches(
    row: dict[str, str], source: str, global_batch: int, dp: int, pp: int
) -> list[int]:
    if row["micro_batch"]:
        return [_count(row, "micro_batch")]
    share = max(1, global_batch // dp)
    if source == "TITAN" and pp > 1:  # as many micro-batches as pipeline ranks, its default
        return [max(1, share // pp)]
    return [m for m in (1, 2, 4, 8) if share % m == 0]


def _schedule(row: dict[str, str]) -> str:
    text = row["pipeline_schedule"].lower()
    if "dualpipe" in text:
        return "dualpipe"
    if text == "zb-1p" or "zero-bubble" in text:
        return "zb-h1"
    if "zbv" in text:
        return "zb-v"
    if text in ("zb-2p", "v-half", "v-min"):
        raise UserError(f"the schedule {text} is not known")
    return "1f1b"


# --- What was measured.


def _step_s(row: dict[str, str], source: str, job: Job) -> float | None:
    metric, gpus = row["metric_name"], _count(row, "n_gpus")
    tokens = job.global_batch * job.sequence_length
    if metric == "step_time":
        return _figure(row["metric_value"], metric)
    if metric == "tokens_per_s_per_gpu":
        return tokens / (_figure(row["metric_value"], metric) * gpus)
    if metric == "tokens_per_s":
        return tokens / _figure(row["metric_value"], metric)
    if metric == "samples_per_s_per_gpu":
        return job.global_batch / (_figure(row["metric_value"], metric) * gpus)
    if metric == "samples_per_s":
        return job.global_batch / _figure(row["metric_value"], metric)
    if metric in ("mfu", "hfu", "model_tflops_per_gpu", "hardware_tflops_per_gpu"):
        return tokens * _flops_per_token(row, source, job) / (_flops_per_s(row, job) * gpus)
    if row["also_step_time_s"]:
        return _figure(row["also_step_time_s"], "also_step_time_s")
    return None


def _flops_per_s(row: dict[str, str], job: Job) -> float:
    """Of a device; a utilisation is of its 16-bit peak."""
    value = _figure(row["metric_value"], row["metric_name"])
    if row["metric_name"] in ("mfu", "hfu"):
        return value / 100 * job.cluster.device.peak_flops(job.cluster.device.half)
    return value * 1e12


def _flops_per_token(row: dict[str, str], source: str, job: Job) -> float:
    """As the source counts them."""
    flops = flops_per_token(job.config, job.sequence_length, source not in FULL_ATTENTION)
    recomputed = row["metric_name"] in ("hfu", "hardware_tflops_per_gpu")
    # One more forward pass, where all is recomputed.
    return flops * 4 / 3 if recomputed and row["recompute"] != "none" else flops


def _memory_bytes(row: dict[str, str], source: str) -> float | None:
    if row["metric_name"] == "peak_memory":
        return _figure(row["metric_value"], "peak_memory") * 1e9
    match = re.match(r"([\d.]+)\s*(GiB)?", row["also_peak_mem_gb"])
    if not match:
        return None
    unit = 2**30 if match[2] or source == "ZB" else 1e9
    return _figure(match[1], "also_peak_mem_gb") * unit


MOST = {
    "n_layers": 10_000,
    "n_heads": 100_000,
    "n_kv_heads": 100_000,
    "moe_experts": 100_000,
    "n_gpus": 10_000_000,
}
MOST_OF_ALL = 1_000_000_000
"""What no number of a row that makes sense is above."""


def _count(row: dict[str, str], name: str, default: int | None = None) -> int:
    """A number of things, 1 or more. Zero counts as not given."""
    text = row[name].strip().replace(",", "")
    try:
        number = int(float(text or 0))
    except (ValueError, OverflowError):
        raise UserError(f"{name} {text!r} is no number") from None
    most = MOST.get(name, MOST_OF_ALL)
    if not 0 <= number <= most:
        raise UserError(f"{name} is {number:.6g}, and must be from 1 to {most}")
    if number == 0 and default is None:
        raise UserError(f"{name} is not given")
    return number or default or 0


SMALLEST = 1e-9
"""Of a step time, a rate or an amount of memory, in the units of the file."""


def _figure(text: str, name: str) -> float:
    """A measured figure, above zero."""
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{name} {text!r} is no number") from None
    if not SMALLEST < number < 1 / SMALLEST:
        raise UserError(f"{name} is {text}, which is no figure of a training step")
    return number
