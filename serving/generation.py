"""Runs the prompts of one HTTP request on the engine, together, and never leaves one running behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from jaxinfer.errors import RequestError
from jaxinfer.request import GenerationRequest, RequestDelta, RequestId, RequestOutput, SamplingParams
from serving.delta_stream import DeltaStream
from serving.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from serving.protocol.answers import Prompt
from serving.state import ServerState


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One HTTP request's work: its prompts share parameters."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0

    def requests(self) -> list[GenerationRequest]:
        """One engine request per prompt."""
        is_single = len(self.prompts) == 1
        return [
            GenerationRequest(
                request_id=RequestId(self.request_id if is_single else f"{self.request_id}-{position}"),
                prompt_token_ids=prompt.token_ids,
                params=self.params,
                priority=self.priority,
            )
            for position, prompt in enumerate(self.prompts)
        ]


def _submit(state: ServerState, request: GenerationRequest) -> DeltaStream:
    try:
        return state.engine.submit(request)
    except RequestError as error:
        too_long = len(request.prompt_token_ids) > state.engine.description.max_prompt_tokens
        code = CONTEXT_LENGTH_EXCEEDED if too_long else None
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param, code=code) from error


@asynccontextmanager
async def submitted(state: ServerState, generation: Generation) -> AsyncGenerator[list[DeltaStream]]:
    """The streams of all prompts; leaving, in whatever way, aborts those that have not ended.

    Raises:
        ApiError: 400 when one of them can never run; then none does.
        EngineDeadError: when the engine takes no requests.
    """
    streams: list[DeltaStream] = []
    try:
        for request in generation.requests():
            streams.append(_submit(state, request))
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


def _empty_output(generation: Generation, stream: DeltaStream, position: int) -> RequestOutput:
    return RequestOutput.empty(stream.request_id, None, generation.prompts[position].token_ids, generation.params.n)


async def run_whole(state: ServerState, generation: Generation, streams: Sequence[DeltaStream]) -> list[RequestOutput]:
    """Read every stream to its end. One after the other is enough: each keeps what its reader has not taken yet."""
    outputs = []
    for position, stream in enumerate(streams):
        output = _empty_output(generation, stream, position)
        async for _ in _checked(state, stream, output):
            pass
        outputs.append(output)
    return outputs


async def run_streamed(
    state: ServerState, generation: Generation, streams: Sequence[DeltaStream]
) -> AsyncIterator[tuple[int, RequestDelta]]:
    """Deltas of all prompts as they come, each with its prompt's position."""
    if len(streams) == 1:
        async for delta in _checked(state, streams[0], _empty_output(generation, streams[0], 0)):
            yield 0, delta
        return
    # One slot: a reader that is slow leaves the deltas in their streams, which merge them.
    merged: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(position: int, stream: DeltaStream) -> None:
        try:
            async for delta in _checked(state, stream, _empty_output(generation, stream, position)):
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
