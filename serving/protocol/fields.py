"""Fields that chat and completions have in common, and how a wrong body becomes one clear sentence.

Types are checked here, strictly; ranges are SamplingParams' own and are only mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxinfer.config import SchedulingPolicy
from jaxinfer.errors import RequestError
from jaxinfer.request import MAX_LOGIT_BIAS, SamplingParams

# fail_fast: a list of a million wrong items must not become a million error objects.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]

MAX_IDS_NAMED = 8
MAX_TOKEN_ID_DIGITS = 10

IGNORED_FIELDS = frozenset(
    {"store", "metadata", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
"""Accepted and without effect: none of them changes what the answer says."""

UNSUPPORTED_FIELDS = frozenset(
    {
        "tools", "functions", "function_call", "suffix", "audio", "modalities", "prediction", "web_search_options",
        "reasoning_effort", "verbosity", "use_beam_search", "length_penalty", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "documents", "chat_template", "chat_template_kwargs", "continue_final_message",
        "truncate_prompt_tokens", "prompt_embeds", "kv_transfer_params", "mm_processor_kwargs",
        "logprob_token_ids", "thinking_token_budget", "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Known to other servers and refused here, as they would change the answer. Null and false are taken as not given."""


class StreamOptions(BaseModel):
    """`stream_options`; `include_obfuscation` is OpenAI's padding of events and has no effect."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What goes to the engine beside prompt and SamplingParams; see GenerationRequest, which checks the ranges."""

    priority: int = 0
    user: str = ""
    timeout: float | None = None
    cache_salt: str = ""


class GenerationBody(BaseModel):
    """What both generation routes take. Null means the default everywhere."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    priority: int | None = None
    user: str | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    return_token_ids: bool | None = None

    def check_together(self) -> None:
        """Rules over several fields.

        Raises:
            RequestError: naming the field.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
        if self.response_format is not None and self.response_format != {"type": "text"}:
            got = f"{self.response_format!r:.60}"
            raise RequestError(f'response_format is only supported as {{"type": "text"}}, got {got}', param="response_format")

    def request_options(self, scheduling_policy: SchedulingPolicy) -> RequestOptions:
        """What the engine is told beside the parameters.

        Raises:
            RequestError: for a priority that nobody would look at.
        """
        if self.priority and scheduling_policy != "priority":
            raise RequestError(
                f"priority must be 0 on this server, whose --scheduling-policy is {scheduling_policy}, got {self.priority!r:.40}",
                param="priority",
            )
        return RequestOptions(self.priority or 0, self.user or "", self.timeout, self.cache_salt or "")

    def sampling_params(self, *, vocab_size: int, max_model_len: int, **over: Any) -> SamplingParams:
        """The engine's parameters; `over` replaces fields that the two routes read differently.

        Raises:
            RequestError: naming the field, for any value out of its range.
        """
        values = {name: getattr(self, name) for name in _SAMPLING_NAMES} | over
        values = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        if self.logit_bias is not None:
            values["logit_bias"] = parse_logit_bias(self.logit_bias, vocab_size)
        params = SamplingParams(**values)
        # What lies beyond the context can never come, so such numbers are legal and mean "to its end".
        most = None if params.max_tokens is None else min(params.max_tokens, max_model_len)
        return params.replace(max_tokens=most, min_tokens=min(params.min_tokens, max_model_len))


_SAMPLING_NAMES = tuple(
    sorted((set(GenerationBody.model_fields) & set(SamplingParams.__dataclass_fields__)) - {"logit_bias", "max_tokens"})
)


def parse_body[Body: BaseModel](kind: type[Body], body: Mapping[str, Any], *, also_unsupported: frozenset[str] = frozenset()) -> Body:
    """Check names and types of a body's fields.

    Raises:
        RequestError: naming the field.
    """
    for name in (UNSUPPORTED_FIELDS | also_unsupported) & body.keys():
        if body[name] is not None and body[name] is not False:
            raise RequestError(f"{name} is not supported by this server", param=name)
    dropped = IGNORED_FIELDS | UNSUPPORTED_FIELDS | also_unsupported
    try:
        return kind.model_validate({name: value for name, value in body.items() if name not in dropped})
    except ValidationError as error:
        raise _to_request_error(error) from error


def _to_request_error(error: ValidationError) -> RequestError:
    problems = error.errors(include_url=False, include_context=False)
    unknown = [str(problem["loc"][0]) for problem in problems if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1]
    if unknown:
        names = ", ".join(f"{name:.60}" for name in unknown[:MAX_IDS_NAMED])
        return RequestError(f"unknown field{'s' if len(unknown) > 1 else ''}: {names}", param=unknown[0][:60])
    first = problems[0]
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field: {'.'.join(f'{part:.60}' for part in map(str, first['loc']))}", param=param)
    if first["type"] == "missing":
        return RequestError(f"{'.'.join(map(str, first['loc']))} is required", param=param)
    wrong = [problem for problem in problems if problem["loc"][0] == param]
    allowed = " or ".join(dict.fromkeys(_allowed(problem["msg"]) for problem in wrong))
    return RequestError(f"{param} must be {allowed}, got {wrong[-1]['input']!r:.80}", param=param)


def _allowed(message: str) -> str:
    """The part of pydantic's sentence that says what is right; StreamOptions is no word of the wire."""
    message = message.removeprefix("Input should be ").removesuffix(" or instance of StreamOptions")
    return message.replace("String should match pattern", "a string that matches").replace("a valid dictionary", "an object")


def parse_logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    """`logit_bias` of the wire: ids written as strings. Biases are checked by SamplingParams.

    Raises:
        RequestError: naming all keys that are not ids of the vocabulary.
    """
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        got = f"{len(value)} entries" if isinstance(value, Mapping) else f"{value!r:.80}"
        message = f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} token ids and numbers, got {got}"
        raise RequestError(message, param="logit_bias")
    bad = [key for key in value if not _is_token_id(key, vocab_size)]
    if bad:
        names = ", ".join(f"{key!r:.40}" for key in bad[:MAX_IDS_NAMED]) + (", ..." if len(bad) > MAX_IDS_NAMED else "")
        raise RequestError(f"logit_bias keys must be token ids from 0 to {vocab_size - 1}, got {names}", param="logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _is_token_id(key: str, vocab_size: int) -> bool:
    # isdecimal alone takes the digits of other scripts, and "07" would be a second name of 7.
    is_number = key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_ID_DIGITS
    return is_number and str(int(key)) == key and int(key) < vocab_size
