"""docs/command_line.md is what the parsers say."""

from __future__ import annotations

import pytest

from jaxinfer.cli.command import OneLineParser
from jaxinfer.cli.main import main
from tests.docs.option_tables import PAGE, START, all_parsers, anchor, render, tables


def test_page_is_what_the_parsers_say() -> None:
    _, start, made = PAGE.read_text(encoding="utf-8").partition(START)
    assert start
    assert made.strip() == render().strip(), "run `python -m tests.docs.option_tables`"


@pytest.mark.parametrize("command", [parser.prog for parser in all_parsers()])
def test_every_option_of_the_help_is_on_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help text is the oracle: the page is made from the parser's insides."""
    with pytest.raises(SystemExit):
        main([*command.split()[1:], "--help"])
    lines = capsys.readouterr().out.splitlines()
    named = {word.rstrip(",") for line in lines if line.startswith("  -") for word in line.split() if word.startswith("--")}
    named -= {"--help"}
    (parser,) = [parser for parser in all_parsers() if parser.prog == command]
    listed = "\n".join(rows for _, rows in tables(parser))
    assert {name for name in named if f"`{name}`" not in listed} == set()


def test_a_table_has_names_values_and_defaults() -> None:
    parser = OneLineParser(prog="x")
    parser.add_argument("--size", metavar="INT", help="how large, in %% (default: 3)")
    parser.add_argument("--mode", choices=["a", "b"], help="a or b")
    parser.add_argument("--loud", action="store_true", help="be loud")
    (table,) = tables(parser)
    assert table[1].splitlines()[2:] == [
        "| `--size` | `INT` | how large, in % (default: 3) |",
        "| `--mode` | `{a,b}` | a or b |",
        "| `--loud` |  | be loud |",
    ]


def test_anchors_are_those_of_the_documentation() -> None:
    assert anchor("The KV pool") == "the-kv-pool"
