"""`jaxinfer serve` and `jaxinfer bench serve`. What is heavy is imported when a command runs."""

from __future__ import annotations

import argparse
import asyncio
import sys

from jaxinfer.cli.command import Command
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.config import EngineConfig
from serving.config import ServerConfig
from serving.load_options import LoadOptions


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ServerConfig)
    add_options(parser, EngineConfig)


def _run_serve(args: argparse.Namespace) -> int:
    from serving.run_server import run_server
    from serving.step_engine import StepEngine

    engine_config, server_config = from_args(args, EngineConfig), from_args(args, ServerConfig)
    if not _is_loopback(server_config.host) and not server_config.api_key:
        print(f"jaxinfer: warning: {server_config.host} is open to the network and no --api-key is set", file=sys.stderr)

    def build_engine() -> StepEngine:
        from jaxinfer.progress import StartupProgress
        from jaxinfer.startup import build_engine as build

        with StartupProgress(is_shown=True) as progress:
            engine, timings = build(engine_config, progress.update)
        programs = f"{timings.num_programs} programs"
        seconds = f"{timings.total_seconds:.1f} s: weights {timings.load_seconds:.1f}, compiling {timings.compile_seconds:.1f}"
        print(f"jaxinfer: loaded in {seconds} ({programs})", file=sys.stderr, flush=True)
        return engine

    return run_server(build_engine, server_config)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LoadOptions)


def _run_bench(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxinfer.cli.bench import print_figures
    from serving.load_client import RequestRecord, run_load

    options = from_args(args, LoadOptions)
    errors: list[str] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=options.num_prompts)

        def on_done(record: RequestRecord) -> None:
            progress.advance(task)
            if record.error is not None:
                errors.append(record.error)

        result = asyncio.run(run_load(options, on_done=on_done))
    for error in dict.fromkeys(errors):
        print(f"jaxinfer: failed: {error} ({errors.count(error)} times)", file=sys.stderr)
    print_figures(result)
    return 1 if result["failed"] else 0


SERVE = Command("serve", "serve a model over HTTP, with OpenAI's API and a chat page", _add_serve_arguments, _run_serve)
BENCH_SERVE = Command("serve", "load a running server with streamed requests and measure it", _add_bench_arguments, _run_bench)
