"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jaxinfer.errors import RequestError
from serving.protocol.fields import parse_body
from serving.protocol.logprobs import token_label
from serving.protocol.messages import parse_messages
from serving.protocol.prompts import parse_token_ids
from serving.protocol.tokenize import DetokenizeBody, TokenizeBody
from serving.routes.answering import json_response
from serving.state import SERVER, ServerState

routes = web.RouteTableDef()


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a text or of a conversation."""
    state = request.app[SERVER]
    body = parse_body(TokenizeBody, await state.read_json(request))
    if body.model is not None:
        state.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of prompt and messages is needed", param="prompt")
    return json_response(await state.in_text_thread(_tokenize, state, body))


def _tokenize(state: ServerState, body: TokenizeBody) -> dict[str, Any]:
    tokenizer = state.engine.tokenizer
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = tokenizer.encode_chat(parse_messages(body.messages), add_generation_prompt=body.add_generation_prompt is not False)
    strings = {"token_strs": [token_label(tokenizer, token_id) for token_id in ids]} if body.return_token_strs else {}
    return {"count": len(ids), "max_model_len": state.engine.description.max_model_len, "tokens": ids} | strings


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    state = request.app[SERVER]
    body = parse_body(DetokenizeBody, await state.read_json(request))
    if body.model is not None:
        state.require_model(body.model)
    return json_response({"prompt": await state.in_text_thread(_detokenize, state, body)})


def _detokenize(state: ServerState, body: DetokenizeBody) -> str:
    ids = parse_token_ids(body.tokens, "tokens")
    tokenizer = state.engine.tokenizer
    if not all(0 <= token_id < tokenizer.vocab_size for token_id in ids):
        raise RequestError(f"tokens must be ids from 0 to {tokenizer.vocab_size - 1}", param="tokens")
    return tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))
