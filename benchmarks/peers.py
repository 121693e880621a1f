"""Side by side: the same prompts through jaxinfer and its peers, alternating in one run.

`python benchmarks/peers.py` makes its own `.venv-peers`, runs each engine in a process of its own with the same number of threads,
shows a table and prints one JSON line. Exit code 1: a peer is missing (but for transformers, which needs torch), or an engine failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.environment import EnvironmentFailure, make_environment
from peers.measure import measure
from peers.protocol import Load
from peers.worker_process import WorkerFailure, WorkerProcess, worker_command

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-peers"
TRANSFORMERS = "transformers-float32"
WORKERS = {
    "jaxinfer-int8": ("worker_jaxinfer.py", "int8"),
    "jaxinfer-float32": ("worker_jaxinfer.py", "none"),
    "jaxinfer-as-stored": ("worker_jaxinfer.py", "auto"),
    "llama.cpp": ("worker_llamacpp.py",),
    "openvino-genai": ("worker_openvino.py",),
    TRANSFORMERS: ("worker_transformers.py",),
}
MODEL_CODE = "from jaxinfer.checkpoints.pull import find_preset, pull; print(pull(find_preset('smollm2-135m')))"


def _engine_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(WORKERS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown engine {', '.join(unknown)}; known: {', '.join(WORKERS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def parse_arguments(arguments: list[str], num_prompts: int) -> argparse.Namespace:
    """The command line; a wrong one ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=lambda text: [_positive(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=_positive, default=128)
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--threads", type=_positive, default=2, help="of each engine")
    parser.add_argument("--engines", type=_engine_names, default=list(WORKERS), help=f"default: {','.join(WORKERS)}")
    parser.add_argument("--with-transformers", choices=("auto", "yes", "no"), default="auto", help="auto: where torch installs")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: SmolLM2-135M-Instruct, pulled by jaxinfer")
    parser.add_argument("--output", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args(arguments)
    if max(options.sequences) > num_prompts:
        parser.error(f"--sequences: there are {num_prompts} prompts, got {max(options.sequences)}")
    return options


def enter_environment(options: argparse.Namespace) -> bool:
    """Make `.venv-peers`, go on inside it (this process is replaced), and say whether transformers is there."""
    wants_transformers = options.with_transformers != "no" and TRANSFORMERS in options.engines
    python, has_transformers = make_environment(ENVIRONMENT, with_transformers=wants_transformers)
    if options.with_transformers == "yes" and not has_transformers:
        raise EnvironmentFailure("--with-transformers yes, but torch and transformers cannot be installed")
    if Path(sys.prefix).resolve() != ENVIRONMENT.resolve():
        os.execv(python, [str(python), __file__, *sys.argv[1:]])
    return has_transformers


def project_python() -> Path:
    """The Python that has jaxinfer."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        raise EnvironmentFailure(f"{python} is not there; run 'make setup' first")
    return python


def find_model(options: argparse.Namespace) -> Path:
    """The GGUF that all engines read."""
    if options.model is not None:
        if not options.model.is_file():
            raise EnvironmentFailure(f"--model {options.model}: no such file")
        return options.model.resolve()
    pulled = subprocess.run([project_python(), "-c", MODEL_CODE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if pulled.returncode != 0:
        raise EnvironmentFailure("jaxinfer could not pull smollm2-135m; its message stands above")
    return Path(pulled.stdout.strip())


def start(name: str, threads: int) -> WorkerProcess:
    """Start an engine's worker."""
    script, *arguments = WORKERS[name]
    python = project_python() if script == "worker_jaxinfer.py" else Path(sys.executable)
    # The CPU is compared, also on a machine with a GPU. OpenMP reads its number of threads before a worker could say it.
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)}
    return WorkerProcess(name, worker_command(python, script, *arguments), environment)


def run(options: argparse.Namespace, prompts: list[list[int]], names: list[str]) -> dict[str, Any]:
    """Load every engine, measure, close; the JSON line's content."""
    from peers import report  # needs rich, which stands in .venv-peers only
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    load = Load(str(find_model(options)), options.threads, prompts[: max(options.sequences)], options.sequences, options.new_tokens)
    about: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        workers = []
        for name in names:
            worker = stack.enter_context(start(name, options.threads))
            try:
                about[name] = worker.ask({"op": "load", **asdict(load)})
            except WorkerFailure as failure:
                if name != TRANSFORMERS or options.with_transformers == "yes":
                    raise
                console.print(f"{name} is left out: {failure}", highlight=False)
                continue
            workers.append(worker)
            versions = ", ".join(f"{package} {version}" for package, version in about[name]["versions"].items())
            console.print(f"{name}: {versions}, loaded and warm in {about[name]['load_seconds']:.1f} s", highlight=False)
        runs = measure(workers, options.sequences, options.rounds, lambda line: console.print(line, highlight=False))
    Console().print(report.table(runs, options.new_tokens))
    speeds = report.medians(runs)
    return {
        "benchmark": "peers",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine(),
        "model": Path(load.model).name,
        "threads": options.threads,
        "prompt_tokens": len(prompts[0]),
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "versions": {package: version for name in about for package, version in about[name]["versions"].items()},
        "settings": {name: about[name]["settings"] for name in about},
        "load_seconds": {name: round(about[name]["load_seconds"], 1) for name in about},
        "tokens_per_second": speeds,
        "all_rounds": {name: {str(n): [round(value, 1) for value in values] for n, values in by_n.items()} for name, by_n in runs.items()},
        **report.ratios(speeds),
    }


def main() -> int:
    """Returns the exit code."""
    prompts = json.loads((Path(__file__).parent / "peers" / "prompts.json").read_text())
    options = parse_arguments(sys.argv[1:], len(prompts))
    try:
        has_transformers = enter_environment(options)
        names = [name for name in options.engines if name != TRANSFORMERS or has_transformers]
        line = json.dumps(run(options, prompts, names))
    except (EnvironmentFailure, WorkerFailure) as failure:
        print(f"benchmarks/peers.py: {failure}", file=sys.stderr)
        return 1
    if options.output is not None:
        options.output.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
