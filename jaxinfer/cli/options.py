"""Command-line options made from dataclasses, so that a field is written once and is an option of the same name."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.config import option_name


def add_options(
    parser: argparse.ArgumentParser,
    kind: type,
    *,
    help: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    exclude: Collection[str] = (),
) -> None:
    """Add one option per field of a dataclass; fields that are dataclasses add theirs, flat.

    Types: int, float, str, Path, bool (`--x`, `--no-x`), Literal (choices; with "on" and "off" the bare flag means on),
    `X | None`, sequences (the option may be repeated) and maps of numbers (`ID=VALUE`, repeated). The help text comes from
    the field's metadata, or from `help` by field name. Options that are not given leave no trace in the namespace, so
    the dataclass's own defaults stand, but for those in `defaults`, which a command prefers to them.

    Raises:
        TypeError: for a field of another type.
    """
    group = parser.add_argument_group(_title(kind))
    hints = typing.get_type_hints(kind)
    nested = []
    for field in fields(kind):
        if field.name in exclude:
            continue
        if is_dataclass(hints[field.name]):
            nested.append(hints[field.name])
            continue
        text = field.metadata.get("help") or (help or {}).get(field.name, "")
        preferred = (defaults or {}).get(field.name, field.default)
        group.add_argument(
            option_name(field.name),
            dest=field.name,
            help=_help(text, preferred),
            default=(defaults or {}).get(field.name, argparse.SUPPRESS),
            **_argument(hints[field.name]),
        )
    for part in nested:
        add_options(parser, part, help=help, defaults=defaults, exclude=exclude)


def from_args[T](args: argparse.Namespace, kind: type[T], *, exclude: Collection[str] = ()) -> T:
    """Build the dataclass from parsed arguments; fields without a given option, and those in `exclude`, keep their defaults.

    Raises:
        ConfigError, RequestError: as the dataclass validates itself.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):  # pyrefly: ignore[bad-argument-type]
        if field.name in exclude:
            continue
        if is_dataclass(hints[field.name]):
            values[field.name] = from_args(args, hints[field.name], exclude=exclude)
        elif field.name in args:
            value = getattr(args, field.name)
            values[field.name] = dict(value) if _origin(hints[field.name]) is Mapping else value
    return kind(**values)


def _title(kind: type) -> str:
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")


def _help(text: str, default: Any) -> str:
    says_it = default is MISSING or default is None or default == () or "default" in text
    return (text if says_it else f"{text} (default: {default})").strip().replace("%", "%%")


def _plain(hint: Any) -> Any:
    """The one type that a command line can give for a hint: without None, and the sequence of `Sequence[str] | str`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return next((member for member in members if typing.get_origin(member) is not None), members[0])
    return hint


def _origin(hint: Any) -> Any:
    origin = typing.get_origin(_plain(hint))
    return Mapping if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping) else origin


def _argument(hint: Any) -> dict[str, Any]:
    plain = _plain(hint)
    origin = _origin(hint)
    if origin is Literal:
        choices = typing.get_args(plain)
        bare = {"nargs": "?", "const": "on"} if {"on", "off"} <= set(choices) else {}
        return {"choices": choices, "metavar": "{" + ",".join(choices) + "}", **bare}
    if origin is Mapping:
        return {"action": "append", "type": _parse_pair, "metavar": "ID=VALUE"}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"action": "append", **_scalar(typing.get_args(plain)[0])}
    if plain is bool:
        return {"action": argparse.BooleanOptionalAction}
    return _scalar(plain)


def _scalar(plain: Any) -> dict[str, Any]:
    if plain is int:
        return {"type": parse_int, "metavar": "INT"}
    if plain is float:
        return {"type": parse_float, "metavar": "FLOAT"}
    if plain is Path:
        return {"type": Path, "metavar": "PATH"}
    if plain is str:
        return {"metavar": "TEXT"}
    raise TypeError(f"no command-line option can be made of the type {plain!r}")


def parse_int(text: str) -> int:
    """Argparse's `type` for an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r:.80}") from None


def parse_float(text: str) -> float:
    """Argparse's `type` for a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r:.80}") from None


def _parse_pair(text: str) -> tuple[int, float]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected ID=VALUE, such as 42=-1.5, got {text!r:.80}")
    return parse_int(key), parse_float(value)
