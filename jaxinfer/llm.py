"""LLM: the engine for people in notebooks and scripts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxinfer.client import EngineDescription
from jaxinfer.config import EngineConfig
from jaxinfer.errors import RequestError
from jaxinfer.progress import StartupProgress
from jaxinfer.request import GenerationRequest, RequestDelta, RequestId, RequestOutput, SamplingParams
from jaxinfer.startup import StartupTimings, build_engine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

MIN_PROMPTS_FOR_PROGRESS = 4


class LLM:
    """A model that is loaded, compiled and ready to generate.

    Args:
        config: everything at once; or
        options: the fields of EngineConfig and its parts by name, e.g. `LLM(model="smollm2-135m", quantization="int8")`.

    Raises:
        ConfigError: an option that does not exist or does not fit.
        CheckpointError, UnsupportedModelError: the model's files.
    """

    def __init__(self, *, config: EngineConfig | None = None, show_progress: bool = True, **options: Any):
        self.config = config or EngineConfig.from_options(**options)
        with StartupProgress(is_shown=show_progress) as progress:
            self.engine, self.startup = build_engine(self.config, progress.update)
        self._next_id = itertools.count()

    startup: StartupTimings
    """What starting took."""

    @property
    def description(self) -> EngineDescription:
        """What is served and how much of it."""
        return self.engine.description

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete texts or lists of token ids, all at once in continuous batches; outputs in the order of the prompts.

        Args:
            prompts: one prompt or several.
            params: one for all, or one for each prompt.
            show_progress: a bar on stderr for batches of four and more.

        Raises:
            RequestError: for the first prompt that can never run; none is run then.
        """
        many = _as_list(prompts)
        return self._run([self._encode(prompt) for prompt in many], _per_prompt(params, len(many)), many, show_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> Any:
        """Answer a conversation, or a list of conversations, through the model's chat template.

        Returns a RequestOutput for one conversation, a list of them for several.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [self.engine.tokenizer.encode_chat(conversation) for conversation in conversations]
        outputs = self._run(prompts, _per_prompt(params, len(prompts)), prompts, show_progress)
        return outputs[0] if is_one else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Complete one prompt, a step at a time; closing the iterator aborts it."""
        return self._stream(self._encode(prompt), params or SamplingParams())

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Answer one conversation, a step at a time; closing the iterator aborts it."""
        return self._stream(self.engine.tokenizer.encode_chat(messages), params or SamplingParams())

    def close(self) -> None:
        """End what is running; the memory goes with the object."""
        for request_id in list(self.engine.running_ids):
            self.engine.abort(request_id)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)

    def _request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> GenerationRequest:
        request_id = RequestId(f"llm-{next(self._next_id)}")
        return GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt_token_ids), params=params)

    def _stream(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Iterator[RequestDelta]:
        request = self._request(prompt_token_ids, params)
        self.engine.add_request(request)
        try:
            while self.engine.has_work:
                for delta in self.engine.step():
                    if delta.request_id == request.request_id:
                        yield delta
                        if delta.is_finished:
                            return
        finally:
            self.engine.abort(request.request_id)

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], texts: Sequence[Any], show_progress: bool
    ) -> list[RequestOutput]:
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        outputs = {
            request.request_id: RequestOutput.empty(
                request.request_id, text if isinstance(text, str) else None, request.prompt_token_ids, request.params.n
            )
            for request, text in zip(requests, texts, strict=True)
        }
        for request in requests:
            self.engine.validate(request)
        try:
            for request in requests:
                self.engine.add_request(request)
            self._drive(outputs, show_progress and len(requests) >= MIN_PROMPTS_FOR_PROGRESS)
        finally:
            # Interrupted, or a step failed: nothing of this call may go on in the next one.
            for request_id, output in outputs.items():
                if not output.is_finished:
                    self.engine.abort(request_id)
        return list(outputs.values())

    def _drive(self, outputs: Mapping[RequestId, RequestOutput], show_progress: bool) -> None:
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeElapsedColumn())
        left = len(outputs)
        num_tokens = 0
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not (show_progress and console.is_terminal), transient=True) as progress:
            bar = progress.add_task("", total=left, speed="")
            while left:
                for delta in self.engine.step():
                    if delta.request_id not in outputs:
                        continue
                    outputs[delta.request_id].add(delta)
                    num_tokens += sum(len(output.token_ids) for output in delta.outputs)
                    left -= delta.is_finished
                elapsed = progress.tasks[0].elapsed or 0.0
                progress.update(bar, completed=len(outputs) - left, speed=f"{num_tokens / max(elapsed, 1e-9):.0f} tokens/s")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) == 0:
        raise RequestError("prompts must hold at least one prompt, got none", param="prompt")
    return [list(prompts)] if isinstance(prompts[0], int) else list(prompts)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"params must be one or as many as prompts ({count}), got {len(params)}", param="params")
    return list(params)
