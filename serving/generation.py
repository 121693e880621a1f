"""Runs the prompts of one HTTP request on the engine, together, and never leaves one running behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from jaxinfer.errors import RequestError
from jaxinfer.request import FinishReason, GenerationRequest, RequestDelta, RequestId, RequestOutput, SamplingParams
from serving.delta_stream import DeltaStream
from serving.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from serving.protocol.answers import Prompt
from serving.protocol.fields import RequestOptions
from serving.state import ServerState


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One HTTP request's work: its prompts share parameters; `options` are GenerationRequest's own fields."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions

    def requests(self) -> list[GenerationRequest]:
        """One engine request per prompt."""
        is_single = len(self.prompts) == 1
        return [
            GenerationRequest(
                request_id=RequestId(self.request_id if is_single else f"{self.request_id}-{position}"),
                prompt_token_ids=prompt.token_ids,
                params=self.params,
                priority=self.options.priority,
                user=self.options.user,
                timeout=self.options.timeout,
                cache_salt=self.options.cache_salt,
            )
            for position, prompt in enumerate(self.prompts)
        ]


def _submit(state: ServerState, requests: Sequence[GenerationRequest]) -> list[DeltaStream]:
    try:
        return state.engine.submit_all(requests)
    except RequestError as error:
        longest = max(len(request.prompt_token_ids) for request in requests)
        is_too_long = error.param == "prompt" and longest > state.engine.description.max_prompt_tokens
        code = CONTEXT_LENGTH_EXCEEDED if is_too_long else None
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param, code=code) from error


@asynccontextmanager
async def submitted(state: ServerState, generation: Generation) -> AsyncGenerator[list[DeltaStream]]:
    """The streams of all prompts; leaving, in whatever way, aborts those that have not ended.

    Raises:
        ApiError: 400 when one of them can never run; then none does.
        QueueFullError: when too many wait; then none runs.
        EngineDeadError: when the engine takes no requests.
    """
    streams = _submit(state, generation.requests())
    try:
        yield streams
    finally:
        for stream in streams:
            await stream.aclose()


async def _checked(state: ServerState, stream: DeltaStream, output: RequestOutput) -> AsyncIterator[RequestDelta]:
    """A stream's deltas, added up in `output`; the request's end is counted."""
    async for delta in stream:
        output.add(delta)
        if delta.error is not None:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, delta.error, code="generation_failed")
        yield delta
    lengths = [len(completion.token_ids) for completion in output.outputs]
    state.metrics.observe_finished(output.timings, len(output.prompt_token_ids), sum(lengths), max(lengths))


def _empty_outputs(generation: Generation, streams: Sequence[DeltaStream]) -> list[RequestOutput]:
    n = generation.params.n
    return [
        RequestOutput.empty(stream.request_id, None, prompt.token_ids, n)
        for stream, prompt in zip(streams, generation.prompts, strict=True)
    ]


def _require_tokens(outputs: Sequence[RequestOutput]) -> None:
    """Raises ApiError when all has ended and time ran out before anything was generated: there is nothing to answer with."""
    completions = [completion for output in outputs for completion in output.outputs]
    if (
        all(output.is_finished for output in outputs)
        and not any(completion.token_ids for completion in completions)
        and any(completion.finish_reason is FinishReason.TIMEOUT for completion in completions)
    ):
        raise ApiError(HTTPStatus.GATEWAY_TIMEOUT, "the request timed out before its first token", code="request_timeout")


async def run_whole(state: ServerState, generation: Generation, streams: Sequence[DeltaStream]) -> list[RequestOutput]:
    """Read every stream to its end. One after the other is enough: each keeps what its reader has not taken yet.

    Raises:
        ApiError: 504 when time ran out before the first token of all.
    """
    outputs = _empty_outputs(generation, streams)
    for stream, output in zip(streams, outputs, strict=True):
        async for _ in _checked(state, stream, output):
            pass
    _require_tokens(outputs)
    return outputs


async def run_streamed(
    state: ServerState, generation: Generation, streams: Sequence[DeltaStream]
) -> AsyncIterator[tuple[int, RequestDelta]]:
    """Deltas of all prompts as they come, each with its prompt's position. Raises as `run_whole`."""
    outputs = _empty_outputs(generation, streams)
    async with aclosing(_merged(state, streams, outputs)) as deltas:
        async for position, delta in deltas:
            _require_tokens(outputs)
            yield position, delta


async def _merged(
    state: ServerState, streams: Sequence[DeltaStream], outputs: Sequence[RequestOutput]
) -> AsyncGenerator[tuple[int, RequestDelta]]:
    if len(streams) == 1:
        async for delta in _checked(state, streams[0], outputs[0]):
            yield 0, delta
        return
    # One slot: a reader that is slow leaves the deltas in their streams, which merge them.
    merged: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(position: int, stream: DeltaStream) -> None:
        try:
            async for delta in _checked(state, stream, outputs[position]):
                await merged.put((position, delta))
            await merged.put((position, None))
        except Exception as error:  # Carried over to the reader, who raises it.
            await merged.put((position, error))

    tasks = [asyncio.create_task(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            position, item = await merged.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield position, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
