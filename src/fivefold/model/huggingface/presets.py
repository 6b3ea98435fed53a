"""Models by name, and models by their dimensions alone.

Names are those of the files in fivefold/model/published (public config.json, see its README) and of
the GPT models that Megatron's papers trained, which have no file.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.model.config import MLAConfig, ModelConfig, MoEConfig
from fivefold.model.huggingface.config_reader import refuse_absurd
from fivefold.model.huggingface.load import load_config

PUBLISHED = Path(__file__).parent / "published"

MEGATRON_GPTS = {  # hidden_size, layers, heads
    "megatron-1.7b": (2304, 24, 24),
    "megatron-3.6b": (3072, 30, 32),
    "megatron-7.5b": (4096, 36, 32),
    "megatron-18b": (6144, 40, 48),
    "megatron-22b": (6144, 48, 64),
    "megatron-39b": (8192, 48, 64),
    "megatron-76b": (10240, 60, 80),
    "megatron-145b": (12288, 80, 96),
    "megatron-175b": (12288, 96, 96),
    "megatron-310b": (16384, 96, 128),
    "megatron-530b": (20480, 105, 128),
    "megatron-1t": (25600, 128, 160),
}
"""Narayanan et al. 2021, arXiv:2104.04473, table 1, and Korthikanti et al. 2022, arXiv:2205.05198,
table 3. GPT-2's kind of layer, 2048 learned positions, a vocabulary of 51,200."""


def preset_names() -> list[str]:
    """All names that `load_model` knows."""
    return sorted([*(path.stem for path in PUBLISHED.glob("*.json")), *MEGATRON_GPTS])


@cache
def load_preset(name: str) -> ModelConfig:
    """A model by its name in `preset_names`."""
    if name in MEGATRON_GPTS:
        hidden, layers, heads = MEGATRON_GPTS[name]
        return config_from_dimensions(
            f"hidden={hidden},layers={layers},heads={heads},ffn={4 * hidden},vocab=51200,"
            "positions=2048,gated=no,norm=layer,bias=yes,tied=yes"
        )
    return load_config(PUBLISHED / f"{name}.json")


def read_model(source: str | dict[str, Any]) -> ModelConfig:
    """A model as the command line or a plan file names it: preset, path, dimensions, or the keys
    of a config.json. UserError where there is none."""
    if isinstance(source, dict):
        return load_config(source)
    return config_from_dimensions(source) if are_dimensions(source) else load_model(source)


def are_dimensions(text: str) -> bool:
    """Whether a model is named by its dimensions. A path may have an equals sign in it too."""
    return "=" in text and not os.path.exists(text)


def load_model(text: str) -> ModelConfig:
    """A model by the name of a preset, or else by the path of a config.json or of its folder.

    Raises UserError: for what is neither with the nearest names, where some are near.
    """
    names = preset_names()
    if text.lower() in names:
        return load_preset(text.lower())
    if os.path.exists(text) or "/" in text or text.endswith(".json"):
        return load_config(text)
    near = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.6)
    cure = f"the nearest names are {', '.join(near)}" if near else "fivefold plan --list has them"
    raise UserError(
        f"the model {text!r} is neither a file nor a folder nor one of the {len(names)} named "
        f"models; {cure}"
    )


REQUIRED = {
    "hidden": "width of the hidden states",
    "layers": "number of layers",
    "heads": "query heads",
    "vocab": "rows of the embedding",
}
OPTIONAL = {
    "ffn": "width of the dense MLP; required unless every layer is a mixture",
    "kv_heads": "key/value heads (as many as query heads)",
    "head_dim": "elements of a head (hidden / heads)",
    "positions": "rows of learned position embeddings (0: rotary embedding)",
    "dense_layers": "first layers without a mixture (0)",
    "moe_every": "of the layers after those, every which one is a mixture (1)",
    "mtp": "multi-token-prediction modules (0)",
}
SWITCHES = {
    "gated": "an MLP of three matrices, not two (yes)",
    "tied": "the head is the embedding (no)",
    "bias": "biases of attention and MLP (no)",
    "qkv_bias": "biases of the query, key and value projections (as bias)",
    "qk_norm": "norms of query and key heads (no)",
}
MIXTURE = {
    "experts": "routed experts",
    "topk": "experts a token goes to",
    "moe_ffn": "width of one expert",
}
SHARED = {"shared_ffn": "width of all shared experts together (0)"}
LATENT = {
    "kv_lora": "rank of the latent keys and values",
    "qk_nope": "elements of a query head without rotary embedding",
    "qk_rope": "elements of a query head with rotary embedding",
    "v_dim": "elements of a value head",
}
LATENT_QUERY = {"q_lora": "rank of the latent queries (0: projected directly)"}
"""The words of a description by dimensions, with what they mean and, in brackets, their default.
`norm=rms` or `norm=layer` joins them. MIXTURE and LATENT go all together or not at all."""


@dataclass
class _Dimensions:
    """The words of a description, each used once."""

    words: dict[str, str]

    def number(self, name: str, default: int | None = None) -> int:
        """A size, at least 1 unless 0 is its default; without a default it has to be there."""
        text = self.words.pop(name, None)
        if text is None:
            if default is None:
                raise UserError(
                    f"the dimensions have no {name} ({_meaning(name)}), and that is never "
                    f"guessed; add {name}=..."
                )
            return default
        value = int(text) if re.fullmatch("[0-9]{1,100}", text) else -1
        if value < (0 if default == 0 else 1):
            raise UserError(f"{name}={text} must be a positive whole number")
        refuse_absurd(name, value)
        return value

    def switch(self, name: str, default: bool) -> bool:
        text = self.words.pop(name, "yes" if default else "no")
        if text not in ("yes", "no"):
            raise UserError(f"{name}={text} must be {name}=yes or {name}=no")
        return text == "yes"


def config_from_dimensions(text: str) -> ModelConfig:
    """A model that has no file: `hidden=4096,layers=32,heads=32,kv_heads=8,vocab=128256,ffn=14336`.

    The words and their defaults are in REQUIRED, OPTIONAL, SWITCHES, MIXTURE, SHARED, LATENT and
    LATENT_QUERY. A width is never guessed: raises UserError for one that is missing, and for
    unknown words.
    """
    words = _Dimensions(_words(text))
    hidden, heads = words.number("hidden"), words.number("heads")
    num_layers, vocab_size = words.number("layers"), words.number("vocab")
    mla = _latent_attention(words)
    moe = _mixture(words, num_layers)
    bias = words.switch("bias", False)
    config = ModelConfig(
        family="dimensions",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_dense_width(words, moe),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=words.number("kv_heads", heads) if mla is None else heads,
        head_dim=_head_dim(words, hidden, heads, mla),
        tied_embeddings=words.switch("tied", False),
        qkv_bias=words.switch("qkv_bias", bias),
        output_bias=bias,
        mlp_bias=bias,
        qk_norm=words.switch("qk_norm", False),
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        moe=moe,
        mla=mla,
        gated_mlp=words.switch("gated", True),
        norm_kind=_norm_kind(words),
        learned_positions=words.number("positions", 0),
        mtp_layers=words.number("mtp", 0),
    )
    if words.words:
        raise UserError(_unused(next(iter(words.words)), moe, mla))
    return config


def _words(text: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f"{word!r} is not a dimension; write it as name=value")
        if name in words:
            raise UserError(f"{name} is given twice, as {words[name]} and {value}; keep one")
        words[name] = value
    return words


def _latent_attention(words: _Dimensions) -> MLAConfig | None:
    if not any(name in words.words for name in LATENT):
        return None
    return MLAConfig(
        q_lora_rank=words.number("q_lora", 0) or None,
        kv_lora_rank=words.number("kv_lora"),
        qk_nope_head_dim=words.number("qk_nope"),
        qk_rope_head_dim=words.number("qk_rope"),
        v_head_dim=words.number("v_dim"),
    )


def _mixture(words: _Dimensions, num_layers: int) -> MoEConfig | None:
    if not any(name in words.words for name in MIXTURE):
        return None
    first, every = words.number("dense_layers", 0), words.number("moe_every", 1)
    return MoEConfig(
        num_experts=words.number("experts"),
        experts_per_token=words.number("topk"),
        expert_intermediate_size=words.number("moe_ffn"),
        shared_intermediate_size=words.number("shared_ffn", 0),
        shared_gate=False,
        norm_topk_prob=True,
        aux_loss_coef=0.0,
        layers=tuple(
            layer >= first and (layer - first + 1) % every == 0 for layer in range(num_layers)
        ),
    )


def _dense_width(words: _Dimensions, moe: MoEConfig | None) -> int:
    """Where every layer is a mixture, no weight has this width; it may be left out."""
    if moe is not None and all(moe.layers):
        return words.number("ffn", moe.expert_intermediate_size)
    return words.number("ffn")


def _head_dim(words: _Dimensions, hidden: int, heads: int, mla: MLAConfig | None) -> int:
    if mla is not None:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if "head_dim" not in words.words and hidden % heads:
        raise UserError(
            f"hidden={hidden} is not a multiple of heads={heads} and there is no head_dim; add it"
        )
    return words.number("head_dim", hidden // heads)


def _norm_kind(words: _Dimensions) -> str:
    kind = words.words.pop("norm", "rms")
    if kind not in ("rms", "layer"):
        raise UserError(f"norm={kind} must be norm=rms or norm=layer")
    return kind


def _meaning(name: str) -> str:
    return (REQUIRED | OPTIONAL | MIXTURE | LATENT)[name].partition(" (")[0]


def _unused(name: str, moe: MoEConfig | None, mla: MLAConfig | None) -> str:
    known = [*REQUIRED, *OPTIONAL, *SWITCHES, "norm", *MIXTURE, *SHARED, *LATENT, *LATENT_QUERY]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        return f"{name} is not a dimension; the nearest is {near}, all are {', '.join(known)}"
    if name in ("kv_heads", "head_dim") and mla is not None:
        return f"{name} says nothing beside kv_lora, which makes attention latent; leave it out"
    wanted = "kv_lora" if name in LATENT_QUERY else "experts"
    return f"{name} needs {wanted}, which is not given; add it or leave {name} out"
