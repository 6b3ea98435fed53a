"""A model by name, by path or by its dimensions, or one sentence on what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.model.counts import count_parameters
from fivefold.model.huggingface.load import load_config
from fivefold.model.huggingface.presets import (
    MEGATRON_GPTS,
    PUBLISHED,
    config_from_dimensions,
    load_model,
    load_preset,
    preset_names,
)
from tests.helpers import refusal

LLAMA = "hidden=4096,layers=32,heads=32,kv_heads=8,vocab=128256,ffn=14336"
MIXTRAL = "hidden=4096 layers=32 heads=32 kv_heads=8 vocab=32000 experts=8 topk=2 moe_ffn=14336"
DEEPSEEK = (
    "hidden=7168,layers=61,heads=128,vocab=129280,ffn=18432,experts=256,topk=8,moe_ffn=2048,"
    "shared_ffn=2048,dense_layers=3,q_lora=1536,kv_lora=512,qk_nope=128,qk_rope=64,v_dim=128,mtp=1"
)


# --- By name


def test_every_name_is_a_model() -> None:
    assert len(preset_names()) == 31 + len(MEGATRON_GPTS)
    for name in preset_names():
        assert load_model(name).num_layers > 0


def test_a_name_a_file_and_its_folder_give_the_same_model(tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / "deepseek-v3.json", tmp_path / "config.json")
    expected = load_model("DeepSeek-V3")
    assert load_model(str(tmp_path)) == expected
    assert load_model(str(tmp_path / "config.json")) == expected


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"llama-3\.1-405b"):
        load_model("llama-3-405b")
    with pytest.raises(UserError, match="No such file"):
        load_model("nowhere/config.json")


@pytest.mark.parametrize("name", ["foo", "claude", "x" * 5000])
def test_a_name_that_is_near_none_is_refused_without_a_guess(name: str) -> None:
    with pytest.raises(UserError, match="named models; fivefold plan --list has them"):
        load_model(name)


@pytest.mark.parametrize("name", MEGATRON_GPTS)
def test_megatrons_gpts_have_the_parameters_of_the_papers_formula(name: str) -> None:
    """arXiv:2104.04473, equation 2: 12 l h² (1 + 13 / 12h + (V + s) / 12lh); the final norm's 2 h
    are not in it. The sizes of table 1 and of arXiv:2205.05198, in billions, to 1 %."""
    hidden, layers, _ = MEGATRON_GPTS[name]
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (51_200 + 2048) * hidden
    total = count_parameters(load_preset(name)).total
    assert total == formula + 2 * hidden
    published = {"megatron-175b": 174.6, "megatron-530b": 529.6, "megatron-1t": 1008.0}
    assert total / 1e9 == pytest.approx(published.get(name, total / 1e9), rel=1e-3)


# --- By dimensions


@pytest.mark.parametrize(
    ("text", "name"),
    [(LLAMA, "llama-3.1-8b"), (MIXTRAL, "mixtral-8x7b"), (DEEPSEEK, "deepseek-v3")],
)
def test_dimensions_count_as_the_published_config_does(text: str, name: str) -> None:
    published = load_preset(name)
    if published.moe is not None:  # the selection biases of DeepSeek-V3 are no dimension
        published = replace(published, moe=replace(published.moe, router_bias=False))
    config = config_from_dimensions(text)
    assert count_parameters(config, mtp=True) == count_parameters(published, mtp=True)


def test_switches_and_positions_make_gpt2() -> None:
    text = "hidden=768,layers=12,heads=12,vocab=50257,ffn=3072,positions=1024"
    text += ",gated=no,tied=yes,bias=yes,norm=layer"
    assert count_parameters(config_from_dimensions(text)).total == 124_439_808


def test_every_second_layer_can_be_a_mixture() -> None:
    config = config_from_dimensions(MIXTRAL + " ffn=8192 moe_every=2")
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("name", ["hidden", "layers", "heads", "vocab", "ffn"])
def test_a_missing_width_is_an_error_that_names_it(name: str) -> None:
    words = [word for word in LLAMA.split(",") if not word.startswith(f"{name}=")]
    assert f"no {name} " in refusal(config_from_dimensions, ",".join(words))


@pytest.mark.parametrize("name", ["experts", "topk", "moe_ffn"])
def test_a_mixture_is_described_whole(name: str) -> None:
    words = [word for word in MIXTRAL.split() if not word.startswith(f"{name}=")]
    assert f"no {name} " in refusal(config_from_dimensions, " ".join(words))


@pytest.mark.parametrize("name", ["kv_lora", "qk_nope", "qk_rope", "v_dim"])
def test_latent_attention_is_described_whole(name: str) -> None:
    words = [word for word in DEEPSEEK.split(",") if not word.startswith(f"{name}=")]
    assert f"no {name} " in refusal(config_from_dimensions, ",".join(words))


def test_a_mixture_with_dense_layers_needs_their_width() -> None:
    assert "no ffn " in refusal(config_from_dimensions, MIXTRAL + " dense_layers=1")


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("hiden=4096", "nearest is hidden"),
        ("shared_ffn=2048", "shared_ffn needs experts"),
        ("dense_layers=1", "dense_layers needs experts"),
        ("q_lora=1536", "q_lora needs kv_lora"),
        ("kv_heads=8", "kv_heads is given twice"),
        ("gated=maybe", "gated=yes"),
        ("norm=batch", "norm=layer"),
        ("positions=-1", "positions=-1"),
        ("head_dim=0", "head_dim"),
        ("positions=10000001", "positions 10,000,001 is too large: the most is 10,000,000"),
        ("mtp=10001", "mtp 10,001 is too large: the most is 10,000"),
        ("tied", "name=value"),
    ],
)
def test_a_word_that_does_not_fit_is_refused_by_name(word: str, named: str) -> None:
    assert named in refusal(config_from_dimensions, f"{LLAMA},{word}")


def test_kv_heads_are_refused_beside_latent_attention() -> None:
    assert "kv_heads says nothing" in refusal(config_from_dimensions, DEEPSEEK + ",kv_heads=8")


SIZE = st.integers(1, 64)


@settings(max_examples=100, deadline=None)
@given(SIZE, SIZE, SIZE, st.integers(1, 8), st.integers(1, 4), SIZE, st.booleans())
def test_dimensions_say_the_same_as_the_config_of_llama(
    hidden: int, layers: int, vocab: int, kv_heads: int, groups: int, ffn: int, tied: bool
) -> None:
    heads, head_dim = kv_heads * groups, 16
    described = config_from_dimensions(
        f"hidden={hidden},layers={layers},vocab={vocab},heads={heads},kv_heads={kv_heads},"
        f"head_dim={head_dim},ffn={ffn},tied={'yes' if tied else 'no'}"
    )
    read = load_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": ffn,
            "tie_word_embeddings": tied,
        }
    )
    assert count_parameters(described) == count_parameters(read)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="hidenlayrs=,0123456 _", max_size=40))
def test_any_text_is_a_model_or_refused_in_one_sentence(text: str) -> None:
    try:
        config_from_dimensions(text)
    except UserError as error:
        assert "\n" not in str(error)
