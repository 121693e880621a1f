"""`jaxinfer eval perplexity | agreement`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.cli.bench import print_figures
from jaxinfer.cli.command import Command, add_subcommands
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.config import EngineConfig


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("The text")
    group.add_argument("--text", type=Path, help="a text file in UTF-8; default: the Brown corpus, downloaded on first use (3 MB)")
    group.add_argument("--num-tokens", type=int, default=8192, help="tokens in all; default: 8192")
    group.add_argument("--window", type=int, default=512, help="tokens that are predicted from each other; default: 512")
    add_options(parser, EngineConfig)


def _add_agreement_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reference", help="the model to compare with, in float32; default: the same one, unquantized")
    _add_text_options(parser)


def _perplexity(args: argparse.Namespace) -> int:
    from jaxinfer.evaluation.scores import measure_perplexity
    from jaxinfer.llm import LLM

    with closing(LLM(config=_config(args))) as llm, _bar() as show:
        windows = _windows(args, llm.tokenizer)
        result = measure_perplexity(llm.engine, windows, show)
        print_figures({**_about(llm), "perplexity": result.perplexity, "num_tokens": result.num_tokens})
    return 0


def _agreement(args: argparse.Namespace) -> int:
    from jaxinfer.evaluation.scores import log_probs, measure_agreement
    from jaxinfer.llm import LLM

    config = _config(args)
    floats = replace(
        config,
        model=args.reference or config.model,
        dtype="float32",
        quantization="none",
        cache=replace(config.cache, kv_cache_dtype="float32"),
    )
    with closing(LLM(config=floats)) as reference, closing(LLM(config=config)) as llm, _bar() as show:
        windows = _windows(args, llm.tokenizer)
        result = measure_agreement(llm.engine, windows, lambda index: log_probs(reference.engine, windows[index]), show)
        print_figures(
            {
                **_about(llm),
                "kl_mean": result.kl_mean,
                "kl_p99": result.kl_p99,
                "top1": result.top1,
                "perplexity": result.perplexity.perplexity,
                "reference_perplexity": result.reference.perplexity,
                "num_tokens": result.perplexity.num_tokens,
            }
        )
    return 0


def _config(args: argparse.Namespace) -> EngineConfig:
    """The engine's options, with a context that holds a window where none was asked for."""
    config = from_args(args, EngineConfig)
    if config.scheduler.max_model_len is None:
        config = replace(config, scheduler=replace(config.scheduler, max_model_len=args.window + 1))
    return config


def _windows(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    from jaxinfer.evaluation.corpus import brown_text, read_text
    from jaxinfer.evaluation.scores import windows_of

    if args.text is None:
        return windows_of(brown_text(), tokenizer, num_tokens=args.num_tokens, window=args.window)
    return windows_of([read_text(args.text)], tokenizer, num_tokens=args.num_tokens, window=args.window, max_per_text=None)


def _about(llm: Any) -> dict[str, Any]:
    return {
        "model": llm.description.model_name,
        "quantization": llm.config.quantization,
        "weight_bytes": llm.engine.runner.weight_bytes,
        "load_seconds": llm.startup.load_seconds,
    }


@contextmanager
def _bar() -> Generator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


PERPLEXITY = Command(
    name="perplexity",
    help="how well a model predicts real text",
    add_arguments=_add_text_options,
    run=_perplexity,
)
AGREEMENT = Command(
    name="agreement",
    help="how far a quantized model is from its floats: KL divergence and top-1 agreement",
    add_arguments=_add_agreement_options,
    run=_agreement,
)
COMMAND = Command(
    name="eval",
    help="measure the quality of a model: perplexity, agreement with its floats",
    add_arguments=lambda parser: add_subcommands(parser, [PERPLEXITY, AGREEMENT]),
    run=lambda args: args.subcommand.run(args),
)
