"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid

from aiohttp import web

from jaxinfer.errors import RequestError
from serving.generation import Generation
from serving.protocol.answers import AnswerOptions, Prompt
from serving.protocol.completion_answer import CompletionAnswer
from serving.protocol.completions import CompletionBody, parse_completion
from serving.protocol.prompts import check_num_choices, parse_prompts
from serving.routes.answering import answer_request
from serving.state import SERVER, ServerState

routes = web.RouteTableDef()


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """The continuation of one or more prompts, given as text or as token ids."""
    state = request.app[SERVER]
    body = parse_completion(await state.read_json(request))
    state.require_model(body.model)
    description, tokenizer = state.engine.description, state.engine.tokenizer
    params = body.params(vocab_size=description.vocab_size, max_model_len=description.max_model_len)
    request_options = body.request_options(description.scheduling_policy)
    prompts = await state.in_text_thread(_tokenize, state, body, params.n)
    options = AnswerOptions(
        response_id=f"cmpl-{body.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model,
        n=params.n,
        has_logprobs=body.logprobs is not None,
        has_token_ids=bool(body.return_token_ids),
        has_prompt_logprobs=body.prompt_logprobs is not None,
        has_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        echo=bool(body.echo),
        is_echo_only=body.is_echo_only,
    )
    generation = Generation(request_id=options.response_id, prompts=prompts, params=params, options=request_options)
    answer = CompletionAnswer(options, prompts, tokenizer)
    return await answer_request(request, state, generation, answer, is_streamed=bool(body.stream))


def _tokenize(state: ServerState, body: CompletionBody, n: int) -> list[Prompt]:
    sources = parse_prompts(body.prompt)
    check_num_choices(len(sources), n)
    return [_tokenize_one(state, body, source) for source in sources]


def _tokenize_one(state: ServerState, body: CompletionBody, source: str | list[int]) -> Prompt:
    tokenizer, vocab_size = state.engine.tokenizer, state.engine.description.vocab_size
    if isinstance(source, str):
        return Prompt(tuple(tokenizer.encode(source, add_special_tokens=body.add_special_tokens is not False)), source)
    outside = next((token_id for token_id in source if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        # The engine checks this too, but an echo has to decode the ids first.
        raise RequestError(f"prompt token ids must be from 0 to {vocab_size - 1}, got {outside!r:.40}", param="prompt")
    text = tokenizer.decode(source, skip_special_tokens=body.skip_special_tokens is not False) if body.echo else ""
    return Prompt(tuple(source), text)
