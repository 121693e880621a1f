"""Finding commands, exit codes, and one line for what a person can mend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from jaxinfer.cli.command import BENCH_COMMAND_GROUP, COMMAND_GROUP, Command, find_commands, load_command
from jaxinfer.cli.main import main
from jaxinfer.errors import CheckpointError, ConfigError

RunProcess = Callable[..., subprocess.CompletedProcess[str]]


def raise_checkpoint_error(args: object) -> int:
    raise CheckpointError("cut off\nafter 10 bytes", file="model.gguf")


def raise_keyboard_interrupt(args: object) -> int:
    raise KeyboardInterrupt


def raise_bug(args: object) -> int:
    raise ZeroDivisionError("a bug")


def give_three(args: object) -> int:
    return 3


MENDABLE = Command("mendable", "x", lambda parser: None, raise_checkpoint_error)
INTERRUPTED = Command("interrupted", "x", lambda parser: None, raise_keyboard_interrupt)
BUG = Command("bug", "x", lambda parser: None, raise_bug)
THREE = Command("three", "x", lambda parser: None, give_three)
NOT_A_COMMAND = "text"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the commands of this file."""
    monkeypatch.setitem(sys.modules, "commands_under_test", sys.modules[__name__])
    names = ("MENDABLE", "INTERRUPTED", "BUG", "THREE", "NOT_A_COMMAND")
    found = {name.lower(): EntryPoint(name.lower(), f"commands_under_test:{name}", COMMAND_GROUP) for name in names}
    monkeypatch.setattr("jaxinfer.cli.main.find_commands", lambda group: found)


def test_all_commands_are_installed_and_bear_their_names() -> None:
    commands = find_commands(COMMAND_GROUP)
    assert set(commands) >= {"generate", "chat", "pull", "convert", "doctor", "bench", "serve"}
    for group in (COMMAND_GROUP, BENCH_COMMAND_GROUP):
        for name, entry in find_commands(group).items():
            assert load_command(entry).name == name


@pytest.mark.usefixtures("commands")
def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["three"]) == 3
    assert main(["interrupted"]) == 130
    assert capsys.readouterr() == ("", "")
    assert main(["mendable"]) == 1
    assert capsys.readouterr() == ("", "jaxinfer: error: model.gguf: cut off after 10 bytes\n")
    with pytest.raises(ZeroDivisionError):
        main(["bug"])
    with pytest.raises(TypeError, match="not_a_command"):
        main(["not_a_command"])


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(("word", "said"), [("mendabel", "did you mean mendable?"), ("--verbose", "option"), ("a\nb", "command")])
def test_unknown_words(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxinfer: error: unknown ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_model_that_is_not_there_is_a_config_or_checkpoint_error() -> None:
    from jaxinfer.checkpoints import open_checkpoint

    with pytest.raises((ConfigError, CheckpointError), match="nowhere"):
        open_checkpoint("/nowhere/model.gguf")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["generate", "--prompt", "x", "--block-sise", "16"], 2, "--block-sise"),
        (["generate", "--prompt", "x", "--block-siz", "16"], 2, "--block-siz"),
        (["generate", "--prompt", "x", "--block-size", "many"], 2, "'many'"),
        (["generate", "--prompt", "x", "--dtype", "int7"], 2, "int7"),
        (["generate", "--prompt", "x", "--block-size", "12"], 1, "power of two, got 12"),
        (["generate", "--prompt", "x", "--temperature", "nan"], 1, "temperature"),
        (["generate", "--prompt", "x", "--preemption", "swap", "--host-kv-bytes", "0"], 1, "--preemption"),
        (["generate", "--prompt", "x", "--system", "be brief"], 1, "--chat"),
        (["generate"], 1, "no prompt"),
        (["generate", "--prompt", "x", "--model", "/nowhere/model.gguf"], 1, "/nowhere/model.gguf"),
        (["bench"], 2, "WHAT"),
        (["bench", "latency", "--num-iters", "0"], 1, "--num-iters"),
        (["bench", "speed"], 2, "speed"),
        (["genrate"], 2, "did you mean generate?"),
        (["pull", "no-such-preset"], 1, "no-such-preset"),
    ],
)
def test_errors_of_the_real_command_line(run_process: RunProcess, words: list[str], code: int, said: str) -> None:
    ended = run_process(*words)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith("jaxinfer: error: ")
    assert ended.stderr.count("\n") == 1
    assert said in ended.stderr


def test_no_words_show_the_commands_and_fail(run_process: RunProcess) -> None:
    ended = run_process()
    assert ended.returncode == 2
    assert "usage: jaxinfer" in ended.stdout


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"], ["bench", "latency", "--help"], ["serve", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = f"""
import sys
from jaxinfer.cli.main import main
try:
    code = main({words!r})
except SystemExit as left:
    code = left.code
assert not code, code
heavy = {{"jax", "flax", "numpy", "aiohttp", "transformers", "orbax", "rich"}} & set(sys.modules)
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "jaxinfer" in ended.stdout


def test_a_reader_that_leaves_is_no_noise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "jaxinfer", "--help"]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # then it is the last flush that fails
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, env=buffered)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")
