"""Running the command line: in this process with a fake model, or as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.fake_llm import FakeLLM, as_module


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """What `from jaxinfer import LLM` gives while the test runs; set `reply` to change its answers."""
    llm = FakeLLM(lambda asked: "four little words here")
    monkeypatch.setitem(sys.modules, "jaxinfer.llm", as_module(llm))
    return llm


@pytest.fixture
def run_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m jaxinfer WORDS...`."""

    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jaxinfer", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]

    return run
