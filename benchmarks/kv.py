"""KV memory: what the prefix cache, swap and the tiers below the device are worth. Tables of figures, then one JSON line.

`python benchmarks/kv.py [--part shared-prefix|chat|preemption|waste|tiers]... [--output FILE]`

First the machine's own rates are measured (memory copy, disk, matrix product). From them follows, before each part is run, a
floor: what it takes at least. `--output` is written after the floors and again after each part, so that nobody can say
afterwards what was expected. Exit code 1: something did not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kv_parts import chat, preemption, shared_prefix, tiers, waste
from kv_parts.bench import MODEL, Bench, Part, measure_machine

from jaxinfer.benchmarking.environment import describe_environment

PARTS: dict[str, Part] = {"shared-prefix": shared_prefix, "chat": chat, "preemption": preemption, "waste": waste, "tiers": tiers}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given several times; default: all")
    parser.add_argument("--quantization", choices=("int8", "auto", "none"), default="int8", help="of SmolLM2-135M (default: int8)")
    parser.add_argument("--repeats", type=int, default=3, help="of what is short enough to be repeated (default: 3)")
    parser.add_argument("--small", action="store_true", help="little work, to see that it runs: the figures mean nothing")
    parser.add_argument("--scratch", type=Path, help="folder on the disk that the disk tier is to be measured on; default: a temporary one")
    parser.add_argument("--output", type=Path, help="also write the JSON line to this file")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Floors of all parts, then the parts."""
    names = [name for name in PARTS if not options.part or name in options.part]
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    bench = Bench(measure_machine(scratch), options.quantization, options.repeats, options.small, tell, scratch)
    floors = {name: PARTS[name].floor(bench) for name in names}
    line: dict[str, Any] = {"benchmark": "kv", **describe_environment(), "model": MODEL, "quantization": options.quantization}
    line |= {"repeats": options.repeats, "is_small": options.small, "rates": asdict(bench.machine), "floors": floors, "measured": {}}
    keep(line, options.output)
    for name in names:
        tell(f"{name}: floor {floors[name]}")
        line["measured"][name] = PARTS[name].measure(bench)
        keep(line, options.output)
        for claim, is_true in line["measured"][name]["holds"].items():
            tell(f"  {'yes' if is_true else 'NO '}  {claim}")
    return line


def keep(line: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(line) + "\n")


def main() -> int:
    """Returns the exit code."""
    options = parse_arguments(sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        line = run(options, options.scratch or Path(temporary))
    print(json.dumps(line))
    return 0 if all(all(part["holds"].values()) for part in line["measured"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
