"""How the engine's thread reaches coroutines: calls put onto their event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> bool:
    """Whether the loop still took the call; a closed one has no readers left."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True


class Wakeups:
    """Coroutines that wait for one thing, each on a loop of its own. The owner's lock guards `add` and `take`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def add(self) -> asyncio.Event:
        """An event for the calling coroutine to wait for."""
        event = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), event))
        return event

    def take(self) -> Callable[[], None]:
        """Forget all who wait; calling the result, without the lock, wakes them."""
        taken, self._waiting = self._waiting, []

        def wake() -> None:
            for loop, event in taken:
                call_on_loop(loop, event.set)

        return wake
