"""`kill -9` during a conversion: whatever is left, nothing of it loads unless it is whole."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.manifest import verify_folder
from jaxinfer.errors import JaxInferError
from tests.checkpoints.checkpoint_files import write_gguf

PROGRAM = """
import sys
from pathlib import Path
from jaxinfer.checkpoints.convert import ConvertOptions, convert
if sys.argv[3] == "orbax":
    import orbax.checkpoint
options = ConvertOptions(format=sys.argv[3], max_shard_bytes=20_000)
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[1], Path(sys.argv[2]), options)
print("done", flush=True)
"""


def start(source: Path, target: Path, format: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(source), str(target), format]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()


def loads(folder: Path) -> bool:
    try:
        for tensor in open_checkpoint(str(folder)).tensors.values():
            tensor.read()
    except JaxInferError:
        return False
    return True


def kill_at(source: Path, parent: Path, format: str, seconds: float) -> bool:
    """Whether the folder had appeared. What is left is checked."""
    parent.mkdir()
    with start(source, parent / "new", format) as process:
        go(process)
        time.sleep(seconds)
        process.kill()
    for left in parent.iterdir():
        if left.name == "new":
            verify_folder(left)
            assert loads(left)
        else:
            assert not loads(left)
    return (parent / "new").exists()


def seconds_of_a_conversion(source: Path, parent: Path, format: str) -> float:
    parent.mkdir()
    with start(source, parent / "new", format) as process:
        go(process)
        started = time.monotonic()
        assert process.stdout is not None and process.stdout.readline() == "done\n"
        seconds = time.monotonic() - started
    assert loads(parent / "new")
    return seconds


def test_a_conversion_that_is_killed_leaves_nothing_that_loads(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", vocabulary=True)
    whole = seconds_of_a_conversion(source, tmp_path / "whole", "hf")
    for number, share in enumerate((0.2, 0.5, 0.8)):
        kill_at(source, tmp_path / f"killed{number}", "hf", whole * share)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_twenty_moments(tmp_path: Path, format: str) -> None:
    source, rng = write_gguf(tmp_path / "tiny.gguf", vocabulary=True), random.Random(9)
    whole = seconds_of_a_conversion(source, tmp_path / "whole", format)
    appeared = sum(kill_at(source, tmp_path / f"killed{number}", format, rng.uniform(0, 1.2 * whole)) for number in range(20))
    assert appeared < 15, "most were killed too late"
