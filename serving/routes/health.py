"""GET /health, /ready and /version: alive, accepting work, and which release."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from serving.errors import ApiError
from serving.routes.answering import json_response
from serving.state import SERVER
from serving.step_engine import EngineState

routes = web.RouteTableDef()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """200 while the engine is alive and moving, also while it loads or drains; 503 when it is dead or hangs in a step."""
    engine = request.app[SERVER].engine
    if engine.state is EngineState.DEAD:
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"the engine is dead ({engine.fault or 'it did not load'})", code="engine_unavailable"
        )
    if engine.is_hung:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine hangs: its running step takes too long", code="engine_hung")
    return json_response({"status": "ok", "state": engine.state.value})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """200 when requests are accepted."""
    engine = request.app[SERVER].engine
    if engine.state is not EngineState.READY or engine.is_hung:
        state = "hung" if engine.is_hung else engine.state.value
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"not accepting requests: the engine is {state}", code="not_ready")
    return json_response({"status": "ready"})


@routes.get("/version")
async def get_version(request: web.Request) -> web.Response:
    """The release of jaxinfer."""
    try:
        release = version("jaxinfer")
    except PackageNotFoundError:
        release = "unknown (not installed)"
    return json_response({"version": release})
