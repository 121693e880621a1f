"""`jaxinfer verify FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxinfer.cli.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that `jaxinfer convert` wrote")


def _run(args: argparse.Namespace) -> int:
    from jaxinfer.checkpoints.manifest import verify_folder

    print(f"{verify_folder(args.folder)} files are as they were written")
    return 0


COMMAND = Command(
    name="verify",
    help="compare a converted folder with the digests in its manifest",
    add_arguments=_add_arguments,
    run=_run,
)
