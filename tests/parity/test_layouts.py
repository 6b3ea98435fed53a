"""Every split, and products of them, against one process; and every byte against the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from fivefold.layout.legality import violations
from fivefold.layout.notation import SCHEDULES, Layout
from fivefold.model.config import ModelConfig
from tests.parity.harness import assert_parity, random_samples, tiny

MODELS: dict[str, ModelConfig] = {
    "llama": tiny("llama", attention_bias=True, mlp_bias=True),
    "qwen2": tiny("qwen2", vocab_size=127),
    "qwen3": tiny("qwen3"),
    "tied qwen3": tiny("qwen3", vocab_size=127, tie_word_embeddings=True),
    "qwen3 of 2 kv heads": tiny("qwen3", num_key_value_heads=2),
    "qwen2 of 1 kv head": tiny("qwen2", num_key_value_heads=1),
    "mixtral": tiny("mixtral"),
    "qwen2_moe": tiny("qwen2_moe", vocab_size=127),  # with a shared expert and its gate
    "qwen3_moe": tiny("qwen3_moe", mlp_only_layers=[1]),
    "tied qwen3_moe": tiny("qwen3_moe", tie_word_embeddings=True),
}

CASES = [
    # one process
    ("llama", "mb4 recompute=full"),
    ("qwen3_moe", "mb1 recompute=selective"),
    # data
    ("llama", "dp2 mb2"),
    ("qwen2", "dp4 zero1"),
    ("tied qwen3", "dp2 zero2 mb2"),
    ("qwen3", "dp4 zero3 recompute=full"),
    ("tied qwen3", "dp4 dp_replicate2 zero2"),
    # tensor, and megatron sequence
    ("qwen2", "tp2 mb4"),
    ("tied qwen3", "tp4 mb4"),
    ("qwen3", "tp4 sp mb4 recompute=full"),
    ("tied qwen3", "tp2 sp dp2 zero3 mb2"),
    ("qwen3 of 2 kv heads", "tp4 sp mb4"),
    ("qwen2 of 1 kv head", "tp2 sp ulysses2 mb4"),
    # pipeline
    ("llama", "pp2"),
    ("qwen2", "pp3 layers=2,1,1 schedule=gpipe mb2"),
    ("tied qwen3", "pp4 mb2"),
    ("qwen3", "pp2 vpp2"),
    ("tied qwen3", "pp2 dp2 zero1 vpp2"),
    ("llama", "pp2 tp2 sp mb2 order=pp-dp-tp-cp-ep"),
    # backwards in two parts, V placements, breadth first
    ("tied qwen3", "pp2 vpp2 schedule=bfs mb2"),
    ("qwen2", "pp3 layers=1,2,1 schedule=zb-h1"),
    ("tied qwen3", "pp2 vpp2 dp2 zero1 schedule=zb-v"),
    ("llama", "pp2 dp2 schedule=dualpipe-v vpp2 recompute=full"),
    ("qwen3", "pp2 tp2 sp zero2 dp2 schedule=zb-h1 mb2"),
    ("qwen3_moe", "pp2 dp2 ep2 zero1 vpp2 schedule=dualpipe-v"),
    # ulysses and ring
    ("qwen3", "ulysses4 mb4"),
    ("qwen3 of 2 kv heads", "ulysses2 tp2 mb4"),
    ("llama", "ring2 mb4"),
    ("qwen3", "ring4 zero1 mb4"),
    ("qwen2", "ring2 ulysses2 mb4 recompute=selective"),
    ("tied qwen3", "pp2 ring2 mb2"),
    # experts
    ("qwen3_moe", "dp2 ep2 mb2"),
    ("mixtral", "dp4 ep4"),
    ("qwen2_moe", "tp2 sp dp2 ep4 mb2"),
    ("qwen2_moe", "tp2 etp2 dp2 ep2 mb2 recompute=full"),
    ("qwen3_moe", "tp2 sp etp2 dp2 ep2 zero3 mb2"),
    ("mixtral", "pp2 dp2 ep2"),
    ("tied qwen3_moe", "ring2 dp2 ep4 zero2 mb2"),
    ("mixtral", "ulysses2 tp2 etp2 ep2 mb4"),
    # all five
    ("tied qwen3_moe", "tp2 sp pp2 dp2 ep2 mb2"),
]
SLOW = [
    ("llama", "dp8 dp_replicate4 zero3"),
    ("qwen3", "tp8 sp mb2"),
    ("qwen3 of 2 kv heads", "tp4 sp dp2 zero3 mb2"),
    ("qwen3", "ulysses2 ring4 mb2"),
    ("llama", "ulysses2 ring2 dp2 zero2 mb2"),
    ("qwen3_moe", "dp8 ep8"),
    ("mixtral", "dp8 dp_replicate2 ep2 zero3"),
    ("qwen2_moe", "ring2 ulysses2 tp2 sp ep8 mb2"),
    # backwards in two parts, V placements, breadth first
    ("tied qwen3", "pp4 schedule=zb-h1"),
    ("llama", "pp2 vpp2 schedule=zb-v recompute=selective"),
    ("qwen3", "pp2 vpp2 tp2 sp schedule=zb-v mb2"),
    ("tied qwen3", "pp2 vpp2 dp2 zero3 schedule=dualpipe-v"),
    ("tied qwen3", "pp2 vpp2 dp4 dp_replicate2 zero1 schedule=zb-v"),
    ("qwen3_moe", "tp2 sp pp2 vpp2 dp2 ep2 zero1 schedule=zb-v"),
    ("mixtral", "tp2 etp2 pp2 dp2 ep2 zero3 recompute=selective schedule=zb-h1 mb2"),
    ("qwen2_moe", "pp2 vpp2 dp2 zero2 recompute=full schedule=dualpipe-v"),
    ("tied qwen3_moe", "pp2 ring2 ulysses2 dp2 ep2 zero1 vpp2 schedule=zb-v"),
    # 16 processes
    ("qwen3_moe", "tp2 sp pp2 dp2 ulysses2 ep4 mb2"),
    ("tied qwen3_moe", "tp2 sp pp2 dp2 ring2 ep2 zero2 mb2"),
    ("qwen2_moe", "tp4 sp dp4 ep8 zero1 mb2"),
    ("tied qwen3", "tp2 pp2 ring2 ulysses2 mb2"),
    ("tied qwen3", "pp4 dp4 zero3"),
    ("mixtral", "tp2 etp2 pp2 vpp2 dp4 ep4"),
    ("llama", "tp4 sp ulysses2 ring2 mb2"),
]


def model_for(name: str, layout: str) -> ModelConfig:
    """Layers are split by the pipeline and prefetched by ZeRO; else two say as much as four."""
    needs_four = any(word in layout for word in ("pp", "zero2", "zero3"))
    return MODELS[name] if needs_four else replace_layers(MODELS[name], 2)


def replace_layers(config: ModelConfig, layers: int) -> ModelConfig:
    moe = config.moe and replace(config.moe, layers=config.moe.layers[:layers])
    return replace(config, num_layers=layers, moe=moe)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_layout_computes_what_one_process_does(model: str, layout: str) -> None:
    assert_parity(model_for(model, layout), layout)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), SLOW)
def test_more_layouts_compute_what_one_process_does(model: str, layout: str) -> None:
    assert_parity(MODELS[model], layout, steps=5)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tied qwen3", "tp2 sp ring2 mb4"),
        ("qwen3 of 2 kv heads", "ring2 ulysses2 mb4 recompute=full"),
        ("qwen3_moe", "pp2 ulysses2 ep2 mb2"),
        ("qwen2_moe", "dp2 ep2 ring2 zero2 mb2"),
    ],
)
def test_packed_documents_are_kept_apart_in_every_split(model: str, layout: str) -> None:
    config = model_for(model, layout)
    assert_parity(config, layout, random_samples(config.vocab_size, isolate=True))


DEEP = tiny("qwen3", num_hidden_layers=10, tie_word_embeddings=True)


@pytest.mark.parametrize(
    "layout",
    [
        "pp4 vpp2 schedule=zb-v layers=1,2,1,1,1,2,1,1",
        pytest.param("pp4 vpp2 schedule=dualpipe-v layers=1,1,2,1,1,1,1,2", marks=pytest.mark.slow),
        pytest.param("pp4 vpp2 schedule=bfs layers=1,2,1,1,1,2,1,1", marks=pytest.mark.slow),
        pytest.param("pp4 schedule=zb-h1 layers=2,3,4,1 dp2 zero1", marks=pytest.mark.slow),
        pytest.param("pp4 vpp2 schedule=zb-v dp2 zero1", marks=pytest.mark.slow),
        pytest.param("pp4 vpp2 schedule=zb-v tp2 sp", marks=pytest.mark.slow),
    ],
)
def test_four_ranks_of_uneven_stages(layout: str) -> None:
    assert_parity(DEEP, layout)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    """GPipe in two parts: all forwards, all inputs' gradients, the weights' from last to first."""
    count = 8
    rows = []
    for stage in range(2):
        forwards = [f"{stage}F{i}" for i in range(count)]
        of_inputs = [f"{stage}I{i}" for i in range(count)]
        of_weights = [f"{stage}W{i}" for i in reversed(range(count))]
        rows.append(",".join([*forwards, *of_inputs, *of_weights]))
    path = tmp_path / "gpipe.csv"
    path.write_text("\n".join(rows))
    assert_parity(MODELS["tied qwen3"], f"pp2 schedule={path}")


def test_data_parallelism_by_three() -> None:
    config = MODELS["qwen2"]
    for layout in ("dp3 zero2", "ring3 zero1 mb2"):
        samples = random_samples(config.vocab_size, global_batch=6, sequence_length=48)
        assert_parity(config, layout, samples)


# Layouts that hypothesis draws


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, str, bool]:
    """A model, a legal layout of up to 8 processes for it, and whether documents are isolated."""

    def pick(*values):
        return draw(st.sampled_from(values))

    name = pick(*MODELS)
    config = MODELS[name]
    tp, pp, ulysses, ring = (draw(st.sampled_from([1, 1, 2, 4])) for _ in range(4))
    dp = pick(1, 1, 2, 4, 8)
    assume(2 <= tp * pp * ulysses * ring * dp <= 8)
    chunks = {"gpipe": 1, "1f1b": pick(1, 2) if pp == 2 else 1, "zb-h1": 1}
    schedule = pick(*SCHEDULES)
    vpp = chunks.get(schedule, 2)
    assume(pp * vpp <= 4)
    layout = Layout(
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        pp=pp,
        vpp=vpp,
        dp=dp,
        dp_replicate=pick(1, 2) if dp > 2 else 1,
        zero=pick(0, 1, 2, 3),
        ep=pick(1, 2, 4, 8) if config.moe else 1,
        etp=pick(1, tp) if config.moe else 1,
        ulysses=ulysses,
        ring=ring,
        micro_batch=pick(1, 2),
        recompute=pick("none", "selective", "full"),
        schedule=schedule,
    )
    accumulation, rest = divmod(8, dp * layout.micro_batch)
    assume(accumulation >= 1 and not rest)
    assume(not violations(replace(layout, accumulation=accumulation), config, 64))
    return name, str(layout), draw(st.booleans())


def check_drawn(drawn: tuple[str, str, bool]) -> None:
    model, layout, isolate = drawn
    config = MODELS[model]
    assert_parity(config, layout, random_samples(config.vocab_size, isolate=isolate), steps=1)


DRAWN = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],  # no shrinking: a layout is small, and a run takes seconds
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@settings(DRAWN, max_examples=3)
@given(layouts())
def test_drawn_layouts_compute_what_one_process_does(drawn: tuple[str, str, bool]) -> None:
    check_drawn(drawn)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(DRAWN, max_examples=100)
@given(layouts())
def test_many_drawn_layouts_compute_what_one_process_does(drawn: tuple[str, str, bool]) -> None:
    check_drawn(drawn)
