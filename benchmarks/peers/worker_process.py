"""The parent's end of a worker: one process per engine, questions and answers by `protocol`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_TAIL_CHARS = 2000


class WorkerFailure(Exception):
    """A worker answered with an error or ended; the message has the end of what it wrote to stderr."""


class WorkerProcess:
    """Starts `command`, which must speak `protocol`; use as a context manager."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]):
        self.name = name
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **environment}
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one question.

        Raises:
            WorkerFailure: the worker failed or is gone.
        """
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailure(f"{self.name} ended with exit code {self._process.wait()}\n{self._log_tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailure(f"{self.name}: {answer['error']}\n{self._log_tail()}")
        return answer

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-LOG_TAIL_CHARS:]

    def close(self) -> None:
        """End the worker: it leaves when its stdin closes, and is killed when it does not."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_command(python: Path, script: str, *arguments: str) -> list[str]:
    """The command of one of this folder's workers."""
    return [str(python), str(Path(__file__).with_name(script)), *arguments]
