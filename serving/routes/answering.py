"""What the two generation routes do once their body is read: run it, and answer whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from serving.generation import Generation, run_streamed, run_whole, submitted
from serving.json_text import dump_json
from serving.protocol.answers import Answer
from serving.sse import send_events
from serving.state import ServerState


async def answer_request(
    request: web.Request, state: ServerState, generation: Generation, answer: Answer, *, is_streamed: bool
) -> web.StreamResponse:
    """Run the prompts and send the answer; when the client leaves, the handler is cancelled and the prompts are aborted."""
    async with submitted(state, generation) as streams:
        if not is_streamed:
            outputs = await run_whole(state, generation, streams)
            return json_response(answer.whole(outputs))

        async def batches() -> AsyncIterator[list[dict[str, Any]]]:
            async for position, delta in run_streamed(state, generation, streams):
                yield answer.events(position, delta)
            yield answer.last_events()

        return await send_events(request, batches(), write_timeout_seconds=state.config.body_timeout)


def json_response(value: Any) -> web.Response:
    """200 with a JSON body."""
    return web.Response(body=dump_json(value), content_type="application/json", charset="utf-8")
