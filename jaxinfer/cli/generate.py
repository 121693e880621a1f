"""`jaxinfer generate`: prompts in, text out, one line of figures last."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from jaxinfer.cli.command import Command
from jaxinfer.cli.figures import AnswerFigures, batch_line, startup_line
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.cli.sampling import add_sampling_options, sampling_from_args
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.request import SamplingParams

DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, then every option of EngineConfig and SamplingParams."""
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="the prompt; may be repeated; default: standard input")
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a chat message: apply the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    add_sampling_options(parser, defaults=DEFAULTS)
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Generate for each prompt; a lone answer streams. Text goes to standard output, figures to standard error."""
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat: without it the prompt is continued as it is", option="--system")
    params = sampling_from_args(args)
    config = from_args(args, EngineConfig)
    prompts = _prompts(args.prompt)
    from jaxinfer import LLM

    with closing(LLM(config=config)) as llm:
        is_lone = len(prompts) == 1 and params.n == 1
        figures = _stream(llm, prompts[0], params, args) if is_lone else _batch(llm, prompts, params, args)
        print(f"{figures}, {startup_line(llm.startup)}", file=sys.stderr)
    return 0


def _prompts(given: list[str] | None) -> list[str]:
    if given is not None:
        return given
    if sys.stdin.isatty():
        print("Type the prompt, end with Ctrl-D.", file=sys.stderr)
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("no prompt: give --prompt TEXT, or text on standard input", option="--prompt")
    return [text]


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def _stream(llm: LLM, prompt: str, params: SamplingParams, args: argparse.Namespace) -> str:
    figures = AnswerFigures()
    deltas = llm.stream_chat(_messages(prompt, args.system), params) if args.chat else llm.stream(prompt, params)
    for text in figures.texts(deltas):
        print(text, end="", flush=True)
    print(flush=True)
    return figures.line()


def _batch(llm: LLM, prompts: list[str], params: SamplingParams, args: argparse.Namespace) -> str:
    started = time.monotonic()
    conversations = [_messages(prompt, args.system) for prompt in prompts]
    outputs = llm.chat(conversations, params) if args.chat else llm.generate(prompts, params)
    elapsed_seconds = time.monotonic() - started
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        if output.error is not None:
            raise EngineDeadError(f"the answer to prompt {number} broke off: {output.error}")
        for completion in output.outputs:
            print(f"[{number}] {prompt}\n{completion.text}\n", flush=True)
    return batch_line(outputs, elapsed_seconds)


COMMAND = Command("generate", "generate text for prompts given as options or on standard input", add_arguments, run)
