"""GET /metrics, in Prometheus' text format."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from serving.state import SERVER

routes = web.RouteTableDef()


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """All metrics of this server."""
    return web.Response(body=request.app[SERVER].metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})
