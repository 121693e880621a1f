"""GET /, the chat page."""

from __future__ import annotations

from aiohttp import web

from serving.static_page import page_response

routes = web.RouteTableDef()


@routes.get("/")
async def page(request: web.Request) -> web.Response:
    """The chat page."""
    return page_response("chat.html")
