"""Stands in for jaxinfer.llm.LLM: answers word by word, one token id per word, and remembers what it was asked."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence

from jaxinfer.client import EngineDescription
from jaxinfer.config import EngineConfig
from jaxinfer.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestId,
    RequestOutput,
    RequestTimings,
    SamplingParams,
)

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class FakeStartup:
    load_seconds: float = 1.0
    compile_seconds: float = 2.0
    total_seconds: float = 3.5
    num_programs: int = 7


DESCRIPTION = EngineDescription(
    model_name="fake",
    max_model_len=64,
    vocab_size=100,
    num_kv_blocks=8,
    block_size=16,
    max_num_seqs=4,
    max_prompt_tokens=63,
    eos_token_ids=(2,),
)


class FakeLLM:
    """`reply` makes the answer from the prompt, or from the messages of a chat; `between` runs after each word."""

    def __init__(self, reply: Callable[[object], str], between: Callable[[], None] = lambda: None):
        self.reply = reply
        self.between = between
        self.startup = FakeStartup()
        self.description = DESCRIPTION
        self.config: EngineConfig | None = None
        self.asked: list[object] = []
        self.params: list[SamplingParams] = []
        self.num_closed_early = 0
        self.is_closed = False
        self.error: str | None = None

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[RequestDelta]:
        yield from self._deltas(prompt, params)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[RequestDelta]:
        yield from self._deltas([dict(message) for message in messages], params)

    def generate(self, prompts: Sequence[str | list[int]], params: SamplingParams, show_progress: bool = True) -> list[RequestOutput]:
        return [self._whole(prompt, params) for prompt in prompts]

    def chat(self, conversations: Sequence[Sequence[Message]], params: SamplingParams) -> list[RequestOutput]:
        return [self._whole([dict(message) for message in messages], params) for messages in conversations]

    def close(self) -> None:
        self.is_closed = True

    def _whole(self, asked: object, params: SamplingParams) -> RequestOutput:
        output = RequestOutput.empty(RequestId("r"), None, (1, 2, 3), params.n)
        for delta in self._deltas(asked, params):
            output.add(delta)
        return output

    def _deltas(self, asked: object, params: SamplingParams) -> Iterator[RequestDelta]:
        self.asked.append(asked)
        self.params.append(params)
        words = self.reply(asked).split(" ")
        try:
            for place, word in enumerate(words):
                is_last = place == len(words) - 1
                completion = CompletionOutput(
                    0, [place], word if place == 0 else " " + word, finish_reason=FinishReason.STOP if is_last else None
                )
                yield RequestDelta(RequestId("r"), [completion], is_last, timings=RequestTimings(arrival=0.0, first_token=0.25))
                self.between()
        except GeneratorExit:
            self.num_closed_early += 1
            raise
        if self.error is not None:
            yield RequestDelta(RequestId("r"), [], True, error=self.error)


def as_module(llm: FakeLLM) -> types.ModuleType:
    """A module to put in the place of jaxinfer.llm, whose LLM(config=...) gives `llm`."""
    module = types.ModuleType("jaxinfer.llm")

    def make(*, config: EngineConfig) -> FakeLLM:
        llm.config = config
        return llm

    module.LLM = make  # type: ignore[attr-defined]
    return module
