"""`jaxinfer bench latency | throughput`, and what the entry-point group `jaxinfer.bench_commands` adds (`serve`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from jaxinfer.benchmarking import LatencyOptions, ThroughputOptions, measure_latency, measure_throughput
from jaxinfer.cli.command import BENCH_COMMAND_GROUP, Command, add_subcommands, find_commands, load_command
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The kinds of measurement as subcommands."""
    others = [load_command(entry) for entry in find_commands(BENCH_COMMAND_GROUP).values()]
    add_subcommands(parser, [LATENCY, THROUGHPUT, *others])


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement."""
    return args.subcommand.run(args)


def print_figures(figures: Mapping[str, Any]) -> None:
    """A table for a person, then one JSON line for a program."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console(highlight=False, markup=False).print(table)
    print(json.dumps(figures), flush=True)


def _add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LatencyOptions)
    add_options(parser, EngineConfig)


def _run_latency(args: argparse.Namespace) -> int:
    options, config = from_args(args, LatencyOptions), from_args(args, EngineConfig)
    from jaxinfer import LLM

    with closing(LLM(config=config)) as llm:
        print_figures(measure_latency(llm, options))
    return 0


def _add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ThroughputOptions)
    add_options(parser, EngineConfig)


def _run_throughput(args: argparse.Namespace) -> int:
    options, config = from_args(args, ThroughputOptions), from_args(args, EngineConfig)
    from jaxinfer import LLM

    with closing(LLM(config=config)) as llm:
        print_figures(measure_throughput(llm, options))
    return 0


LATENCY = Command("latency", "time one batch from submission to its last token", _add_latency_arguments, _run_latency)
THROUGHPUT = Command(
    "throughput", "requests and tokens per second with everything queued at once", _add_throughput_arguments, _run_throughput
)
COMMAND = Command("bench", "measure latency, throughput, or a running server", add_arguments, run)
