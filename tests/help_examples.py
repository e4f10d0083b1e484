"""The commands of the command line, and the example that each one's help ends with."""

from collections.abc import Iterator
from typing import Any

import typer.main

from peerlane import cli


def _below(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from _below(command, *names, name)


COMMANDS: dict[tuple[str, ...], Any] = dict(_below(typer.main.get_command(cli.app)))
"""by the words that call them; ``peerlane`` itself has none"""


def help_and_example(names: tuple[str, ...]) -> list[str]:
    """Returns the help of a command up to its example, and the example without its first word."""
    return str(COMMANDS[names].get_help(typer.Context(COMMANDS[names]))).split("\n\n  Example:\n    peerlane ")
