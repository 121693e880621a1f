"""What was measured, as one line for a person."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxinfer.errors import EngineDeadError

if TYPE_CHECKING:
    from jaxinfer.request import RequestDelta, RequestOutput
    from jaxinfer.startup import StartupTimings


@dataclass(slots=True)
class AnswerFigures:
    """Counts tokens while an answer streams. Times are seconds of `time.monotonic()`."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0

    def texts(self, deltas: Iterable[RequestDelta]) -> Iterator[str]:
        """The new text of each delta, counted on its way.

        Raises:
            EngineDeadError: when the request ended with an error.
        """
        for delta in deltas:
            if delta.error is not None:
                raise EngineDeadError(f"the answer broke off: {delta.error}")
            num_new = sum(len(output.token_ids) for output in delta.outputs)
            if num_new:
                self._count(num_new)
            yield "".join(output.text for output in delta.outputs)

    def _count(self, num_new: int) -> None:
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token
            self.num_first_tokens = num_new
        self.num_tokens += num_new

    def line(self) -> str:
        """Tokens, time to the first one, and the rate of those after it."""
        if self.first_token is None:
            return "no tokens"
        parts = [f"{self.num_tokens} tokens", f"time to first token {_seconds(self.first_token - self.started)}"]
        later = self.num_tokens - self.num_first_tokens
        if later:
            parts.append(f"{later / (self.last_token - self.first_token):.1f} tokens/s")
        return ", ".join(parts)


def batch_line(outputs: Iterable[RequestOutput], elapsed_seconds: float) -> str:
    """The figures of a batch that took `elapsed_seconds`."""
    outputs = list(outputs)
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    firsts = [output.timings.time_to_first_token_seconds for output in outputs]
    known = [seconds for seconds in firsts if seconds is not None]
    mean = f", mean time to first token {_seconds(sum(known) / len(known))}" if known else ""
    return f"{num_tokens} tokens for {len(outputs)} prompts{mean}, {num_tokens / elapsed_seconds:.1f} tokens/s"


def startup_line(startup: StartupTimings) -> str:
    """What it took until the first request could be served."""
    return (
        f"start-up {_seconds(startup.total_seconds)} "
        f"(load {_seconds(startup.load_seconds)}, compile {_seconds(startup.compile_seconds)} for {startup.num_programs} programs)"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
