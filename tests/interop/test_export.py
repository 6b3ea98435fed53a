"""Exports: what each engine is given, what is noted, and that Megatron's can be read back."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.interop import EXPORTERS, Export, deepspeed, export, megatron, nemo, torchtitan
from fivefold.interop.megatron import export as export_megatron
from fivefold.interop.megatron import options, pipeline_layout
from fivefold.interop.megatron_read import FAMILY, read_megatron
from fivefold.interop.planned import Planned
from fivefold.layout.notation import Layout, parse
from fivefold.layout.stages import split_layers
from fivefold.model.config import MLAConfig, ModelConfig, MoEConfig
from fivefold.model.huggingface.presets import load_preset
from fivefold.plan.planfile import PlanFile

LLAMA = "llama-3.1-8b"
DEEPSEEK = "deepseek-v3"


def plan(layout: str, model: str = LLAMA, **changes: object) -> PlanFile:
    parsed = parse(layout)
    values = {
        "layout": layout,
        "model": model,
        "cluster": "dgx-h100",
        "gpus": parsed.world_size,
        "sequence_length": 4096,
        "global_batch": parsed.global_batch,
        **changes,
    }
    return PlanFile.model_validate(values)


def noted(made: Export, *words: str) -> bool:
    return any(all(word in note for word in words) for note in made.notes)


def megatron_words(layout: str, model: str = LLAMA, **changes: object) -> list[str]:
    return shlex.split(export(plan(layout, model, **changes), "megatron").files["megatron.sh"])


def after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


# Every engine


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK, "gpt-oss-120b", "gemma-2-9b", "megatron-22b"])
def test_every_file_says_what_it_was_checked_against_and_is_well_formed(engine, model):
    made = export(plan("tp2 sp pp2 vpp2 dp4 zero1 ulysses2 ring2 ga4", model), engine)
    for name, text in made.files.items():
        if name.endswith(".json"):
            json.loads(text)
            continue
        assert "Checked against" in text
        for note in made.notes:
            assert note in text
        if name.endswith(".py"):
            ast.parse(text)
        else:
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_an_engine_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="megatron, torchtitan"):
        export(plan("dp2"), "fairseq")


@pytest.mark.parametrize("engine", EXPORTERS)
def test_a_plan_that_contradicts_itself_is_refused(engine):
    with pytest.raises(UserError, match="global_batch"):
        export(plan("dp2", global_batch=3), engine)


def test_nodes_that_are_not_full_are_refused():
    with pytest.raises(UserError, match="gpus_per_node"):
        export(plan("dp12"), "torchrun")
    text = export(plan("dp12", gpus_per_node=4), "torchrun").files["torchrun.sh"]
    assert "--nnodes 3 --nproc-per-node 4" in text


# Megatron


def test_the_published_llama_3_layout_in_megatrons_words():
    words = megatron_words("tp8 sp pp16 dp64 zero1 ga16", "llama-3.1-405b")
    assert after(words, "--tensor-model-parallel-size") == "8"
    assert after(words, "--pipeline-model-parallel-layout") == "Et*7|(t*8|)*14t*7L"
    assert after(words, "--num-query-groups") == "8"
    assert "--sequence-parallel" in words
    assert "--use-distributed-optimizer" in words
    assert "--num-virtual-stages-per-pipeline-rank" not in words
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in words


def test_even_stages_need_no_pipeline_layout():
    words = megatron_words("pp4 vpp2 dp2 ga4")
    assert after(words, "--num-virtual-stages-per-pipeline-rank") == "2"
    assert "--pipeline-model-parallel-layout" not in words


def test_a_multi_token_prediction_module_goes_before_the_loss():
    words = megatron_words("pp4 dp2 ga4", DEEPSEEK, mtp=True)
    assert after(words, "--mtp-num-layers") == "1"
    assert after(words, "--pipeline-model-parallel-layout").endswith("mL")
    assert "--mtp-num-layers" not in megatron_words("pp4 dp2 ga4", DEEPSEEK)


def test_pipeline_layouts_are_written_short():
    assert pipeline_layout((3, 5), 0) == "Et*3|t*5L"
    assert pipeline_layout((1, 2, 2, 3, 1), 2) == "Et*1|(t*2|)*2t*3|t*1mmL"


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("ulysses4 dp2", "a2a"), ("ring4 dp2", "p2p"), ("ulysses4 ring2", "a2a+p2p")],
)
def test_each_kind_of_sequence_split_has_its_name(layout, kind):
    words = megatron_words(layout)
    assert after(words, "--cp-comm-type") == kind
    if kind == "a2a+p2p":
        place = words.index("--hierarchical-context-parallel-sizes")
        assert words[place + 1 : place + 3] == ["4", "2"]


@pytest.mark.parametrize(
    ("layout", "strategy"), [("dp8 zero2", "optim_grads"), ("dp8 zero3", "optim_grads_params")]
)
def test_zero_2_and_3_are_megatron_fsdp(layout, strategy):
    words = megatron_words(layout)
    assert after(words, "--data-parallel-sharding-strategy") == strategy
    assert after(words, "--ckpt-format") == "fsdp_dtensor"


def test_the_size_of_whole_experts_is_said_for_megatrons_default_is_tp():
    words = megatron_words("tp4 sp dp16 ep8", DEEPSEEK)
    assert after(words, "--expert-tensor-parallel-size") == "1"


def test_what_megatron_lacks_is_noted():
    made = export(plan("tp2 pp2 dp4 ga4 schedule=gpipe order=pp-tp-cp-ep-dp"), "megatron")
    assert noted(made, "schedule=gpipe", "1F1B")
    assert noted(made, "order=pp-tp-cp-ep-dp")
    assert noted(export(plan("dp2", "gemma-2-9b"), "megatron"), "4 norms a layer")
    assert noted(export(plan("dp2 ulysses2 tp8", LLAMA), "megatron"), "a2a needs", "kv heads")


def test_an_order_that_differs_only_in_axes_of_degree_1_is_the_same():
    made = export(plan("tp2 dp4 order=cp-tp-pp-dp-ep"), "megatron")
    assert not noted(made, "order=")


def test_a_models_name_cannot_break_out_of_the_script():
    model = load_preset(LLAMA)
    base = plan("dp2")
    bad = replace(model, rope_scaling={"rope_type": "x\n$(touch /tmp/x)"})
    text = export_megatron(Planned(base, bad, base.parsed_layout())).files["megatron.sh"]
    assert all(line.startswith("#") for line in text.splitlines() if "touch" in line)


# Megatron and back

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    num_layers = draw(st.integers(4, 20))
    mla = draw(st.none() | st.just(MLAConfig(draw(st.sampled_from([None, 96])), 64, 32, 16, 32)))
    heads = 8
    moe = None
    bias = draw(st.booleans())
    if draw(st.booleans()):
        moe = MoEConfig(
            num_experts=8,
            experts_per_token=draw(st.integers(1, 8)),
            expert_intermediate_size=128,
            shared_intermediate_size=draw(st.sampled_from([0, 256])),
            shared_gate=draw(st.booleans()),
            norm_topk_prob=draw(st.booleans()),
            aux_loss_coef=draw(st.sampled_from([0.0, 1e-3])),
            layers=tuple(draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers))),
            router_bias=draw(st.booleans()),
            expert_bias=bias,
        )
    window = draw(st.sampled_from([0, 64]))
    windowed = draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers))
    windows = tuple(window * on for on in windowed)
    learned = draw(st.sampled_from([0, 8192]))
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return ModelConfig(
        family=FAMILY,
        vocab_size=draw(st.integers(1000, 200000)),
        hidden_size=512,
        intermediate_size=draw(st.integers(512, 4096)),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads if mla else draw(st.sampled_from([1, 2, 8])),
        head_dim=48 if mla else draw(st.sampled_from([64, 128])),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=bias or draw(st.booleans()),
        output_bias=bias,
        mlp_bias=bias,
        qk_norm=mla is None and draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope_theta=10000.0 if learned else draw(st.sampled_from([10000.0, 500000.0])),
        rope_scaling=None if learned else draw(st.sampled_from([None, scaling])),
        moe=moe,
        mla=mla,
        windows=windows if any(windows) else None,
        gated_mlp=draw(st.booleans()),
        norm_kind=draw(st.sampled_from(["rms", "layer"])),
        learned_positions=learned,
        attention_sinks=draw(st.booleans()),
        mtp_layers=draw(st.integers(0, 2)),
        dropout=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn, config: ModelConfig) -> Layout:
    """Those that Megatron can run: 1F1B, and one of its two rank orders."""
    tp, dp, ulysses, ring = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    pp = draw(SIZES)
    vpp = draw(st.integers(1, config.num_layers // pp)) if pp > 1 else 1
    stages = pp * vpp
    layers = None
    if stages > 1 and draw(st.booleans()):
        spare = config.num_layers - stages
        cuts = sorted(
            draw(st.lists(st.integers(0, spare), min_size=stages - 1, max_size=stages - 1))
        )
        ends = [0, *cuts, spare]
        layers = tuple(1 + ends[i + 1] - ends[i] for i in range(stages))
        if layers == split_layers(config.num_layers, stages):
            layers = None
    shards = dp * ulysses * ring > 1
    zero = draw(st.integers(0, 3)) if shards else 0
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    largest = max(layers or split_layers(config.num_layers, stages))
    pipeline_first = pp > 1 and dp > 1 and draw(st.booleans())
    return Layout(
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        pp=pp,
        vpp=vpp,
        dp=dp,
        dp_replicate=draw(st.sampled_from([1, dp])) if zero else 1,
        zero=zero,
        ep=draw(SIZES) if config.moe else 1,
        etp=draw(st.sampled_from([1, tp])) if config.moe else 1,
        ulysses=ulysses,
        ring=ring,
        micro_batch=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 16)),
        recompute=recompute,
        recompute_layers=draw(st.integers(0, min(2, largest))) if recompute == "full" else 0,
        order=("tp", "cp", "ep", "pp", "dp") if pipeline_first else ("tp", "cp", "ep", "dp", "pp"),
        layers=layers,
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_megatrons_arguments_read_back_are_the_same_model_and_layout(data):
    config = data.draw(models())
    layout = data.draw(layouts(config))
    precision = data.draw(st.sampled_from(["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]))
    mtp = config.mtp_layers > 0
    plan_file = plan(str(layout), "drawn", precision=precision, mtp=mtp, gpus_per_node=1)
    planned = Planned(plan_file, config, plan_file.parsed_layout())
    run = read_megatron(export_megatron(planned).files["megatron.sh"])
    assert run.layout == layout
    assert run.config == config
    assert (run.sequence_length, run.global_batch) == (4096, layout.global_batch)
    assert (run.precision, run.mtp) == (precision, mtp)
    known = {*nemo.NAMES, *nemo.COMBINED, *nemo.PRECISION_ARGUMENTS}
    assert set(options(planned)[0]) <= known


# NeMo, torchtitan, DeepSpeed, and fivefold itself


def test_nemo_takes_megatrons_values_by_its_own_names():
    text = export(plan("tp2 sp pp2 dp4 zero1 ring2 ga2"), "nemo").files["nemo.sh"]
    words = shlex.split(text)
    assert "model.tensor_model_parallel_size=2" in words
    assert "model.cp_comm_type=p2p" in words
    assert "model.add_bias_linear=false" in words
    assert "ddp.use_distributed_optimizer=true" in words
    assert "mixed_precision=bf16_mixed" in words
    assert nemo.RECIPE in words


def test_nemo_starts_a_latent_model_from_a_recipe_that_has_its_sizes():
    words = shlex.split(export(plan("pp4 dp2 ga4", DEEPSEEK), "nemo").files["nemo.sh"])
    assert nemo.LATENT_RECIPE in words
    assert "model.kv_lora_rank=512" in words
    assert "model.mtp_num_layers=null" in words
    layout = next(word for word in words if word.startswith("model.pipeline_model_parallel_layout"))
    assert layout.startswith('model.pipeline_model_parallel_layout="Et*15|')


def torchtitan_keywords(text: str) -> dict[str, object]:
    """The keywords of ParallelismConfig in the file that is written."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    call = next(c for c in calls if ast.unparse(c.func) == "ParallelismConfig")
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def test_torchtitan_gets_degrees_tokens_and_the_modules_of_each_stage():
    made = export(plan("tp2 sp pp2 vpp2 dp4 dp_replicate2 zero3 ga8 recompute=full"), "torchtitan")
    text = made.files["fivefold_torchtitan.py"]
    values = torchtitan_keywords(text)
    assert values["data_parallel_replicate_degree"] == values["data_parallel_shard_degree"] == 2
    assert values["fsdp_reshard_after_forward"] == "always"
    assert values["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert values["num_pp_microbatches"] == 8
    stages = values["module_fqns_per_model_part"]
    assert isinstance(stages, list)
    assert [len(stage) for stage in stages] == [9, 8, 8, 10]
    assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ["norm", "lm_head"]
    assert "num_tokens_per_train_step = 131072" in text  # 32 sequences of 4096 tokens
    assert "llama3_8b as base" in text and "FullAC.Config()" in text


def test_a_model_that_torchtitan_does_not_ship_is_left_to_the_reader():
    made = export(plan("dp2", "megatron-22b"), "torchtitan")
    assert "NotImplementedError" in made.files["fivefold_torchtitan.py"]
    assert noted(made, "ships no configuration")


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ("dp2 zero1", LLAMA, ("zero 1",)),
        ("ulysses2", LLAMA, ("ulysses 2",)),
        ("tp2 etp2 dp2 ep2 zero3", DEEPSEEK, ("etp 2",)),
        ("dp2 recompute=full:3", LLAMA, ("full:3",)),
        ("pp2 dp2 ga2 schedule=zb-h1", LLAMA, ("zb-h1",)),
        ("dp4 ep4", DEEPSEEK, ("ep 4", "zero3")),
    ],
)
def test_what_torchtitan_lacks_is_noted(layout, model, words):
    assert noted(export(plan(layout, model), "torchtitan"), *words)


def test_deepspeeds_batch_is_that_of_the_plan():
    made = export(plan("dp8 tp2 zero3 ulysses2 mb2 ga3"), "deepspeed")
    values = json.loads(made.files["deepspeed.json"])
    assert values["train_batch_size"] == 48
    assert values["train_micro_batch_size_per_gpu"] == 2
    assert values["gradient_accumulation_steps"] == 3
    assert values["zero_optimization"]["stage"] == 3
    assert values["tensor_parallel"]["autotp_size"] == values["sequence_parallel_size"] == 2


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ("pp2 vpp2 dp2 ga2", LLAMA, ("vpp 2",)),
        ("pp2 dp2 zero3 ga2", LLAMA, ("refuses zero 3",)),
        ("tp2 sp dp2", LLAMA, ("sp has no counterpart",)),
        ("ring2", LLAMA, ("ring 2",)),
        ("tp2 etp2 dp2 ep2", DEEPSEEK, ("etp 2",)),
        ("tp2 dp2", DEEPSEEK, ("AutoEP refuses",)),
        ("dp4 dp_replicate2 zero1", LLAMA, ("dp_replicate 2", "zero 1")),
        ("pp3 dp2 ga2 layers=10,11,11", LLAMA, ("[10, 11, 11]",)),
        ("dp2 recompute=selective", LLAMA, ("recompute=selective",)),
    ],
)
def test_what_deepspeed_lacks_is_noted(layout, model, words):
    assert noted(export(plan(layout, model), "deepspeed"), *words)


def test_torchrun_trains_the_layout_with_fivefold():
    text = export(plan("tp2 dp8 zero1"), "torchrun").files["torchrun.sh"]
    words = shlex.split(text, comments=True)
    assert after(words, "--layout") == "tp2 dp8 zero1"
    assert after(words, "--nnodes") == "2"
    assert "global_batch=8" in words


def test_slurm_reads_its_directives_before_any_command():
    made = export(plan("tp2 dp4 pp2 ga4 schedule=dualpipe", precision="fp8"), "slurm")
    lines = made.files["slurm.sh"].splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(directives)] == directives
    assert "#SBATCH --nodes=2" in directives
    assert noted(made, "not in fp8")
    assert noted(made, "dualpipe")


# The page


def test_the_page_names_every_option_and_every_release():
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    for module in (megatron, nemo, torchtitan, deepspeed):
        assert f"Checked against {module.CHECKED_AGAINST}" in page
    words = {word for word in re.findall(r"--[\w-]+", page)}
    assert {*nemo.NAMES, *nemo.COMBINED, *nemo.PRECISION_ARGUMENTS} <= words


def test_the_page_describes_every_key_of_a_plan_file():
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(\w+)` \| .* \| (\S+) \|$", page, re.MULTILINE)
    expected = {
        key: "required" if field.is_required() else field.default
        for key, field in PlanFile.model_fields.items()
    }
    shown = {None: "-", False: "false"}
    assert dict(described) == {
        key: str(shown.get(default, default)) for key, default in expected.items()
    }
