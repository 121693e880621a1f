"""GET /debug/kv and /debug/kv.json: the KV blocks, drawn and as they are. Only with --debug-routes on."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

from aiohttp import web

from serving.errors import ApiError
from serving.json_text import dump_json
from serving.kv_view import KVView
from serving.protocol.kv_map import kv_json
from serving.state import SERVER, ServerState
from serving.static_page import page_response

routes = web.RouteTableDef()

WAIT_SECONDS = 5.0


@routes.get("/debug/kv")
async def kv_page(request: web.Request) -> web.Response:
    """The page that draws the blocks."""
    return page_response("kv.html")


@routes.get("/debug/kv.json")
async def kv_blocks(request: web.Request) -> web.Response:
    """The blocks and counters between two steps."""
    state = request.app[SERVER]
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            view = await state.engine.kv_view()
    except TimeoutError as error:
        message = f"the running step takes longer than {WAIT_SECONDS:g} seconds; the blocks are seen between steps"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="engine_hung") from error
    response = web.Response(body=await state.in_text_thread(_encode, state, view), content_type="application/json", charset="utf-8")
    response.headers["Cache-Control"] = "no-store"
    response.enable_compression()
    return response


def _encode(state: ServerState, view: KVView) -> bytes:
    answer = {"model": state.model_name, "age_seconds": round(time.monotonic() - view.taken, 3)}
    return dump_json(answer | kv_json(view.kv_map, view.snapshot))
