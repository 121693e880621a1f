"""A bar for people, one line for logs."""

from __future__ import annotations

import sys

import pytest

from jaxinfer.checkpoints.progress import byte_progress


def test_a_log_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("fetching x", 5_000_000) as show:
        for done in range(0, 5_000_001, 100_000):
            show(done)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "fetching x (5 MB)\n")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with byte_progress("fetching x", 5_000_000) as show:
        show(5_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching x" in captured.err
    assert "5.0/5.0 MB" in captured.err
