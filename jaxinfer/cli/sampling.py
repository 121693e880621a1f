"""Sampling options of the commands that generate text."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.cli.options import add_options, from_args
from jaxinfer.request import SamplingParams

SAMPLING_HELP: Mapping[str, str] = {
    "n": "answers per prompt",
    "temperature": "randomness; 0 always takes the most probable token",
    "top_k": "sample from this many most probable tokens; 0: all",
    "top_p": "sample from the smallest set of tokens with this probability; 1: all",
    "min_p": "leave out tokens below this fraction of the best token's probability",
    "repetition_penalty": "divide the logits of tokens already seen, above 1 discourages them",
    "presence_penalty": "subtract from the logits of tokens already written, -2 to 2",
    "frequency_penalty": "subtract per occurrence from the logits of tokens already written, -2 to 2",
    "logit_bias": "add VALUE to the logit of token ID; may be repeated",
    "stop": "end before this text; may be repeated",
    "stop_token_ids": "end at this token id; may be repeated",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "min_tokens": "do not end before this many tokens",
    "max_tokens": "end after this many tokens",
    "ignore_eos": "go on past the end-of-sequence token",
    "bad_words": "never write this text; may be repeated",
    "allowed_token_ids": "only choose among these token ids; may be repeated",
    "skip_special_tokens": "leave special tokens out of the text",
}
NOT_ON_THE_COMMAND_LINE = frozenset({"seed", "logprobs", "prompt_logprobs"})
"""`--seed` is the engine's, which makes a whole run repeatable; log-probabilities are for programs."""


def add_sampling_options(
    parser: argparse.ArgumentParser, *, defaults: Mapping[str, Any] | None = None, exclude: Collection[str] = ()
) -> None:
    """Add one option per field of SamplingParams; `defaults` are the command's own."""
    add_options(parser, SamplingParams, help=SAMPLING_HELP, defaults=defaults, exclude={*NOT_ON_THE_COMMAND_LINE, *exclude})


def sampling_from_args(args: argparse.Namespace) -> SamplingParams:
    """The parameters asked for.

    Raises:
        RequestError: naming the field, for a value out of its range.
    """
    return from_args(args, SamplingParams, exclude=NOT_ON_THE_COMMAND_LINE)
