"""What the program's YAML files have in common: sections of known keys, and one sentence for the
first thing that is wrong with a file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from fivefold.errors import UserError

MOST = 10_000_000
"""No machine has more of anything that is counted; a slip of the keyboard must not become sums that
overflow."""


def _whole(value: object) -> object:
    """8.0 is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MOST)]
Positive = Annotated[float, Field(gt=0, lt=1e18)]
NotNegative = Annotated[float, Field(ge=0, lt=1e18)]


class Section(BaseModel):
    """Keys are known, values have their own type ("3" and 3.0 are no int), nothing changes."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


S = TypeVar("S", bound=Section)
Keys = Mapping[str, "type[Section] | None"]
"""Keys with the section that each holds, if it holds one or a list of one kind."""


def validate(section: type[S], values: object, where: str, **given: object) -> S:
    """The section with these values; `given` are fields that no file has (`exclude=True`).
    UserError, a sentence that begins with `where`, for values that are not right."""
    if not isinstance(values, dict):
        raise UserError(
            f"{where} must be a mapping of keys, not {kind(values)}; it needs at least "
            f"{required(section)}"
        )
    refuse_unknown_keys(values, section, where)
    try:
        return section.model_validate({**values, **given})
    except ValidationError as error:
        raise UserError(f"{where}: {_sentence(error.errors(), section)}") from None


def refuse_unknown_keys(values: object, section: type[Section], where: str) -> None:
    """UserError for the first key that the section, or one in it, does not have; with the nearest
    that there is."""
    for path, key, here in _walk(values, section, ()):
        if key not in here:
            prefix = "".join(f"{part}." for part in path)
            near = _nearest(str(key), here, prefix, section)
            raise UserError(f"{where}: unknown key {prefix}{key}; {near}")


def required(section: type[Section]) -> str:
    """The keys that it cannot be without."""
    fields = section.model_fields
    return ", ".join(key for key in _keys(section) if fields[key].is_required())


def kind(value: object) -> str:
    """A value as a sentence names it: short."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | set | tuple):
        return f"a list of {len(value)}"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# --- keys -----------------------------------------------------------------------------------


def _keys(section: type[Section]) -> Keys:
    return {
        key: _section_in(field.annotation)
        for key, field in section.model_fields.items()
        if not field.exclude
    }


def _section_in(annotation: object) -> type[Section] | None:
    # A class of Section is told by its metaclass: Python 3.10 calls tuple[str] a class too.
    if isinstance(annotation, type(Section)):
        return annotation
    if get_origin(annotation) is dict:
        return None
    inner = (_section_in(each) for each in get_args(annotation))
    return next((each for each in inner if each is not None), None)


def _walk(
    values: object, section: type[Section], path: tuple[object, ...]
) -> Iterator[tuple[tuple[object, ...], object, Keys]]:
    """Each key of a mapping, or of those in a list, and of those in it, with its path and the keys
    that are known there."""
    if isinstance(values, list):
        for index, value in enumerate(values):
            yield from _walk(value, section, (*path, index))
    if not isinstance(values, dict):
        return
    keys = _keys(section)
    for key, value in values.items():
        yield path, key, keys
        inner = keys.get(key) if isinstance(key, str) else None
        if inner is not None:
            yield from _walk(value, inner, (*path, key))


def _nearest(key: str, here: Keys, prefix: str, root: type[Section]) -> str:
    """What the user may have meant: a key of this section, the same key of another, or any."""
    near = difflib.get_close_matches(key, here, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    for place, inner in [("", root), *_keys(root).items()]:
        dot = "." if place else ""
        if inner is not None and key in _keys(inner):
            return f"did you mean {place}{dot}{key}?"
    return f"known here: {', '.join(here)}"


# --- values ---------------------------------------------------------------------------------

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} or fewer",
}
"""pydantic's error types, in the words of one sentence; the braces are its error context."""


def _sentence(errors: list[ErrorDetails], section: type[Section]) -> str:
    """The first error in one sentence. A value that may have one of two types and has neither
    gives two errors at the same key: those are joined."""
    first = errors[0]
    key = _dotted(first["loc"], section)
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "extra_forbidden":  # within a mapping from names to sections
        return f"unknown key {'.'.join(map(str, first['loc']))}"
    if first["type"] == "value_error":  # from a validator of our own
        place = f"{key}: " if key else ""
        return place + first["msg"].removeprefix("Value error, ")
    expected = [
        _EXPECTED[error["type"]].format(**error.get("ctx", {}))
        if error["type"] in _EXPECTED
        else error["msg"]
        for error in errors
        if _dotted(error["loc"], section) == key
    ]
    return f"{key} must be {' or '.join(expected)}, and is {kind(first['input'])}"


def _dotted(location: tuple[int | str, ...], section: type[Section]) -> str:
    """("optimizer", "betas", 0) -> "optimizer.betas.0". pydantic ends the location of a union
    with the type it tried, which is no key."""
    keys: Keys = _keys(section)
    parts = []
    for part in location:
        if isinstance(part, str):
            if part not in keys:
                break
            inner = keys[part]
            keys = {} if inner is None else _keys(inner)
        parts.append(str(part))
    return ".".join(parts)
