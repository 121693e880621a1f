"""What a user asks for and what comes back: plain values, no jax."""

from __future__ import annotations

import enum
import math
import numbers
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NewType

from jaxinfer.errors import RequestError

RequestId = NewType("RequestId", str)

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS_VALUE = 100.0
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_PRIORITY = 2**31 - 1
MAX_NAME_CHARS = 512
MAX_TIMEOUT_SECONDS = 86_400.0
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one are greedy: dividing by them overflows float32 (vllm#2937)."""


class FinishReason(enum.StrEnum):
    """Why a completion ended; every accepted request ends in exactly one."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    """Its deadline passed; what was generated until then stands."""
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


def _require(condition: bool, param: str, got: Any, allowed: str) -> None:
    if not condition:
        raise RequestError(f"{param} must be {allowed}, got {got!r:.80}", param=param)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_int(value: Any, param: str, low: int, high: int) -> None:
    _require(_is_int(value) and low <= value <= high, param, value, f"an integer from {low} to {high}")


def _check_float(value: Any, param: str, low: float, high: float, *, low_open: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    inside = (low < number if low_open else low <= number) and number <= high  # NaN compares false
    _require(inside, param, value, f"a number {f'above {low:g} and up' if low_open else f'from {low:g}'} to {high:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 and `min_p` 0 are off. `repetition_penalty` looks at
    prompt and output, `presence_penalty` and `frequency_penalty` at the output only. `logprobs` asks for the chosen
    token's log-probability and those of this many best tokens, all from the model's own distribution, before
    temperature, penalties and masks. `max_tokens` None means: until the context or the KV pool ends.

    Raises:
        RequestError: naming the field, for any value out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int(self.n, "n", 1, MAX_COMPLETIONS)
        _check_float(self.temperature, "temperature", 0.0, MAX_TEMPERATURE)
        _check_int(self.top_k, "top_k", -1, 2**63 - 1)
        _check_float(self.top_p, "top_p", 0.0, 1.0, low_open=True)
        _check_float(self.min_p, "min_p", 0.0, 1.0)
        _check_float(self.repetition_penalty, "repetition_penalty", 0.0, MAX_REPETITION_PENALTY, low_open=True)
        _check_float(self.presence_penalty, "presence_penalty", -MAX_PENALTY, MAX_PENALTY)
        _check_float(self.frequency_penalty, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
        if self.seed is not None:
            _check_int(self.seed, "seed", -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int(self.max_tokens, "max_tokens", 1, 2**63 - 1)
        _check_int(self.min_tokens, "min_tokens", 0, 2**63 - 1)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(getattr(self, name), name, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        self._check_strings("stop", MAX_STOP_STRINGS)
        self._check_strings("bad_words", MAX_BAD_WORDS)
        self._check_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", 2**31)
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", self.allowed_token_ids, "a non-empty list")
        self._check_logit_bias()

    def _check_strings(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            value = (value,)
        _require(isinstance(value, Sequence) and len(value) <= most, name, value, f"a string or a list of at most {most} strings")
        for item in value:
            _require(
                isinstance(item, str) and 0 < len(item) <= MAX_STOP_STRING_CHARS,
                name,
                item,
                f"strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        object.__setattr__(self, name, tuple(value))

    def _check_ids(self, name: str, most: int) -> None:
        value = getattr(self, name)
        _require(
            isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= most,
            name,
            value,
            f"a list of at most {most} token ids",
        )
        for item in value:
            _check_int(item, name, 0, 2**31 - 1)
        object.__setattr__(self, name, tuple(int(item) for item in value))

    def _check_logit_bias(self) -> None:
        value = self.logit_bias
        _require(
            isinstance(value, Mapping) and len(value) <= MAX_LOGIT_BIAS,
            "logit_bias",
            value,
            f"a map of at most {MAX_LOGIT_BIAS} token ids to numbers",
        )
        for token_id, bias in value.items():
            _check_int(token_id, f"logit_bias key {token_id!r:.40}", 0, 2**31 - 1)
            _check_float(bias, f"logit_bias[{token_id}]", -MAX_LOGIT_BIAS_VALUE, MAX_LOGIT_BIAS_VALUE)
        object.__setattr__(self, "logit_bias", dict(value))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken (top_k 1 is the same thing)."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the choice."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated anew."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability (nats) and its rank (1 is the most probable)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token at one position and the best tokens there, most probable first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class RequestTimings:
    """Moments of a request's life in seconds of `time.monotonic()`; None: not reached yet."""

    arrival: float = field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token_seconds(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first step that computes any of it."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def end_to_end_seconds(self) -> float | None:
        """From arrival to the last token."""
        return None if self.finished is None else self.finished - self.arrival


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers: as a delta what is new since the last one, in a RequestOutput all of it so far.

    `token_ids` and `logprobs` cover the same tokens. `text` leaves out the stop string unless asked for;
    `stop_reason` is the stop string or stop token id that ended it, None for end-of-sequence.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestDelta:
    """What one engine step added to a request.

    `outputs` holds only the completions that changed. `prompt_logprobs` comes once, with the first delta
    (its first entry is None: nothing predicts the first token). `error` is set with FinishReason.ERROR.
    """

    request_id: RequestId
    outputs: list[CompletionOutput]
    is_finished: bool = False
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    timings: RequestTimings = field(default_factory=RequestTimings)
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything a request has produced, built up from its deltas."""

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    is_finished: bool = False
    num_cached_tokens: int = 0
    timings: RequestTimings = field(default_factory=RequestTimings)
    error: str | None = None

    @classmethod
    def empty(cls, request_id: RequestId, prompt: str | None, prompt_token_ids: Sequence[int], n: int) -> RequestOutput:
        """An output to which nothing has been added yet."""
        return cls(request_id, prompt, prompt_token_ids, [CompletionOutput(index) for index in range(n)])

    def add(self, delta: RequestDelta) -> None:
        """Append a step's delta."""
        for new in delta.outputs:
            whole = self.outputs[new.index]
            whole.token_ids.extend(new.token_ids)
            whole.text += new.text
            if new.logprobs is not None:
                whole.logprobs = (whole.logprobs or []) + new.logprobs
            whole.finish_reason = new.finish_reason or whole.finish_reason
            whole.stop_reason = new.stop_reason if new.stop_reason is not None else whole.stop_reason
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.is_finished = self.is_finished or delta.is_finished
        self.timings = delta.timings
        self.error = delta.error or self.error


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What crosses EngineClient: token ids and parameters, plain and serialisable.

    `priority` (policy "priority" only): lower runs first, first come first served within one priority. `user` is whom the
    policy "fair" accounts the tokens to. `timeout`: seconds from its arrival after which it ends with FinishReason.TIMEOUT.
    Blocks are only reused between requests of equal `cache_salt`. `fork_of` names a running request whose completion
    `fork_index` has computed a prefix of this prompt: its blocks are shared as far as the tokens agree.

    Raises:
        RequestError: naming the field, for a value out of its range.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    user: str = ""
    timeout: float | None = None
    cache_salt: str = ""
    fork_of: RequestId | None = None
    fork_index: int = 0

    def __post_init__(self) -> None:
        _check_int(self.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("user", "cache_salt"):
            value = getattr(self, name)
            _require(
                isinstance(value, str) and len(value) <= MAX_NAME_CHARS, name, value, f"a string of at most {MAX_NAME_CHARS} characters"
            )
        if self.timeout is not None:
            _check_float(self.timeout, "timeout", 0.0, MAX_TIMEOUT_SECONDS, low_open=True)
        _check_int(self.fork_index, "fork_index", 0, MAX_COMPLETIONS - 1)
