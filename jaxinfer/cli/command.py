"""What a command is and how commands are found.

A command's module must import nothing heavy at its top (no jax, no flax, no aiohttp): `jaxinfer --help` imports the
modules of all commands to show their one-line help. `run` imports what it needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

COMMAND_GROUP = "jaxinfer.commands"
BENCH_COMMAND_GROUP = "jaxinfer.bench_commands"


@dataclass(frozen=True, slots=True)
class Command:
    """One command; an entry point names an object of this type.

    `run` gets the parsed arguments and returns the exit code; it raises JaxInferError for what a person can mend.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def one_line(message: str) -> str:
    """A message with every run of white space, newlines too, made one blank."""
    return " ".join(message.split())


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with exit code 2, and which takes no abbreviated options."""

    def __init__(self, prog: str | None = None, **options: object) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(prog=prog, **options)  # pyrefly: ignore[bad-argument-type]

    def error(self, message: str) -> NoReturn:
        """Print `jaxinfer: error: ...` and leave with 2."""
        self.exit(2, f"jaxinfer: error: {one_line(message)}\n")


def find_commands(group: str) -> dict[str, EntryPoint]:
    """The commands of an entry-point group by name, sorted, none of them imported yet."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def load_command(entry: EntryPoint) -> Command:
    """Import a command.

    Raises:
        TypeError: when the entry point is not a Command, which is a mistake of whoever wrote it.
    """
    command = entry.load()
    if not isinstance(command, Command):
        raise TypeError(f"entry point {entry.name} = {entry.value} is a {type(command).__name__}, not a jaxinfer.cli.command.Command")
    return command


def add_subcommands(parser: argparse.ArgumentParser, commands: Iterable[Command]) -> None:
    """Give a parser subcommands; the chosen one stands in `args.subcommand`."""
    choices = parser.add_subparsers(metavar="WHAT", required=True)
    for command in commands:
        chosen = choices.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(chosen)
        chosen.set_defaults(subcommand=command)
