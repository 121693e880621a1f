"""`jaxinfer pull NAME`."""

from __future__ import annotations

import argparse

from jaxinfer.cli.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="a preset (smollm2-135m, qwen2.5-coder-0.5b, gemma3-270m) or a Hugging Face Hub id (org/name)"
    )


def _run(args: argparse.Namespace) -> int:
    from jaxinfer.checkpoints.hub import hub_folder, is_hub_id
    from jaxinfer.checkpoints.pull import preset_named, pull

    path = hub_folder(args.name) if is_hub_id(args.name) else pull(preset_named(args.name))
    print(path)
    return 0


COMMAND = Command(
    name="pull",
    help="download a model into the cache folder and check it; prints where it lies",
    add_arguments=_add_arguments,
    run=_run,
)
