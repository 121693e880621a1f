"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from serving.routes.answering import json_response
from serving.state import SERVER, ServerState

routes = web.RouteTableDef()


def _card(state: ServerState) -> dict[str, Any]:
    description = state.engine.description
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "jaxinfer",
        "root": description.model_name,
        "max_model_len": description.max_model_len,
        "vocab_size": description.vocab_size,
    }


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    """The model that is served."""
    return json_response({"object": "list", "data": [_card(request.app[SERVER])]})


@routes.get("/v1/models/{model:.+}")
async def get_model(request: web.Request) -> web.Response:
    """The model by its name, which may hold slashes."""
    state = request.app[SERVER]
    state.require_model(request.match_info["model"])
    return json_response(_card(state))
