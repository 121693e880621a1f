"""All parts in order of importance, each in a process of its own with a limit of its own; what is there counts when time is up.

`benchmarks/gpu/run.sh [--minutes 8] [--out DIR] [--only PART ...] [--device cpu --tiny]`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import report

ROOT = Path(__file__).parents[2]
MIN_SECONDS = 8
"""A part that would get less is left out."""
DUMPED = ("bfloat16", "int8_weight_only", "int4", "int8")
"""Parts whose programs XLA writes down, so that command buffers can be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Parts that run at the same time, and the seconds they may take. Each has its own process: a kernel that hangs ends one."""

    parts: tuple[str, ...]
    seconds: float


TIMED = {"paged_attention": 80, "packed_matmul": 60, "int8_matmul": 45}
"""Operations whose speed matters most, before whole models, and their seconds; the others come after them."""


def stages(root: Path = ROOT) -> list[Stage]:
    """The most important first. Operations are found by their folders."""
    operations = sorted(path.parent.name for path in (root / "pallas_kernels").glob("*/api.py"))
    others = [operation for operation in operations if operation not in TIMED]
    return [
        Stage(parts=("machine",), seconds=40),
        Stage(parts=("copy",), seconds=40),
        Stage(parts=tuple(f"numerics_{operation}" for operation in operations), seconds=80),
        *(Stage(parts=(f"kernels_{operation}",), seconds=seconds) for operation, seconds in TIMED.items()),
        Stage(parts=("bfloat16",), seconds=90),
        Stage(parts=("int8_weight_only",), seconds=75),
        Stage(parts=("int4",), seconds=75),
        *(Stage(parts=(f"kernels_{operation}",), seconds=40) for operation in others),
        Stage(parts=("torch",), seconds=40),
        Stage(parts=("int8",), seconds=75),
    ]


def main() -> int:
    """Run, write results.json and the pictures, print a table and one line of JSON. Exit code 1: no part gave anything."""
    planned = stages()
    parts = [part for stage in planned for part in stage.parts]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="when everything ends, whatever is left")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, of " + " ".join(parts))
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes: shows that the script works, measures nothing")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench-gpu", help="what each part wrote, its log, and compiled programs")
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu needs --tiny: the full shapes would take hours")
    unknown = set(args.only or ()) - set(parts)
    if unknown:
        parser.error(f"--only: no part {', '.join(sorted(unknown))}")
    run = Run(args)
    for stage in planned:
        run.stage(Stage(parts=tuple(part for part in stage.parts if not args.only or part in args.only), seconds=stage.seconds))
    return run.finish()


def xla_flags(part: str, dump: Path) -> str:
    """Models: programs are written down. Kernels: no CUDA graphs, in which calls that do not need each other may overlap."""
    if part in DUMPED:
        return f"--xla_dump_to={dump} --xla_dump_hlo_module_re=.*forward.*"
    return "--xla_gpu_enable_command_buffer=" if part.startswith("kernels_") else ""


class Run:
    """The parts' processes and the file of their results."""

    def __init__(self, args: argparse.Namespace):
        self._started = time.monotonic()
        self._deadline = self._started + 60 * args.minutes
        self._args = args
        self._folder = args.work.absolute() / "parts"
        self._cache = args.work.absolute() / "compiled"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        args.out.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {
            "benchmark": "gpu",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": args.device,
            "is_tiny": args.tiny,
            "parts": {},
        }

    def stage(self, stage: Stage) -> None:
        """Start its parts, wait for them, keep what they wrote; whatever happens to them."""
        left = self._deadline - time.monotonic()
        if not stage.parts:
            return
        if left < MIN_SECONDS:
            self.results["parts"] |= {part: {"status": f"left out: {max(0, left):.0f} s left", "rows": []} for part in stage.parts}
            self._write()
            return
        seconds = min(stage.seconds, left - 2)
        started = time.monotonic()
        print(f"-- {', '.join(stage.parts)} (at most {seconds:.0f} s)", flush=True)
        processes = {part: self._start(part, seconds, len(stage.parts)) for part in stage.parts}
        for part, process in processes.items():
            status = self._wait(process, started + seconds)
            file = self._folder / f"{part}.json"
            rows = json.loads(file.read_text()) if file.exists() else []
            self.results["parts"][part] = {"status": status, "seconds": round(time.monotonic() - started, 1), "rows": rows}
            if status != "whole":
                log = (self._folder / f"{part}.log").read_text().strip()
                self.results["parts"][part]["log"] = log[-1500:]
            print(f"   {part}: {status}, {len(rows)} rows, {time.monotonic() - started:.0f} s", flush=True)
            self._write()

    def _start(self, part: str, seconds: float, num_beside: int) -> subprocess.Popen[bytes]:
        dump = self._folder / f"{part}.dump"
        environment = dict(os.environ)
        if self._args.device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        else:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {xla_flags(part, dump)}".strip()
        if num_beside > 1:  # else the first would take three quarters of the memory
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        command = [sys.executable, "-m", "benchmarks.gpu.part", part, "--folder", str(self._folder), "--cache", str(self._cache)]
        # A part stops by itself a little before it is stopped: what it has begun is then whole.
        command += ["--seconds", str(max(1.0, seconds - 10)), "--dump", str(dump), *(["--tiny"] if self._args.tiny else [])]
        with (self._folder / f"{part}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> str:
        try:
            code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "stopped: its time was up"
        return "whole" if code == 0 else f"ended with exit code {code}"

    def _write(self) -> None:
        self.results["seconds"] = round(time.monotonic() - self._started, 1)
        unfinished = self._args.out / "results.tmp"
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(unfinished, self._args.out / "results.json")

    def finish(self) -> int:
        """Table, pictures, the last line."""
        self.results["judged"] = [] if self._args.tiny else report.judge(self.results["parts"])
        self.results["pictures"] = report.draw(self.results["parts"], self._args.out)
        self._write()
        print(report.table(self.results["parts"], self.results["judged"]))
        print(json.dumps(report.last_line(self.results)))
        return 0 if any(part["rows"] for part in self.results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
