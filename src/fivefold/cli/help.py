"""Help grouped by topic, and commands whose options are the fields of a dataclass."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

T = TypeVar("T")
Entry = tuple[str, tuple[str, str]]
"""The title of a topic, and a line of it: a name and what it is."""


class GroupedCommand(TyperCommand):
    """A command whose help lists arguments and options by `rich_help_panel`, without rich, which
    takes longer to import than all the rest."""

    def format_options(self, ctx, formatter) -> None:
        entries: list[Entry] = []
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            usual = "Arguments" if parameter.param_type_name == "argument" else "Other options"
            if line is not None:
                entries.append((getattr(parameter, "rich_help_panel", None) or usual, line))
        _write(formatter, entries)


class GroupedCommands(TyperGroup):
    """The program, whose help lists commands by `rich_help_panel`, in the order they were added."""

    def format_commands(self, ctx, formatter) -> None:
        entries: list[Entry] = []
        for name, command in self.commands.items():
            topic = getattr(command, "rich_help_panel", None) or "Commands"
            entries.append((topic, (name, command.get_short_help_str(limit=200))))
        _write(formatter, entries)


def _write(formatter, entries: Iterable[Entry]) -> None:
    """The topics in the order in which they first appear."""
    topics: dict[str, list[tuple[str, str]]] = {}
    for topic, line in entries:
        topics.setdefault(topic, []).append(line)
    for topic, lines in topics.items():
        with formatter.section(topic):
            formatter.write_dl(lines)


def command(app: typer.Typer, panel: str, options: type[T] | None = None) -> Callable:
    """Register a function as a command under the topic `panel`.

    With `options`, a dataclass whose fields are annotated with typer options, the function takes
    one object of that class instead of many arguments.
    """

    def register(function: Callable) -> Callable:
        called = function if options is None else _of_fields(function, options)
        app.command(cls=GroupedCommand, rich_help_panel=panel)(called)
        return function

    return register


def _of_fields(function: Callable[[T], None], options: Callable[..., T]) -> Callable[..., None]:
    def called(**given: object) -> None:
        function(options(**given))

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__annotations__ = {field.name: field.type for field in fields(options)}  # type: ignore
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(options)  # type: ignore
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore
    return called
