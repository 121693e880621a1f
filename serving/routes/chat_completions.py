"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from aiohttp import web

from serving.generation import Generation
from serving.protocol.answers import AnswerOptions, Prompt
from serving.protocol.chat import ChatBody, parse_chat
from serving.protocol.chat_answer import ChatAnswer
from serving.protocol.messages import parse_messages
from serving.routes.answering import answer_request
from serving.state import SERVER, ServerState

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """The next message of a conversation."""
    state = request.app[SERVER]
    body = parse_chat(await state.read_json(request))
    state.require_model(body.model)
    description, tokenizer = state.engine.description, state.engine.tokenizer
    params = body.params(vocab_size=description.vocab_size, max_model_len=description.max_model_len)
    request_options = body.request_options(description.scheduling_policy)
    prompt = await state.in_text_thread(_tokenize, state, body)
    options = AnswerOptions(
        response_id=f"chatcmpl-{body.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model,
        n=params.n,
        has_logprobs=bool(body.logprobs),
        has_token_ids=bool(body.return_token_ids),
        has_prompt_logprobs=body.prompt_logprobs is not None,
        has_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
    )
    generation = Generation(request_id=options.response_id, prompts=[prompt], params=params, options=request_options)
    answer = ChatAnswer(options, generation.prompts, tokenizer)
    return await answer_request(request, state, generation, answer, is_streamed=bool(body.stream))


def _tokenize(state: ServerState, body: ChatBody) -> Prompt:
    messages = parse_messages(body.messages)
    ids = state.engine.tokenizer.encode_chat(messages, add_generation_prompt=body.add_generation_prompt is not False)
    return Prompt(tuple(ids))
