"""LLM: the engine for people in notebooks and scripts."""

from __future__ import annotations

import itertools
from collections import deque
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
        self._inboxes: dict[RequestId, deque[RequestDelta]] = {}

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

    def fork(
        self,
        source: RequestOutput | RequestId,
        params: SamplingParams | Sequence[SamplingParams],
        *,
        index: int = 0,
        suffixes: Sequence[Prompt] | None = None,
    ) -> list[RequestOutput]:
        """Continue one completion in several ways, on the KV blocks that it has: the base of beam and tree search.

        Each continuation's prompt is the source's prompt and its tokens so far, the one that ended it included, and a suffix
        where there are any. A completion that still runs, in a stream, goes on undisturbed and its blocks are shared as they
        are; those of one that has ended are found in the prefix cache. A search that keeps the best of four at every turn:

            best = llm.generate(question, turn)[0]
            for depth in range(10):
                branches = llm.fork(best, [turn.replace(seed=4 * depth + branch) for branch in range(4)])
                best = max(branches, key=score)

        Args:
            source: what `generate`, `chat` or `fork` returned, or the id of a running request.
            params: one for all continuations, or one for each.
            index: which of the source's `n` completions.
            suffixes: texts or token ids, one for each continuation.

        Raises:
            RequestError: there is no such completion, or a continuation can never run; none is run then.
        """
        token_ids, fork_of = self._source(source, index)
        count = 1 if isinstance(params, SamplingParams) else len(params)
        ends = [self._encode_suffix(suffix) for suffix in suffixes] if suffixes is not None else [()] * count
        prompts = [(*token_ids, *end) for end in ends]
        return self._run(prompts, _per_prompt(params, len(ends)), prompts, False, fork_of=fork_of, fork_index=index)

    def close(self) -> None:
        """End what is running and keep on disk what shall be found there again; the memory goes with the object."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)

    def _encode_suffix(self, suffix: Prompt) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(suffix, add_special_tokens=False)) if isinstance(suffix, str) else tuple(suffix)

    def _source(self, source: RequestOutput | RequestId, index: int) -> tuple[tuple[int, ...], RequestId | None]:
        """Prompt and tokens so far of a completion, and its request's id while it runs."""
        if not isinstance(source, RequestOutput):
            return self.engine.token_ids(source, index), source
        if not 0 <= index < len(source.outputs):
            raise RequestError(f"index must be from 0 to {len(source.outputs) - 1}, got {index}", param="index")
        completion = source.outputs[index]
        if completion.finish_reason is None and source.request_id in self.engine.running_ids:
            return self.engine.token_ids(source.request_id, index), source.request_id
        return (*source.prompt_token_ids, *completion.token_ids), None

    def _request(self, prompt_token_ids: Sequence[int], params: SamplingParams, **fields: Any) -> GenerationRequest:
        request_id = RequestId(f"llm-{next(self._next_id)}")
        return GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt_token_ids), params=params, **fields)

    def _stream(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Iterator[RequestDelta]:
        request = self._request(prompt_token_ids, params)
        inbox = self._inboxes[request.request_id] = deque()
        try:
            self.engine.add_request(request)
            while inbox or self.engine.has_work:
                if not inbox:
                    self._step()
                    continue
                delta = inbox.popleft()
                yield delta
                if delta.is_finished:
                    return
        finally:
            del self._inboxes[request.request_id]
            self.engine.abort(request.request_id)

    def _step(self) -> list[RequestDelta]:
        """One step; what it brings for open streams waits there for whoever reads them."""
        deltas = self.engine.step()
        for delta in deltas:
            if (inbox := self._inboxes.get(delta.request_id)) is not None:
                inbox.append(delta)
        return deltas

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], texts: Sequence[Any], show_progress: bool, **fields: Any
    ) -> list[RequestOutput]:
        requests = [self._request(prompt, one, **fields) for prompt, one in zip(prompts, params, strict=True)]
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
                for delta in self._step():
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
        raise RequestError(f"params must be one or as many as there are prompts ({count}), got {len(params)}", param="params")
    return list(params)
