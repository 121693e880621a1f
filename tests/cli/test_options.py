"""Dataclass fields as command-line options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxinfer.cli.command import OneLineParser
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.cli.sampling import NOT_ON_THE_COMMAND_LINE, SAMPLING_HELP, add_sampling_options, sampling_from_args
from jaxinfer.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from jaxinfer.request import SamplingParams


@dataclass(frozen=True)
class Inner:
    """The inside.

    More about it.
    """

    num_parts: int = field(default=3, metadata={"help": "parts of the whole, 100 % of them"})


@dataclass(frozen=True)
class Outer:
    """The outside."""

    count: int = 1
    ratio: float = 0.5
    name: str = "x"
    folder: Path | None = None
    most: int | None = None
    kind: Literal["a", "b"] = "a"
    mode: Literal["auto", "on", "off"] = "auto"
    is_loud: bool = False
    words: tuple[str, ...] = ()
    ends: Sequence[str] | str = ()
    ids: Sequence[int] | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def parse(*words: str, **options: Any) -> Outer:
    parser = OneLineParser()
    add_options(parser, Outer, **options)
    return from_args(parser.parse_args(words), Outer)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--count", "-7"], "count", -7),
        (["--ratio", "1e-3"], "ratio", 0.001),
        (["--name", "two words"], "name", "two words"),
        (["--folder", "a/b"], "folder", Path("a/b")),
        (["--most", "5"], "most", 5),
        (["--kind", "b"], "kind", "b"),
        (["--mode"], "mode", "on"),
        (["--mode", "off"], "mode", "off"),
        (["--is-loud"], "is_loud", True),
        (["--is-loud", "--no-is-loud"], "is_loud", False),
        (["--words", "a", "--words", "b c"], "words", ["a", "b c"]),
        (["--ends", "\n"], "ends", ["\n"]),
        (["--ids", "1", "--ids", "2"], "ids", [1, 2]),
        (["--bias", "42=-1.5", "--bias", "7=2"], "bias", {42: -1.5, 7: 2.0}),
        (["--num-parts", "9"], "inner", Inner(9)),
    ],
)
def test_each_type(words: list[str], name: str, value: object) -> None:
    parsed = parse(*words)
    assert getattr(parsed, name) == value
    others = [field.name for field in fields(Outer) if field.name != name]
    assert [getattr(parsed, other) for other in others] == [getattr(Outer(), other) for other in others]


@pytest.mark.parametrize(
    "words",
    [
        ["--count", "1.5"],
        ["--count", ""],
        ["--count"],
        ["--ratio", "half"],
        ["--kind", "c"],
        ["--mode", "maybe"],
        ["--ids", "1,2"],
        ["--bias", "42"],
        ["--bias", "x=1"],
        ["--bias", "1=x"],
        ["--num-part", "9"],
        ["--inner", "9"],
        ["--count", "9" * 5000],
        ["stray\nword"],
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*words)
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("jaxinfer: error: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")


def test_help_shows_text_default_and_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", defaults={"ratio": 0.125}, help={"ratio": "how much"})
    shown = " ".join(capsys.readouterr().out.split())
    assert "parts of the whole, 100 % of them (default: 3)" in shown
    assert "how much (default: 0.125)" in shown
    assert "The inside: --num-parts INT" in shown


def test_a_commands_own_default_stands_until_the_option_is_given() -> None:
    assert parse(defaults={"ratio": 0.125}).ratio == 0.125
    assert parse("--ratio", "2", defaults={"ratio": 0.125}).ratio == 2


def test_excluded_fields_have_no_option_and_keep_their_defaults() -> None:
    parser = OneLineParser()
    add_options(parser, Outer, exclude={"count", "num_parts"})
    parser.add_argument("--count", type=int)
    parser.add_argument("--num-parts", type=int)  # of somebody else, under the same names
    assert from_args(parser.parse_args(["--count", "8", "--num-parts", "9"]), Outer, exclude={"count", "num_parts"}) == Outer()


def test_a_type_that_has_no_option_is_refused() -> None:
    @dataclass
    class Odd:
        """Odd."""

        value: complex = 0j

    with pytest.raises(TypeError, match="complex"):
        add_options(OneLineParser(), Odd)


def test_every_field_of_the_engines_configuration_is_an_option() -> None:
    parser = OneLineParser()
    add_options(parser, EngineConfig)
    known = {word for action in parser._actions for word in action.option_strings}
    parts = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
    names = [item.name for kind in (EngineConfig, *parts.values()) for item in fields(kind) if item.name not in parts]
    assert {"--" + name.replace("_", "-") for name in names} <= known
    promised = "model num-kv-blocks block-size max-num-seqs max-num-batched-tokens max-model-len dtype quantization seed"
    promised += " batch-invariant tensor-parallel-size compile-cache-dir prefix-caching"
    assert {"--" + name for name in promised.split()} <= known


def test_every_option_of_the_engine_has_a_help_text() -> None:
    parser = OneLineParser()
    add_options(parser, EngineConfig)
    assert [action.option_strings for action in parser._actions if not action.help] == []


def test_every_sampling_parameter_is_an_option_with_help_or_left_out_on_purpose() -> None:
    assert {item.name for item in fields(SamplingParams)} == set(SAMPLING_HELP) | set(NOT_ON_THE_COMMAND_LINE)


def test_sampling_options_do_not_read_the_engines_seed() -> None:
    parser = OneLineParser()
    add_sampling_options(parser)
    add_options(parser, EngineConfig)
    args = parser.parse_args(["--seed", "5", "--logit-bias", "3=1", "--stop", "a", "--stop", "b"])
    params = sampling_from_args(args)
    assert (params.seed, params.logit_bias, params.stop) == (None, {3: 1.0}, ("a", "b"))
    assert from_args(args, EngineConfig).seed == 5
