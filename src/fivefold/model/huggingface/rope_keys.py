"""How rotary position embedding is scaled in a config.json."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.model.huggingface.config_reader import ConfigReader

SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The kinds of scaling that are implemented, each with its numbers, all of them required."""
PLANNED_SCALINGS = ("dynamic", "longrope", "su", "yarn")
"""Kinds that cannot be trained. They change no size, so their numbers are passed over."""
PLANNED_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "long_factor",
    "long_mscale",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "short_factor",
    "short_mscale",
    "truncate",
)


def read_rope(keys: ConfigReader, default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """`rope_theta` and the scaling (None for none) of a config.json, old style or new.

    Old style is `rope_theta` beside `rope_scaling`; new style is `rope_parameters` with the theta
    inside. The scaling comes back as {"rope_type": ..., its numbers}, or None where it is of a kind
    that can only be planned.
    """
    theta = keys.number("rope_theta", default_theta)
    old, new = keys.take("rope_scaling"), keys.take("rope_parameters")
    if old is not None and new is not None and old != new:
        raise UserError(
            "rope_scaling and rope_parameters are both given and differ; keep one of them"
        )
    inner = keys.inside("rope_parameters" if old is None else "rope_scaling")
    if "full_attention" in inner:  # one for each kind of layer
        inner.pass_over("sliding_attention")
        keys.untrainable.append("full_attention: rope_parameters by kind of layer cannot be used")
        inner = inner.inside("full_attention")
    theta = inner.number("rope_theta", theta)
    legacy_kind = inner.take("type")
    kind = inner.take("rope_type") or legacy_kind or "default"
    if kind in PLANNED_SCALINGS:
        inner.pass_over(*PLANNED_NUMBERS)
        inner.refuse_unread()
        keys.untrainable.append(
            f"rope scaling of type {kind!r} is not implemented; it can be {', '.join(SCALINGS)}"
        )
        return theta, None
    if not isinstance(kind, str) or kind not in SCALINGS:
        known = ", ".join((*SCALINGS, *PLANNED_SCALINGS))
        raise UserError(f"rope scaling of type {kind!r} is not known; it can be {known}")
    numbers = {name: inner.number(name) for name in SCALINGS[kind]}
    inner.refuse_unread()
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        keys.untrainable.append(
            f"low_freq_factor {numbers['low_freq_factor']:g} of the rope scaling must be below "
            f"high_freq_factor {numbers['high_freq_factor']:g}"
        )
    return theta, {"rope_type": kind, **numbers} if numbers else None
