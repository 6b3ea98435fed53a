"""What tests of several folders share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from fivefold.errors import UserError


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(UserError) as told:
        call(*args, **kwargs)
    message = str(told.value)
    assert "\n" not in message
    return message


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def printed(*parts: Any, width: int = 100) -> str:
    """What a console of that many columns shows."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    return capture.get()


def line_with(text: str, *words: str) -> str:
    """The one line that has all the words, with single blanks."""
    lines = [line for line in text.splitlines() if all(word in line for word in words)]
    assert len(lines) == 1, text
    return " ".join(lines[0].split())
