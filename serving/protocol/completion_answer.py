"""Answers of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, override

from jaxinfer.request import CompletionOutput, PositionLogprobs, RequestOutput
from serving.protocol.answers import Answer, Prompt, without_tokens
from serving.protocol.logprobs import completion_logprobs, prompt_logprobs


class CompletionAnswer(Answer):
    """`text_completion`, with or without the prompt in front."""

    WHOLE_OBJECT: ClassVar[str] = "text_completion"
    CHUNK_OBJECT: ClassVar[str] = "text_completion"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets: dict[int, int] = {}

    @override
    def whole_choice(self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        shown = without_tokens(output) if self.options.is_echo_only else output
        token_ids, logprobs, text = list(shown.token_ids), list(shown.logprobs or []), shown.text
        if self.options.echo:
            token_ids, logprobs = [*prompt.token_ids, *token_ids], [*_whole(prompt, request.prompt_logprobs or ()), *logprobs]
            text = prompt.text + text
        choice = self._choice(index, text, token_ids, logprobs, shown)
        if self.options.has_token_ids:
            choice |= {"token_ids": list(shown.token_ids), "prompt_token_ids": list(prompt.token_ids)}
        if self.options.has_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, request.prompt_logprobs or [])
        return choice

    @override
    def first_choices(self, index: int, prompt: Prompt, logprobs: Sequence[PositionLogprobs | None]) -> list[dict[str, Any]]:
        if not self.options.echo:
            return []
        nothing = CompletionOutput(index)
        return [self._choice(index, prompt.text, prompt.token_ids, _whole(prompt, logprobs), nothing)]

    @override
    def delta_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(index, output.text, output.token_ids, output.logprobs or [], output)
        return choice | ({"token_ids": list(output.token_ids)} if self.options.has_token_ids else {})

    def _choice(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None], output: CompletionOutput
    ) -> dict[str, Any]:
        shape = None
        if self.options.has_logprobs:
            shape, self._offsets[index] = completion_logprobs(self.tokenizer, token_ids, logprobs, self._offsets.get(index, 0))
        reason = None if output.finish_reason is None else output.finish_reason.value
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": shape, "finish_reason": reason}
        return choice | ({"stop_reason": output.stop_reason} if output.finish_reason is not None else {})


def _whole(prompt: Prompt, logprobs: Sequence[PositionLogprobs | None]) -> list[PositionLogprobs | None]:
    """One entry per token of a prompt, whose computing may have been cut short by the request's timeout."""
    return [*logprobs, *[None] * (len(prompt.token_ids) - len(logprobs))]
