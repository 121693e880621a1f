"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, override

from jaxinfer.request import CompletionOutput, PositionLogprobs, RequestOutput
from serving.protocol.answers import Answer, Prompt
from serving.protocol.logprobs import chat_logprobs, prompt_logprobs


class ChatAnswer(Answer):
    """`chat.completion` and `chat.completion.chunk`; a choice's first chunk carries the role."""

    WHOLE_OBJECT: ClassVar[str] = "chat.completion"
    CHUNK_OBJECT: ClassVar[str] = "chat.completion.chunk"

    @override
    def whole_choice(self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message} | self._ending(output)

    @override
    def whole_extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.options.has_token_ids:
            extras["prompt_token_ids"] = list(self.prompts[0].token_ids)
        if self.options.has_prompt_logprobs:
            extras["prompt_logprobs"] = prompt_logprobs(self.tokenizer, outputs[0].prompt_logprobs or [])
        return extras

    @override
    def first_choices(self, index: int, prompt: Prompt, logprobs: Sequence[PositionLogprobs | None]) -> list[dict[str, Any]]:
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]

    @override
    def delta_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {"index": index, "delta": {"content": output.text} if output.text else {}} | self._ending(output)

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        shown = self.options.has_logprobs and output.logprobs is not None
        fields: dict[str, Any] = {
            "logprobs": chat_logprobs(self.tokenizer, output.logprobs or []) if shown else None,
            "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
        }
        if output.finish_reason is not None:
            fields["stop_reason"] = output.stop_reason
        return fields | ({"token_ids": list(output.token_ids)} if self.options.has_token_ids else {})
