"""The command line: a file per command, which reads options, calls one function and prints.

A command imports what it needs when it runs, so that help is instant.
"""

from fivefold.cli.program import main

__all__ = ["main"]
