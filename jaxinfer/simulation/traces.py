"""What arrives when, made from a seed: lengths like ShareGPT's, long documents, conversations of agents.

Requests are made when they arrive, so that a trace of any length takes no memory. Every trace is the same for the same
options; what comes after an answer depends on when that ended, but not what it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.benchmarking.lengths import cut_to_context, draw_lengths
from jaxinfer.simulation.options import TraceOptions

END_TOKEN = 0
"""The only end-of-sequence token: an answer ends when the simulator lets it be sampled, which the scheduler cannot foresee."""
ANSWER_TOKEN = 1
"""All other tokens of an answer; what stands before them tells answers apart."""
VOCABULARY = 2**17
NAMES = 2**31 - 1 - VOCABULARY
"""How many texts can be told apart."""
CHUNK = 1024
"""Requests whose lengths and times are drawn at once."""
DOCUMENT_QUESTION = 32
"""Tokens of a question behind a document."""


@dataclass(slots=True)
class TraceRequest:
    """One request; `num_output_tokens` counts its end token. `conversation` and `turn` belong to the trace that made it."""

    arrival_seconds: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    user: str = ""
    priority: int = 0
    conversation: int = 0
    turn: int = 0


class Trace(Protocol):
    """Where requests come from."""

    @property
    def num_requests(self) -> int | None:
        """How many there will be; None when that is only known at the end."""
        ...

    def requests(self) -> Iterator[TraceRequest]:
        """Those that wait for no other, in order of arrival."""
        ...

    def next_turn(self, request: TraceRequest, end_seconds: float) -> TraceRequest | None:
        """What the end of a request causes, if anything; it arrives no sooner."""
        ...


class Texts:
    """Token ids of texts: a first token that no other text has, and then a stretch of one random list.

    So that no two texts share a prefix, and yet making one costs a slice and no random number per token.
    """

    def __init__(self, seed: int, max_len: int):
        size = max(2**16, max_len)
        drawn = np.random.default_rng([seed, 1]).integers(2, VOCABULARY, size).tolist()
        self._ids = drawn + drawn
        self._size = size

    def text(self, name: int, length: int) -> tuple[int, ...]:
        """Text number `name`, 0 <= name < NAMES, of `length` tokens."""
        if length == 0:
            return ()
        start = name * 7919 % self._size  # a prime, so that neighbours begin far apart
        return (VOCABULARY + name, *self._ids[start : start + length - 1])


def arrival_times(options: TraceOptions, requests_per_start: int = 1) -> Iterator[float]:
    """Endless times, in order, of what starts by itself, where each start brings so many requests in the end.

    Bursts are a Poisson process of a higher rate during the bursts, so that the rate in the long run is the one asked for.
    """
    kind = options.arrivals or "poisson"
    generator = np.random.default_rng([options.trace_seed, 2])
    rate = (options.request_rate or 10.0) / requests_per_start
    burst = 10.0 if options.burst_seconds is None else options.burst_seconds
    pause = 30.0 if options.pause_seconds is None else options.pause_seconds
    now = 0.0
    while True:
        if kind == "at-once":
            yield 0.0
            continue
        mean_gap = 1 / rate if kind == "poisson" else burst / (burst + pause) / rate
        for gap in generator.exponential(mean_gap, CHUNK).tolist():
            now += gap
            yield now if kind == "poisson" else now + pause * (now // burst)


class Users:
    """Draws who sends: user k of n with a probability in proportion to 1 / k^skew."""

    def __init__(self, options: TraceOptions):
        count = options.num_users or 8
        skew = 1.0 if options.user_skew is None else options.user_skew
        weights = np.arange(1, count + 1, dtype=np.float64) ** -skew
        self._edges = np.cumsum(weights / weights.sum())
        self._generator = np.random.default_rng([options.trace_seed, 3])

    def draw(self, count: int) -> list[str]:
        """The users of the next `count` starts."""
        indices = np.searchsorted(self._edges[:-1], self._generator.random(count), side="right")
        return [f"user-{index + 1}" for index in indices.tolist()]


class SingleTurns:
    """Requests that wait for no other: ShareGPT's lengths with prompts of their own, or questions about documents."""

    def __init__(self, options: TraceOptions, max_model_len: int):
        self.num_requests = 1000 if options.num_requests is None else options.num_requests
        self._options = options
        self._max_model_len = max_model_len
        self._has_documents = options.trace == "documents"
        self._per_document = options.questions_per_document or 4
        self._num_documents = math.ceil(self.num_requests / self._per_document)
        self._texts = Texts(options.trace_seed, max_model_len)
        self._document_lens = np.random.default_rng([options.trace_seed, 4])

    def requests(self) -> Iterator[TraceRequest]:
        """All of them."""
        times = arrival_times(self._options)
        users = Users(self._options)
        for start in range(0, self.num_requests, CHUNK):
            count = min(CHUNK, self.num_requests - start)
            lengths = self._answer_lengths(start) if self._has_documents else self._lengths(start)
            for index, (prompt_len, output_len), user in zip(range(start, start + count), lengths, users.draw(count), strict=False):
                prompt = self._document(index, output_len) if self._has_documents else self._texts.text(index, prompt_len)
                yield TraceRequest(next(times), prompt, output_len, user)

    def next_turn(self, request: TraceRequest, end_seconds: float) -> TraceRequest | None:
        """None: nobody goes on."""
        return None

    def _lengths(self, start: int) -> list[tuple[int, int]]:
        options = self._options
        drawn = draw_lengths(
            CHUNK,
            max_prompt_len=options.max_prompt_len or 1024,
            max_output_len=options.max_output_len or 1024,
            seed=options.trace_seed * NAMES + start,
        )
        return cut_to_context(drawn, self._max_model_len)

    def _answer_lengths(self, start: int) -> list[tuple[int, int]]:
        generator = np.random.default_rng([self._options.trace_seed, 5, start])
        most = min(self._options.max_output_len or 512, max(1, self._max_model_len // 2))
        drawn = np.clip(np.rint(most * generator.lognormal(math.log(0.25), 0.6, CHUNK)), 1, most)
        return [(0, length) for length in drawn.astype(int).tolist()]

    def _document(self, index: int, output_len: int) -> tuple[int, ...]:
        """Request `index` asks about document `index % num_documents`: the same one comes back after all the others."""
        document = index % self._num_documents
        room = self._max_model_len - min(self._options.max_output_len or 512, max(1, self._max_model_len // 2))
        most = max(1, min(self._options.max_prompt_len or room, room))
        share = np.random.default_rng([self._options.trace_seed, 6, document]).lognormal(math.log(0.4), 0.7)
        question = min(DOCUMENT_QUESTION, most // 2)
        length = max(1, min(most, round(most * share)) - question)
        return self._texts.text(document, length) + self._texts.text(self._num_documents + index, question)


class Conversations:
    """Conversations of agents: a shared system prompt, then turns; each prompt is the whole conversation so far.

    A conversation that would outgrow the context goes on from the system prompt alone.
    """

    def __init__(self, options: TraceOptions, max_model_len: int):
        self.num_requests = 1000 if options.num_requests is None else options.num_requests
        self._options = options
        self._turns = options.turns or 8
        self._think_seconds = 5.0 if options.think_seconds is None else options.think_seconds
        system_len = 1500 if options.system_prompt_len is None else options.system_prompt_len
        self._max_model_len = max_model_len
        self._texts = Texts(options.trace_seed, max_model_len)
        self._system_prompt = self._texts.text(0, min(system_len, max_model_len // 2))

    def requests(self) -> Iterator[TraceRequest]:
        """The first turns; the last conversation has fewer of them where the number of requests asks for it."""
        times = arrival_times(self._options, self._turns)
        users = Users(self._options)
        for conversation in range(math.ceil(self.num_requests / self._turns)):
            (user,) = users.draw(1)
            yield self._make(next(times), self._system_prompt, conversation, 0, user)

    def next_turn(self, request: TraceRequest, end_seconds: float) -> TraceRequest | None:
        """What is said after an answer and some thinking."""
        turn = request.turn + 1
        if turn == self._turns or request.conversation * self._turns + turn >= self.num_requests:
            return None
        generator = np.random.default_rng([self._options.trace_seed, 7, request.conversation, turn])
        arrival = end_seconds + self._think_seconds * generator.exponential()
        history = request.prompt_token_ids + (ANSWER_TOKEN,) * (request.num_output_tokens - 1) + (END_TOKEN,)
        return self._make(arrival, history, request.conversation, turn, request.user)

    def _make(self, arrival: float, history: tuple[int, ...], conversation: int, turn: int, user: str) -> TraceRequest:
        options, name = self._options, 1 + conversation * self._turns + turn
        room = self._max_model_len - len(self._system_prompt)
        ((said, answered),) = cut_to_context(
            draw_lengths(
                1,
                max_prompt_len=options.max_prompt_len or 1024,
                max_output_len=options.max_output_len or 1024,
                seed=options.trace_seed * NAMES + name,
            ),
            room,
        )
        if len(history) + said + answered > self._max_model_len:
            history = self._system_prompt
        return TraceRequest(arrival, history + self._texts.text(name, said), answered, user, 0, conversation, turn)


def make_trace(options: TraceOptions, max_model_len: int) -> Trace:
    """The trace that the options ask for, with no request longer than the context.

    Raises:
        ConfigError: when a trace file is asked for and is none.
    """
    if options.trace_file is not None:
        from jaxinfer.simulation.trace_file import TraceFile

        return TraceFile(options, options.trace_file)
    return Conversations(options, max_model_len) if options.trace == "agents" else SingleTurns(options, max_model_len)
