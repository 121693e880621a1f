"""What the routes share: the engine, the settings, the metrics and the threads that tokenize."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web

from serving.body import read_json
from serving.config import ServerConfig
from serving.engine_thread import EngineThread
from serving.errors import ApiError
from serving.metrics import ServerMetrics

NUM_TEXT_THREADS = 2


@dataclass(slots=True)
class ServerState:
    """One server's parts; the application owns it."""

    engine: EngineThread
    config: ServerConfig
    metrics: ServerMetrics
    text_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=NUM_TEXT_THREADS, thread_name_prefix="text")
    )
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that requests must give; raises EngineDeadError while loading unless it was set."""
        return self.config.served_model_name or self.engine.description.model_name

    def require_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name != self.model_name:
            message = f"the model {name!r:.100} is not served here; served: {self.model_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    async def read_json(self, request: web.Request) -> dict[str, Any]:
        """The request's body, by the settings of this server."""
        return await read_json(
            request,
            max_bytes=self.config.max_body_bytes,
            timeout_seconds=self.config.body_timeout,
            executor=self.text_threads,
        )

    async def in_text_thread[T](self, call: Callable[..., T], *args: Any) -> T:
        """Run work on text (tokenizing, templates) off the event loop: a prompt of megabytes takes seconds."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, call, *args)


SERVER = web.AppKey("SERVER", ServerState)
