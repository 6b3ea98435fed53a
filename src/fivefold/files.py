"""Files: written whole or not at all, and the one reader of YAML."""

from __future__ import annotations

import difflib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError

if TYPE_CHECKING:
    import yaml


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file (text in UTF-8) aside and give it its name when it is whole. OSError where that
    fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(aside, path)


def is_yaml(text: str) -> bool:
    """Does a text that may be something else name a YAML file?"""
    return text.endswith((".yaml", ".yml"))


def read_yaml(path: str | Path, what: str) -> object:
    """The value of a YAML file (see `parse_yaml`). UserError where it cannot be read; `what` is
    the name of such a file in the message: "run file"."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such {what}{_similar_file(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: the {what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the {what} is not UTF-8 text") from None
    return parse_yaml(text, str(path), what)


def parse_yaml(text: str, where: str, what: str) -> object:
    """The value of a YAML text. Only plain values are built. Numbers are those of YAML 1.2 (1e-3
    and 4.5e2 too). UserError for a text that is no YAML and for a key that is given twice, with
    the line; the message begins with `where` and `what`."""
    import yaml

    try:
        return yaml.load(text, _loader())  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: the {what} is not valid YAML{_problem(error, text)}") from None


@lru_cache(maxsize=1)
def _loader() -> type[yaml.SafeLoader]:
    """Imports yaml when a file is first read: most commands' help is printed without it. The
    parser in C is ten times faster where it is installed."""
    import yaml

    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key {key.value} is given twice", key.start_mark
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    # YAML 1.1 wants a dot in the mantissa and a sign in the exponent; YAML 1.2 and people do not.
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )
    return Loader


def _problem(error: Exception, text: str) -> str:
    """Line and reason of what the YAML parser did not understand."""
    mark, last = getattr(error, "problem_mark", None), text.rstrip("\n").count("\n")
    where = "" if mark is None else f", line {min(mark.line, last) + 1}"
    if isinstance(error, RecursionError):
        return f"{where}: it is nested too deeply"
    reason = getattr(error, "problem", None) or str(error)
    return f"{where}: {' '.join(reason.split())}"


def _similar_file(path: Path) -> str:
    others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, others, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
