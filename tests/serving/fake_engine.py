"""An engine without a model: token k of an answer is token (k + j) of the prompt, over and over, for completion j.

Its prefix cache is a number: how many of a prompt's tokens it says were found. A request's `timeout`, rounded down, is how many tokens
it may have, so that nothing depends on a clock. Blocks are numbered in order of arrival, and the first block of all requests
is one that they share.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import threading
import time

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxinfer.client import EngineDescription, EngineSnapshot
from jaxinfer.config import SchedulingPolicy
from jaxinfer.errors import RequestError
from jaxinfer.kv.kv_map import KVGroupMap, KVMap, SequenceBlocks
from jaxinfer.request import (
    CompletionOutput,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    RequestDelta,
    RequestId,
    RequestTimings,
    TokenLogprob,
)
from jaxinfer.tokenizer import Tokenizer, byte_alphabet

BLOCK_SIZE = 16
NUM_BLOCKS = 64
MODEL_NAME = "fake-model"
EOS = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, its id the byte's value, and `<|end|>` as 256."""
    vocab = {char: byte for char, byte in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return Tokenizer(backend, special_tokens={"eos_token": EOS}, chat_template=CHAT_TEMPLATE)


@dataclasses.dataclass
class _Running:
    request: GenerationRequest
    timings: RequestTimings
    num_tokens: int = 0
    texts: list[str] = dataclasses.field(default_factory=list)
    decoders: list[codecs.IncrementalDecoder] = dataclasses.field(default_factory=list)
    stopped: set[int] = dataclasses.field(default_factory=set)


class FakeEngine:
    """Deterministic and instrumented. `gate` holds steps back while clear; `faults` maps a step's number to what it raises."""

    def __init__(
        self,
        *,
        max_model_len: int = 512,
        step_seconds: float = 0.0,
        max_num_seqs: int = 8,
        num_cached_tokens: int = 0,
        scheduling_policy: SchedulingPolicy = "priority",
    ):
        self.tokenizer = byte_tokenizer()
        self.description = EngineDescription(
            model_name=MODEL_NAME,
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_prompt_tokens=max_model_len - 1,
            eos_token_ids=self.tokenizer.eos_token_ids,
            scheduling_policy=scheduling_policy,
        )
        self.num_cached_tokens = num_cached_tokens
        self.counters: dict[str, int | float] = {}
        """Fields of the snapshot that a test sets."""
        self.num_cached_blocks = 0
        """How many of the last blocks are cached."""
        self.map_fault: Exception | None = None
        self.num_maps = 0
        self.step_seconds = step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.faults: dict[int, Exception] = {}
        self.add_faults: dict[RequestId, Exception] = {}
        self.requests_seen: list[GenerationRequest] = []
        self.aborted: list[RequestId] = []
        self.threads: set[int] = set()
        self.step_started = threading.Event()
        self.is_closed = False
        self._running: dict[RequestId, _Running] = {}
        self._num_steps = 0
        self._num_generated = 0
        self._finished: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.is_closed = True

    def validate(self, request: GenerationRequest) -> None:
        if not request.prompt_token_ids:
            raise RequestError("prompt must not be empty", param="prompt")
        most = self.description.max_prompt_tokens
        if len(request.prompt_token_ids) > most:
            raise RequestError(f"the prompt has {len(request.prompt_token_ids)} tokens, at most {most} fit", param="prompt")

    def add_request(self, request: GenerationRequest) -> None:
        self.threads.add(threading.get_ident())
        self.requests_seen.append(request)
        if request.request_id in self.add_faults:
            raise self.add_faults[request.request_id]
        running = _Running(request, RequestTimings(first_scheduled=time.monotonic()))
        running.texts = [""] * request.params.n
        running.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(request.params.n)]
        self._running[request.request_id] = running

    def abort(self, request_id: RequestId) -> None:
        self.threads.add(threading.get_ident())
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._count("abort")

    def step(self) -> list[RequestDelta]:
        self.threads.add(threading.get_ident())
        self.step_started.set()
        self.gate.wait()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._num_steps += 1
        if self._num_steps in self.faults:
            raise self.faults[self._num_steps]
        return [self._advance(running) for running in list(itertools.islice(self._running.values(), self.description.max_num_seqs))]

    def snapshot(self) -> EngineSnapshot:
        num_held = len({block_id for blocks in self._tables() for block_id in blocks})
        num_running = min(len(self._running), self.description.max_num_seqs)
        own = dict(
            num_running=num_running,
            num_waiting=len(self._running) - num_running,
            num_kv_blocks_total=NUM_BLOCKS,
            num_kv_blocks_free=NUM_BLOCKS - num_held - self.num_cached_blocks,
            num_kv_blocks_cached=self.num_cached_blocks,
            num_kv_blocks_held=num_held,
            num_generation_tokens=self._num_generated,
            num_steps=self._num_steps,
            finished_by_reason=dict(self._finished),
        )
        return EngineSnapshot(**own | self.counters)

    def kv_map(self) -> KVMap:
        self.threads.add(threading.get_ident())
        self.num_maps += 1
        if self.map_fault is not None:
            raise self.map_fault
        tables = self._tables()
        holders = [sum(block_id in blocks for blocks in tables) for block_id in range(1, NUM_BLOCKS + 1)]
        is_cached = [
            (block_id == 1 and bool(tables)) or block_id > NUM_BLOCKS - self.num_cached_blocks for block_id in range(1, NUM_BLOCKS + 1)
        ]
        sequences = [
            SequenceBlocks(
                request_id=running.request.request_id,
                index=0,
                state="running",
                num_tokens=len(running.request.prompt_token_ids) + running.num_tokens,
                num_computed_tokens=len(running.request.prompt_token_ids) + running.num_tokens - 1,
                num_cached_tokens=self._num_cached(running.request),
                block_ids=tuple(blocks),
            )
            for running, blocks in zip(self._running.values(), tables, strict=True)
        ]
        group = KVGroupMap(kind="full", num_blocks=NUM_BLOCKS, holders=tuple(holders), is_cached=tuple(is_cached))
        return KVMap(
            block_size=BLOCK_SIZE, groups=(group,), sequences=tuple(sequences), host_slots_total=8, host_slots_cached=2, host_slots_held=1
        )

    def _tables(self) -> list[list[int]]:
        tables, first = [], 2
        for running in list(self._running.values()):
            count = (len(running.request.prompt_token_ids) + running.num_tokens - 1) // BLOCK_SIZE
            tables.append([1, *range(first, first + count)])
            first += count
        return tables

    def _num_cached(self, request: GenerationRequest) -> int:
        return min(self.num_cached_tokens, len(request.prompt_token_ids) - 1)

    def _count(self, reason: str) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def _advance(self, running: _Running) -> RequestDelta:
        request, params = running.request, running.request.params
        if request.timeout is not None and running.num_tokens >= int(request.timeout):
            return self._time_out(running)
        is_first = running.num_tokens == 0
        outputs = [self._next_token(running, j) for j in range(params.n) if j not in running.stopped]
        running.num_tokens += 1
        is_finished = len(running.stopped) == params.n
        if is_first:
            running.timings.first_token = time.monotonic()
        if is_finished:
            running.timings.finished = time.monotonic()
            del self._running[request.request_id]
            self._count(outputs[0].finish_reason.value)
        prompt_logprobs = None
        if is_first and params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(_logprobs(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:])]
        return RequestDelta(
            request_id=request.request_id,
            outputs=outputs,
            is_finished=is_finished,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached(request) if is_first else 0,
            timings=running.timings,
        )

    def _time_out(self, running: _Running) -> RequestDelta:
        request = running.request
        del self._running[request.request_id]
        self._count("timeout")
        outputs = [CompletionOutput(j, finish_reason=FinishReason.TIMEOUT) for j in range(request.params.n) if j not in running.stopped]
        return RequestDelta(
            request.request_id, outputs, is_finished=True, prompt_token_ids=request.prompt_token_ids, timings=running.timings
        )

    def _next_token(self, running: _Running, j: int) -> CompletionOutput:
        params, prompt = running.request.params, running.request.prompt_token_ids
        token = prompt[(running.num_tokens + j) % len(prompt)]
        self._num_generated += 1
        reason: FinishReason | None = None
        stop_reason: str | None = None
        text = ""
        length = len(prompt) + running.num_tokens + 1
        if token in self.tokenizer.eos_token_ids and not params.ignore_eos:
            reason = FinishReason.STOP
        else:
            text = running.decoders[j].decode(self.tokenizer.token_bytes(token))
            running.texts[j] += text
            if any(running.texts[j].endswith(stop) for stop in params.stop):
                reason, stop_reason = FinishReason.STOP, next(s for s in params.stop if running.texts[j].endswith(s))
                text = "" if len(stop_reason) <= 1 else text
            elif running.num_tokens + 1 == params.max_tokens or length >= self.description.max_model_len:
                reason = FinishReason.LENGTH
                text += running.decoders[j].decode(b"", True)
        if reason is not None:
            running.stopped.add(j)
        logprobs = None if params.logprobs is None else [_logprobs(token, params.logprobs)]
        return CompletionOutput(j, [token], text, logprobs, reason, stop_reason)


def _logprobs(token: int, num_top: int) -> PositionLogprobs:
    """The chosen token is the best one; its neighbours come after it, each a nat less likely."""
    ranked = [TokenLogprob((token + k) % 256, -0.5 - k, k + 1) for k in range(max(num_top, 1))]
    return PositionLogprobs(ranked[0], tuple(ranked[:num_top]))
