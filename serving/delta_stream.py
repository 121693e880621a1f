"""One request's way back from the engine's thread to the coroutine that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from jaxinfer.request import CompletionOutput, RequestDelta, RequestId
from serving.wakeups import call_on_loop


def merge_deltas(old: RequestDelta, new: RequestDelta) -> RequestDelta:
    """Append `new` to `old`, which is changed and returned: the delta of both steps."""
    by_index = {output.index: output for output in old.outputs}
    for output in new.outputs:
        if output.index in by_index:
            _append(by_index[output.index], output)
        else:
            old.outputs.append(output)
    old.is_finished = old.is_finished or new.is_finished
    old.prompt_token_ids = old.prompt_token_ids or new.prompt_token_ids
    old.prompt_logprobs = old.prompt_logprobs or new.prompt_logprobs
    old.num_cached_tokens = max(old.num_cached_tokens, new.num_cached_tokens)
    old.timings = new.timings
    old.error = old.error or new.error
    return old


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.token_ids.extend(new.token_ids)
    old.text += new.text
    if new.logprobs is not None:
        old.logprobs = (old.logprobs or []) + new.logprobs
    old.finish_reason = new.finish_reason or old.finish_reason
    old.stop_reason = new.stop_reason if new.stop_reason is not None else old.stop_reason


class DeltaStream:
    """An async iterator over a request's deltas, bound to the event loop on which it was made.

    A reader that falls behind gets one merged delta for the steps it missed, so what waits here is at most one delta of
    the request's own output. All methods but the constructor run on the loop's thread.
    """

    def __init__(self, request_id: RequestId, loop: asyncio.AbstractEventLoop, abort: Callable[[RequestId], None]):
        self.request_id = request_id
        self.loop = loop
        self._abort = abort
        self._pending: RequestDelta | None = None
        self._failure: Exception | None = None
        self._is_done = False
        self._wake = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        """Hand over a step's delta."""
        if self._is_done:
            return
        self._pending = delta if self._pending is None else merge_deltas(self._pending, delta)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an exception, after what is already here."""
        self._failure = self._failure or error
        self._wake.set()

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> RequestDelta:
        while self._pending is None:
            if self._is_done:
                raise StopAsyncIteration
            if self._failure is not None:
                self._is_done = True
                raise self._failure
            self._wake.clear()
            await self._wake.wait()
        delta, self._pending = self._pending, None
        self._is_done = delta.is_finished
        return delta

    async def aclose(self) -> None:
        """Stop reading; a request that has not ended is aborted. May be called more than once."""
        if self._is_done:
            return
        self._is_done = True
        self._pending = None
        if self._failure is None:
            self._abort(self.request_id)


type News = RequestDelta | Exception
"""What a stream is told; an exception is its end."""


def tell(news: Mapping[DeltaStream, News]) -> list[DeltaStream]:
    """Hand news to streams from another thread, with one wake-up per event loop; returns those whose loop has closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[DeltaStream, News]]] = {}
    for stream, item in news.items():
        by_loop.setdefault(stream.loop, []).append((stream, item))
    return [stream for loop, items in by_loop.items() if not call_on_loop(loop, _deliver, items) for stream, _ in items]


def _deliver(items: list[tuple[DeltaStream, News]]) -> None:
    for stream, item in items:
        if isinstance(item, Exception):
            stream.fail(item)
        else:
            stream.put(item)
