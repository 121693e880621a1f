"""Pictures of KV memory, drawn by the engine's thread when somebody looks and not otherwise."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass

from jaxinfer.client import EngineSnapshot
from jaxinfer.errors import EngineDeadError
from jaxinfer.kv.kv_map import KVMap
from serving.step_engine import StepEngine
from serving.wakeups import call_on_loop

logger = logging.getLogger(__name__)

FRESH_SECONDS = 0.2
"""A picture of this age is shown again, so that many who look cost the engine no more than one."""


@dataclass(frozen=True, slots=True)
class KVView:
    """Blocks and counters of one moment between two steps."""

    kv_map: KVMap
    snapshot: EngineSnapshot
    taken: float
    """`time.monotonic()` of that moment."""


class KVViewer:
    """Takes orders from any thread; `serve` and `close` are the engine's thread's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: KVView | None = None
        self._orders: list[asyncio.Future[KVView]] = []
        self._is_closed = False

    @property
    def has_orders(self) -> bool:
        """Whether `serve` would do something."""
        return bool(self._orders)

    def order(self) -> asyncio.Future[KVView]:
        """A view that is there when the running step has ended; for the calling coroutine.

        Raises:
            EngineDeadError: the engine's thread has ended.
        """
        ordered = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine has stopped")
            if self._last is not None and time.monotonic() - self._last.taken < FRESH_SECONDS:
                ordered.set_result(self._last)
            else:
                self._orders.append(ordered)
        return ordered

    def serve(self, engine: StepEngine) -> None:
        """Look at the engine once for all who ordered."""
        with self._lock:
            taken, self._orders = self._orders, []
        orders = [ordered for ordered in taken if not ordered.done()]  # Whoever waits no longer has cancelled it.
        if not orders:
            return
        try:
            view = KVView(engine.kv_map(), engine.snapshot(), time.monotonic())
        except Exception as error:  # A fault in looking must not end what is looked at.
            logger.exception("fault in looking at the KV blocks")
            _answer(orders, error)
            return
        with self._lock:
            self._last = view
        _answer(orders, view)

    def close(self) -> None:
        """Turn away those who wait, and all who come."""
        with self._lock:
            self._is_closed = True
            orders, self._orders = self._orders, []
        _answer(orders, EngineDeadError("the engine has stopped"))


def _answer(orders: list[asyncio.Future[KVView]], answer: KVView | Exception) -> None:
    for ordered in orders:
        call_on_loop(ordered.get_loop(), _resolve, ordered, answer)


def _resolve(ordered: asyncio.Future[KVView], answer: KVView | Exception) -> None:
    if ordered.done():  # Whoever ordered it has left.
        return
    if isinstance(answer, Exception):
        ordered.set_exception(answer)
    else:
        ordered.set_result(answer)
