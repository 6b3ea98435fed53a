"""Reads the shape of a model from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.model.config import ModelConfig
from fivefold.model.huggingface.config_reader import ConfigReader
from fivefold.model.huggingface.families import READERS


def load_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json: a path to the file or its folder, or its content.

    A width or count that is missing is an error. A key for which the family's Hugging Face
    class has a rule may be left out. A key that is not known, or that changes the weights in a
    way that is not counted here, is refused by name: raises UserError. What can be planned but
    not trained is read; `require_trainable` refuses it.
    """
    values = source if isinstance(source, Mapping) else _read_json(Path(source))
    family = values.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise UserError(f"model_type {family!r} is not known; it can be {', '.join(READERS)}")
    keys = ConfigReader(values, family)
    config = READERS[family](keys)
    keys.refuse_unread()
    return replace(config, untrainable=tuple(keys.untrainable))


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the model config {path} cannot be read ({error.strerror}); give a Hugging Face "
            "config.json or the folder that holds it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the model config {path} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"the model config {path} holds a {type(values).__name__}, not an object")
    return values
