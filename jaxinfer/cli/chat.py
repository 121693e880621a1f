"""`jaxinfer chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, cast

from jaxinfer.cli.command import Command
from jaxinfer.cli.figures import AnswerFigures, startup_line
from jaxinfer.cli.options import add_options, from_args
from jaxinfer.cli.sampling import add_sampling_options, sampling_from_args
from jaxinfer.config import EngineConfig
from jaxinfer.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxinfer.llm import LLM
    from jaxinfer.request import RequestDelta, SamplingParams

DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 1024}
HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation; without TEXT: none
/help           this list
/exit           leave (so does Ctrl-D)
Ctrl-C          stop the answer that is being written"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The system message, then every option of EngineConfig and SamplingParams."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    add_sampling_options(parser, defaults=DEFAULTS, exclude={"n"})
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of the input."""
    params = sampling_from_args(args)
    config = from_args(args, EngineConfig)
    from rich.console import Console

    from jaxinfer import LLM

    console = Console(highlight=False)
    with closing(LLM(config=config)) as llm:
        console.print(f"[bold]{llm.description.model_name}[/bold] [dim]{startup_line(llm.startup)}. /help lists the commands.[/dim]")
        Conversation(llm, params, console, system=args.system).run()
    return 0


@contextmanager
def stop_on_interrupt() -> Generator[list[bool]]:
    """Turn Ctrl-C into an entry in the yielded list, so that no engine step is torn; a second one interrupts as usual."""
    presses: list[bool] = []

    def press(number: int, frame: FrameType | None) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(True)

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass
class Conversation:
    """The messages so far and the loop that adds to them."""

    llm: LLM
    params: SamplingParams
    console: Console
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Read lines until /exit or the end of the input."""
        if sys.stdin.isatty():
            import readline  # noqa: F401  its import gives input() line editing and history
        self.reset()
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line.strip():
                self.answer(line)

    def _read(self) -> str | None:
        while True:
            try:
                return self.console.input("[bold green]you>[/bold green] ")
            except KeyboardInterrupt:
                self.console.print("\n[dim]/exit or Ctrl-D leaves[/dim]")
            except EOFError:
                self.console.print()
                return None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def command(self, line: str) -> bool:
        """Carry out a line that begins with a slash; False: leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.reset()
                self.console.print("[dim]forgotten[/dim]")
            case "/system":
                self.system = rest.strip() or None
                self.reset()
                self.console.print(f"[dim]system message {'set' if self.system else 'removed'}, conversation forgotten[/dim]")
            case "/help":
                self.console.print(HELP, style="dim", markup=False)
            case _:
                self.console.print(f"unknown command {name}; /help lists them", style="red", markup=False)
        return True

    def answer(self, question: str) -> None:
        """Stream the answer; what was written stays in the conversation, also when it was stopped."""
        self.messages.append({"role": "user", "content": question})
        figures = AnswerFigures()
        written: list[str] = []
        try:
            stream = cast("Generator[RequestDelta]", self.llm.stream_chat(self.messages, self.params))
            with stop_on_interrupt() as presses, closing(stream) as deltas:
                for text in figures.texts(deltas):
                    written.append(text)
                    self.console.out(text, end="")
                    if presses:
                        break
        except RequestError as error:
            self.messages.pop()
            self.console.print(f"{error}\n/reset starts anew", style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": "".join(written)})
        stopped = "stopped, " if presses else ""
        self.console.print(f"\n[dim]{stopped}{figures.line()}[/dim]\n")


COMMAND = Command("chat", "talk to the model in the terminal", add_arguments, run)
