"""docs/command_line.md, made from the real parsers: `python -m tests.docs.option_tables` writes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from jaxinfer.cli.command import COMMAND_GROUP, Command, OneLineParser, find_commands, load_command

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
START = "<!-- From here on made by `python -m tests.docs.option_tables`. -->\n"

HEAD = "| Option | Value | Meaning |\n|---|---|---|"
OWN = "Options"
"""Title of those options that belong to no named group."""

ARGUMENTS = "What to give"

type Table = tuple[str, str]
"""Title and rows of one group of options."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of a command, or those of its subcommands."""
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not children:
        yield parser
    for action in children:
        for child in action.choices.values():
            yield from parsers(child)


def all_parsers() -> list[argparse.ArgumentParser]:
    """Those of every command that is installed, in the order of `jaxinfer --help`."""
    found = []
    for entry in find_commands(COMMAND_GROUP).values():
        command: Command = load_command(entry)
        parser = OneLineParser(prog=f"jaxinfer {command.name}", description=command.help)
        command.add_arguments(parser)
        found += parsers(parser)
    return found


def row(action: argparse.Action) -> str:
    """One line of a table."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    value = "" if action.nargs == 0 or not action.option_strings or action.metavar is None else f"`{action.metavar}`"
    if action.nargs == "?":
        value += " or nothing"
    if action.choices and action.metavar is None:
        value = f"`{{{','.join(action.choices)}}}`"
    return f"| {names} | {value} | {(action.help or '').replace('%%', '%').replace('|', '&#124;')} |"


def tables(parser: argparse.ArgumentParser) -> list[Table]:
    """A parser's groups of options, in order."""
    result = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            title = {"options": OWN, "positional arguments": ARGUMENTS}.get(str(group.title), str(group.title))
            result.append((title, "\n".join([HEAD, *map(row, actions)])))
    return result


def anchor(title: str) -> str:
    """The fragment that the documentation gives a heading."""
    return "".join(char for char in title.lower().replace(" ", "-") if char.isalnum() or char in "-_")


def render() -> str:
    """All commands with their options; groups that several commands have stand once, at the end."""
    by_command = {parser: tables(parser) for parser in all_parsers()}
    everything = [table for found in by_command.values() for table in found]
    named = [table for table in everything if table[0] not in (OWN, ARGUMENTS)]
    shared = list(dict.fromkeys(table for table in named if named.count(table) > 1))
    parts = []
    for parser, found in by_command.items():
        description = str(parser.description)
        parts.append(f"## {' '.join(parser.prog.split())}\n\n{description[0].upper()}{description[1:]}.")
        parts += [rows if title == OWN else f"**{title}**\n\n{rows}" for title, rows in found if (title, rows) not in shared]
        links = [f"[{title}](#{anchor(title)})" for title, rows in found if (title, rows) in shared]
        if links:
            parts.append(f"Further options: {', '.join(links)}.")
        if not found:
            parts.append("It has no options.")
    parts.append("## Options of several commands")
    parts += [f"### {title}\n\n{rows}" for title, rows in shared]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    head, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    assert start, f"{PAGE} has no line {START!r}"
    PAGE.write_text(f"{head}{START}\n{render()}", encoding="utf-8")
