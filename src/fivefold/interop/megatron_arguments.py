"""The arguments in a Megatron-LM command line, or in a script that holds one.

Nothing is run: lines are joined, NAME=VALUE are put in for $NAME, and words that are no arguments
are passed over. What the arguments mean is in `plan/megatron.py`.
"""

from __future__ import annotations

import re
import shlex

from fivefold.errors import UserError
from fivefold.model.huggingface.config_reader import refuse_absurd

TORCHRUN = ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "standalone")
TORCHRUN += ("rdzv-backend", "rdzv-endpoint", "rdzv-id")
"""Arguments of the launcher that may stand before Megatron's own."""


class Arguments:
    """The arguments of a line by name, and which of them have been read.

    Of an argument that is given twice the last one counts, as in argparse.
    """

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[str]] = {}
        self._read: set[str] = set()
        words: list[str] = []
        for word in _words(text):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                # torchrun's own arguments may be written with underscores.
                words = self._values[name.replace("_", "-")] = [value] if equals else []
            else:
                words.append(word)

    def has(self, name: str) -> bool:
        return name in self._values

    def flag(self, name: str) -> bool:
        self._read.add(name)
        return name in self._values

    def word(self, name: str, default: str | None = None) -> str:
        """The word after an argument, or the default; UserError where there is neither."""
        self._read.add(name)
        if name not in self._values:
            if default is None:
                raise UserError(f"the Megatron arguments lack --{name}: add it")
            return default
        if not self._values[name]:
            raise UserError(f"--{name} has no value")
        value = self._values[name][0]
        if "$" in value:
            raise UserError(f"--{name} is {value}, a variable that the text does not set")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A count of 0 or more."""
        value = self.word(name, None if default is None else str(default))
        if not re.fullmatch(r"[0-9]{1,12}", value):
            raise UserError(f"--{name} must be a whole number, not {value!r}")
        refuse_absurd(f"--{name}", int(value))
        return int(value)

    def degree(self, name: str, default: int | None = None) -> int:
        """A count of 1 or more."""
        value = self.integer(name, default)
        if value < 1:
            raise UserError(f"--{name} must be 1 or more, not {value}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.word(name, str(default))
        try:
            return float(value)
        except ValueError:
            raise UserError(f"--{name} must be a number, not {value!r}") from None

    def integers(self, name: str, count: int) -> list[int]:
        """The `count` whole numbers after an argument."""
        self.word(name)
        values = self._values[name][:count]
        if len(values) < count or not all(value.isdecimal() for value in values):
            raise UserError(f"--{name} must be {count} whole numbers, not {' '.join(values)!r}")
        return [int(value) for value in values]

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.word(name, default)
        if value not in choices:
            raise UserError(f"--{name} may be {', '.join(choices)}, not {value!r}")
        return value

    def unread(self) -> list[str]:
        """What a plan does not depend on, or what fivefold does not know."""
        known = {*self._read, *TORCHRUN}
        return [f"--{name}" for name in self._values if name not in known]


def _words(text: str) -> list[str]:
    """The words of a shell text, with the variables that it sets itself put in.

    A quoted word that holds several ("--lr 1e-4", as in arrays) is taken apart.
    """
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text)
    text = re.sub(r"\\\r?\n", " ", text)
    variables: dict[str, str] = {}
    words: list[str] = []
    for word in _split(text):
        assignment = re.fullmatch(r"([A-Za-z_]\w*)=([^(].*)?", word, re.DOTALL)
        if assignment:
            variables[assignment[1]] = _put_in(assignment[2] or "", variables)
            continue
        word = _put_in(word, variables)
        words += _split(word) if word.startswith("--") and " " in word else [word]
    return words


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"the Megatron arguments are not a shell text: {error}") from None


def _put_in(word: str, variables: dict[str, str]) -> str:
    """$NAME, ${NAME} and ${NAME:-default}; a name that is not set stays as it is."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, word)
