"""`jaxinfer bench latency | throughput`, and what the entry-point group `jaxinfer.bench_commands` adds (`serve`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxinfer.benchmarking.latency import LatencyOptions, measure_latency
from jaxinfer.benchmarking.throughput import ThroughputOptions, measure_throughput
from jaxinfer.cli.command import BENCH_COMMAND_GROUP, Command, add_subcommands, find_commands, load_command
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError

UNITS = {"seconds": " s", "percent": " %"}
"""What stands behind a figure whose name ends so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The kinds of measurement as subcommands."""
    others = [load_command(entry) for entry in find_commands(BENCH_COMMAND_GROUP).values()]
    add_subcommands(parser, [LATENCY, THROUGHPUT, *others])


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement."""
    return args.subcommand.run(args)


def print_figures(figures: Mapping[str, Any]) -> None:
    """A table for a person, then one JSON line for a program; what is nested stands in the JSON line only.

    With `static`, the figures of another run by the same names, the table has a column for each.
    """
    from rich.console import Console
    from rich.table import Table

    other = figures.get("static", {})
    table = Table(show_header=bool(other), box=None, pad_edge=False)
    table.add_column()
    table.add_column("continuous" if other else "", justify="right")
    table.add_column("static" if other else "", justify="right")
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            table.add_row(name, _show(name, value), _show(name, other[name]) if name in other else "")
    Console(highlight=False, markup=False).print(table)
    print(json.dumps(figures), flush=True)


def _show(name: str, value: Any) -> str:
    number = f"{value:.4f}" if isinstance(value, float) else str(value)
    return number + (UNITS.get(name.rpartition("_")[2], "") if "_per_" not in name else "")


def _add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="PATH", help="also write the JSON line to this file")


def _check_output(path: Path | None) -> None:
    """Before the measurement, which may take minutes."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--output must be a file in a folder that exists, got {str(path)!r}", option="--output")


def _report(figures: Mapping[str, Any], config: EngineConfig, output: Path | None) -> None:
    from jaxinfer.benchmarking.environment import describe_environment

    engine = json.loads(json.dumps(asdict(config), default=str))  # paths as text
    whole = {**figures, "engine": engine, **describe_environment()}
    print_figures(whole)
    if output is not None:
        try:
            output.write_text(json.dumps(whole) + "\n")
        except OSError as error:
            raise ConfigError(f"--output {str(output)!r} cannot be written: {error.strerror}", option="--output") from error


def _add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LatencyOptions)
    _add_output_option(parser)
    add_options(parser, EngineConfig)


def _run_latency(args: argparse.Namespace) -> int:
    options, config = from_args(args, LatencyOptions), from_args(args, EngineConfig)
    _check_output(args.output)
    from jaxinfer import LLM

    with closing(LLM(config=config)) as llm:
        _report(measure_latency(llm, options), config, args.output)
    return 0


def _add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ThroughputOptions)
    _add_output_option(parser)
    add_options(parser, EngineConfig)


def _run_throughput(args: argparse.Namespace) -> int:
    options, config = from_args(args, ThroughputOptions), from_args(args, EngineConfig)
    _check_output(args.output)
    from jaxinfer import LLM
    from jaxinfer.progress import StartupProgress

    with closing(LLM(config=config)) as llm:
        with StartupProgress(is_shown=True) as progress:
            figures = measure_throughput(llm, options, on_tokens=progress.update)
        _report(figures, config, args.output)
    return 0


LATENCY = Command("latency", "time one batch from submission to its last token", _add_latency_arguments, _run_latency)
THROUGHPUT = Command(
    "throughput", "requests and tokens per second with everything queued at once", _add_throughput_arguments, _run_throughput
)
COMMAND = Command("bench", "measure latency, throughput, or a running server", add_arguments, run)
