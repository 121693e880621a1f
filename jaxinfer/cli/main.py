"""`jaxinfer`: finds the command, runs it, and turns what a person can mend into one line and an exit code.

Exit codes: 0 done, 1 a JaxInferError, 2 a wrong command line, 130 interrupted. Anything else is a traceback, as it is a bug.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint

import jaxinfer
from jaxinfer.cli.command import COMMAND_GROUP, OneLineParser, find_commands, load_command, one_line
from jaxinfer.errors import JaxInferError

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _dispatch(words)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is expected
    except JaxInferError as error:
        print(f"jaxinfer: error: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python flushes once more at exit, which must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(words: list[str]) -> int:
    commands = find_commands(COMMAND_GROUP)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(commands))
        return 0 if words else USAGE_ERROR
    if words[0] in ("-V", "--version"):
        print(f"jaxinfer {jaxinfer.__version__}")
        return 0
    if words[0] not in commands:
        return _unknown(words[0], commands)
    command = load_command(commands[words[0]])
    parser = OneLineParser(prog=f"jaxinfer {command.name}", description=command.help)
    command.add_arguments(parser)
    return command.run(parser.parse_args(words[1:]))


def _unknown(word: str, commands: dict[str, EntryPoint]) -> int:
    kind = "option" if word.startswith("-") else "command"
    near = difflib.get_close_matches(word, commands, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    print(one_line(f"jaxinfer: error: unknown {kind} {word!r:.80}{meant} (commands: {', '.join(commands)})"), file=sys.stderr)
    return USAGE_ERROR


def _overview(commands: dict[str, EntryPoint]) -> str:
    width = max(map(len, commands), default=0)
    lines = [f"  {name:<{width}}  {load_command(entry).help}" for name, entry in commands.items()]
    return "\n".join(
        [
            "usage: jaxinfer COMMAND [options]",
            "",
            "An LLM inference engine compiled by JAX/XLA.",
            "",
            "commands:",
            *lines,
            "",
            "`jaxinfer COMMAND --help` shows a command's options.",
        ]
    )
