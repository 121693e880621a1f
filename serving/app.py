"""The aiohttp application: its parts, middlewares and routes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from serving import routes
from serving.auth import require_api_key
from serving.config import ServerConfig
from serving.engine_thread import EngineThread
from serving.errors import error_middleware
from serving.metrics import ServerMetrics
from serving.state import SERVER, ServerState


def create_app(engine: EngineThread, config: ServerConfig) -> web.Application:
    """The application in front of an engine, which the caller starts and stops."""
    middlewares = [error_middleware] + ([require_api_key(config.api_key)] if config.api_key else [])
    app = web.Application(middlewares=middlewares)
    app[SERVER] = ServerState(engine=engine, config=config, metrics=ServerMetrics(engine))
    app.cleanup_ctx.append(_text_threads)
    for module in routes.ALL:
        if module not in routes.DEBUG or config.debug_routes == "on":
            app.router.add_routes(module.routes)
    return app


async def _text_threads(app: web.Application) -> AsyncIterator[None]:
    yield
    app[SERVER].text_threads.shutdown(wait=False, cancel_futures=True)
