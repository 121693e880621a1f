"""`jaxinfer convert SRC DST`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.command import Command
from jaxinfer.config import GROUP_SIZES, EngineConfig, option_name
from jaxinfer.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.checkpoints.load import Storage
    from jaxinfer.tokenizer import Tokenizer

NEEDS = {
    "quantization_group_size": ("int4",),
    "quantization_zero_point": ("int4",),
    "quantize_embeddings": ("auto", "int8", "int8_weight_only", "int4"),
}
"""Options that say something of these methods only."""

CALIBRATION_TOKENS, CALIBRATION_WINDOW = 8192, 512


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a preset's name, a GGUF file, a folder or a Hub id")
    parser.add_argument("dst", metavar="DST", type=Path, help="the folder to write; it must not exist or be empty")
    parser.add_argument(
        "--format",
        default="hf",
        choices=["hf", "orbax"],
        help="hf: a Hugging Face folder with safetensors (default); orbax: arrays that are restored one by one, quantized or not",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the floats written; default: float32, which holds dequantised weights exactly",
    )
    parser.add_argument(
        "--quantization",
        default="none",
        choices=["none", "auto", "int8", "int8_weight_only", "int4"],
        help="orbax: how matrices are stored; none: in floats (default); auto: quantized where SRC stores them so",
    )
    sizes = ", ".join(map(str, GROUP_SIZES))
    parser.add_argument("--quantization-group-size", type=int, metavar="N", help=f"int4: weights that share a scale, {sizes}; default: 32")
    parser.add_argument(
        "--quantization-zero-point",
        choices=["auto", "on", "off"],
        help="int4: a zero point per group; default: auto, as `jaxinfer serve` takes it",
    )
    parser.add_argument(
        "--quantize-embeddings",
        choices=["auto", "on", "off"],
        help="embedding and output matrices too; default: auto, as `jaxinfer serve` takes it",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="int4, orbax: round for the inputs that real text gives every matrix (GPTQ); runs the model in float32 first",
    )
    parser.add_argument(
        "--calibration-text",
        type=Path,
        metavar="FILE",
        help="text to calibrate on, in UTF-8; default: the end of the Brown corpus, downloaded on first use (3 MB)",
    )
    parser.add_argument("--calibration-tokens", type=int, metavar="N", help="how much of it, in windows of 512 tokens; default: 8192")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=5_000_000_000, help="weights in one file (hf) or folder (orbax, at most 1e9)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare DST, and SRC if it was converted, with the digests in their manifests"
    )


def _run(args: argparse.Namespace) -> int:
    from jaxinfer.checkpoints.convert import ConvertOptions, convert

    storage = None if args.quantization == "none" else _storage(args)
    for name, methods in NEEDS.items():
        if getattr(args, name) is not None and args.quantization not in methods:
            option = option_name(name)
            raise ConfigError(f"{option} is for --quantization {', '.join(methods)}, got {args.quantization}", option=option)
    options = ConvertOptions(
        format=args.format,
        dtype=args.dtype,
        storage=storage,
        calibration=_calibration(args),
        max_shard_bytes=args.max_shard_bytes,
        is_verified=args.verify,
    )
    print(convert(args.src, args.dst, options))
    return 0


def _storage(args: argparse.Namespace) -> Storage:
    from jaxinfer.startup import resolve_storage  # late: floats are converted without jax

    given = {name: getattr(args, name) for name in NEEDS if getattr(args, name) is not None}
    return resolve_storage(EngineConfig(model=args.src, quantization=args.quantization, **given))


def _calibration(args: argparse.Namespace) -> Callable[[Tokenizer], list[list[int]]] | None:
    """What makes the windows of text to calibrate on, when that was asked for."""
    if not args.calibrate:
        for name in ("calibration_text", "calibration_tokens"):
            if getattr(args, name) is not None:
                option = option_name(name)
                raise ConfigError(f"{option} is for --calibrate", option=option)
        return None
    if args.quantization != "int4" or args.format != "orbax":
        got = f"--quantization {args.quantization} --format {args.format}"
        raise ConfigError(f"--calibrate needs --quantization int4 and --format orbax, got {got}", option="--calibrate")
    num_tokens = CALIBRATION_TOKENS if args.calibration_tokens is None else args.calibration_tokens
    if num_tokens < CALIBRATION_WINDOW:
        option = "--calibration-tokens"
        raise ConfigError(f"{option} must be at least a window of {CALIBRATION_WINDOW}, got {num_tokens}", option=option)
    from jaxinfer.evaluation.corpus import brown_text, read_text  # late, as above
    from jaxinfer.evaluation.scores import windows_of

    cut = partial(windows_of, num_tokens=num_tokens, window=CALIBRATION_WINDOW)
    if args.calibration_text is None:
        return lambda tokenizer: cut(brown_text(is_backwards=True), tokenizer)
    text = read_text(args.calibration_text, "--calibration-text")
    return lambda tokenizer: cut([text], tokenizer, max_per_text=None)


COMMAND = Command(
    name="convert",
    help="write a model out as a Hugging Face or Orbax folder; prints where it lies",
    add_arguments=_add_arguments,
    run=_run,
)
