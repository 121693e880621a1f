"""`jaxinfer simulate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import Command, OneLineParser
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.config import CacheConfig, SchedulerConfig, option_name
from jaxinfer.errors import ConfigError
from jaxinfer.simulation.options import SimulationOptions, TraceOptions

if TYPE_CHECKING:
    from jaxinfer.simulation.report import Report

KINDS = (TraceOptions, SimulationOptions, CacheConfig, SchedulerConfig)
EXCLUDE = ("kv_cache_dtype", "disk_kv_path", "kv_checksums")
"""Options of the KV pool about what is in its blocks, or on a real disk: nothing here depends on them."""


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    for kind in KINDS:
        add_options(parser, kind, exclude=EXCLUDE)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare", metavar="OPTION=A,B,...", help="run the same trace with each value of an option, such as scheduling-policy=fcfs,fair"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="also draw queue and pool over time into a .png, .svg or .pdf file")
    _add_run_options(parser)


def _run(args: argparse.Namespace) -> int:
    runs = _runs(args)
    for _, one in runs:  # all mistakes are told before the first minutes pass
        for kind in KINDS:
            from_args(one, kind, exclude=EXCLUDE)
    from jaxinfer.simulation.plot import check_plot, draw
    from jaxinfer.simulation.report import print_reports

    if args.plot is not None:
        check_plot(args.plot)
    with _bar() as progress:
        reports = [_simulate(name, one, progress) for name, one in runs]
    if args.json:
        print(json.dumps([_as_json(report, one) for report, (_, one) in zip(reports, runs, strict=True)]))
    else:
        print_reports(reports)
    if args.plot is not None:
        draw(reports, args.plot)
    return 0


def _runs(args: argparse.Namespace) -> list[tuple[str, argparse.Namespace]]:
    """The options of each run, by the value that tells it from the others."""
    if args.compare is None:
        return [("", args)]
    name, equals, values = args.compare.partition("=")
    known = [option_name(field.name)[2:] for kind in KINDS for field in fields(kind) if field.name not in EXCLUDE]
    choices = [value for value in values.split(",") if value]
    if not equals or len(choices) < 2:
        raise ConfigError(f"--compare must be OPTION=A,B with two values or more, got {args.compare!r:.200}", option="--compare")
    if name not in known:
        raise ConfigError(f"--compare: there is no option {name!r:.80}; known: {', '.join(known)}", option="--compare")
    parser = OneLineParser(prog="jaxinfer simulate --compare")
    _add_run_options(parser)
    return [(value, parser.parse_args([f"--{name}={value}"], copy(args))) for value in choices]


def _simulate(name: str, args: argparse.Namespace, progress: Callable[[str, int, int | None], None]) -> Report:
    from jaxinfer.simulation.report import simulate

    return simulate(
        from_args(args, TraceOptions),
        from_args(args, SimulationOptions),
        from_args(args, CacheConfig, exclude=EXCLUDE),
        from_args(args, SchedulerConfig),
        name=name,
        on_progress=lambda done, total: progress(name or "simulating", done, total),
    )


def _as_json(report: Report, args: argparse.Namespace) -> dict[str, Any]:
    options: Sequence[Any] = [from_args(args, kind, exclude=EXCLUDE) for kind in KINDS]
    given = {key: value for one in options for key, value in asdict(one).items() if key not in EXCLUDE}
    return {"name": report.name, **report.figures, "options": json.loads(json.dumps(given, default=str))}  # paths as text


@contextmanager
def _bar() -> Generator[Callable[[str, int, int | None], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done, total=total)

        yield show


COMMAND = Command(
    "simulate", "try scheduling policies and pool sizes on a trace, with a timing model instead of a device", _add_arguments, _run
)
