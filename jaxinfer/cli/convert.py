"""`jaxinfer convert SRC DST`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxinfer.cli.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a preset's name, a GGUF file, a Hugging Face folder or a Hub id")
    parser.add_argument("dst", metavar="DST", type=Path, help="the folder to write; it must not exist or be empty")
    parser.add_argument("--format", default="hf", choices=["hf"], help="hf: a Hugging Face folder with safetensors (default)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights written; default: float32, which holds dequantised weights exactly",
    )


def _run(args: argparse.Namespace) -> int:
    from jaxinfer.checkpoints.convert import convert

    print(convert(args.src, args.dst, format=args.format, dtype=args.dtype))
    return 0


COMMAND = Command(
    name="convert",
    help="write a model out as a Hugging Face folder; prints where it lies",
    add_arguments=_add_arguments,
    run=_run,
)
