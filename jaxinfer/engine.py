"""The engine: schedule, execute, update. The only file that sees both the host and the device side of a step."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.batching import logit_rows
from jaxinfer.client import EngineDescription, EngineSnapshot
from jaxinfer.completion import Completion, bad_word_ids
from jaxinfer.config import EngineConfig
from jaxinfer.errors import RequestError
from jaxinfer.messages import ScheduledRequest, SchedulerOutput, SeqId, SequenceUpdate, StepOutput
from jaxinfer.metrics import CompileCounter, EngineCounters
from jaxinfer.request import (
    CompletionOutput,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    RequestDelta,
    RequestId,
    RequestTimings,
    SamplingParams,
)
from jaxinfer.runner import ModelRunner
from jaxinfer.sampling.batch import SamplingRow
from jaxinfer.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Generation:
    """A request on its way: its unfinished completions by index, and what is told once."""

    request: GenerationRequest
    completions: dict[int, Completion]
    timings: RequestTimings
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=lambda: [None])
    is_announced: bool = False


class Engine:
    """Runs requests through a model; not thread-safe, one thread owns it. Build one with `startup.build_engine`."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        description: EngineDescription,
        compile_counter: CompileCounter,
        seed: int = 0,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.description = description
        self.counters = EngineCounters()
        self._generations: dict[RequestId, _Generation] = {}
        self._seeds = random.Random(seed) if seed else random.SystemRandom()
        self._compile_counter = compile_counter
        self._is_stepping = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model, compile every program and be ready."""
        from jaxinfer.startup import build_engine

        return build_engine(config)[0]

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.scheduler.has_work

    @property
    def running_ids(self) -> tuple[RequestId, ...]:
        """Requests that have not ended."""
        return tuple(self._generations)

    def validate(self, request: GenerationRequest) -> None:
        """Refuse what can never run; touches nothing, so any thread may ask.

        Raises:
            RequestError: naming the field.
        """
        vocab_size = self.description.vocab_size
        params = request.params
        named = {
            "prompt": request.prompt_token_ids,
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in named.items():
            bad = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
            if bad:
                raise RequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}, got {str(bad[:5])[1:-1]}", param=name)
        self.scheduler.check_fits(request)

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request; its first delta comes from a later `step`.

        Raises:
            RequestError: when it can never run; nothing is queued then.
        """
        self.validate(request)
        params = request.params
        bad_words = bad_word_ids(params.bad_words, self.tokenizer)
        self.scheduler.add(request)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        completions = {
            index: Completion(
                params,
                index,
                seed=seed,
                tokenizer=self.tokenizer,
                bad_words=bad_words,
                eos_token_ids=self.description.eos_token_ids,
            )
            for index in range(params.n)
        }
        self._generations[request.request_id] = _Generation(request, completions, RequestTimings())
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: RequestId) -> None:
        """End a request and free its blocks now; unknown ids are ignored."""
        if self._generations.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)
            self._count_finish(FinishReason.ABORT)

    def step(self) -> list[RequestDelta]:
        """Compute one step and return what it added to each request; empty when there is nothing to do."""
        started = time.monotonic()
        num_programs = self._compile_counter.num_programs
        self._is_stepping = True
        try:
            output = self.scheduler.schedule()
            if output is None:
                return []
            self._note_scheduled(output)
            scheduled = time.monotonic()
            step = self.runner.execute(output, self._sampling_rows(output))
            executed = time.monotonic()
            deltas = self._deltas(output, step, self.scheduler.update(output, step))
            self.counters.num_steps += 1
            self.counters.scheduler_seconds += scheduled - started
            self.counters.step_seconds += executed - scheduled
            return deltas
        finally:
            self._is_stepping = False
            self.counters.num_recompiles += self._compile_counter.num_programs - num_programs
            self.counters.last_step_time = time.monotonic()

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges of this moment; other threads may ask while a step runs."""
        scheduler, counters = self.scheduler, self.counters
        return EngineSnapshot(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_kv_blocks_total=sum(pool.num_blocks for pool in scheduler.pools.pools),
            num_kv_blocks_free=sum(pool.num_free for pool in scheduler.pools.pools),
            num_preemptions=scheduler.num_preemptions,
            num_recompiles=counters.num_recompiles,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_steps=counters.num_steps,
            finished_by_reason=dict(counters.finished_by_reason),
            scheduler_seconds=counters.scheduler_seconds,
            step_seconds=counters.step_seconds,
            last_step_time=counters.last_step_time,
            is_stepping=self._is_stepping,
        )

    def logits_for(self, token_ids: Sequence[int], chunk_size: int | None = None) -> np.ndarray:
        """Logits [len, V] (float32) of a sequence, computed by the engine's own steps; for evaluation and tests.

        Args:
            token_ids: at most what one sequence can hold.
            chunk_size: tokens per step; default: as many as a step gives logits for.

        Raises:
            RequestError: requests are running (their blocks are in the pool), or the sequence does not fit.
        """
        if self.has_work:
            raise RequestError("logits_for needs an idle engine, requests are running")
        if not 0 < len(token_ids) <= self.scheduler.max_seq_tokens:
            raise RequestError(f"token_ids must be 1 to {self.scheduler.max_seq_tokens} tokens, got {len(token_ids)}", param="token_ids")
        pools = self.scheduler.pools
        blocks = pools.new_tables()
        pools.extend(blocks, len(token_ids))
        chunk_size = min(chunk_size or self.runner.buckets.max_num_logit_rows, self.runner.buckets.max_num_logit_rows)
        chunks = []
        for start in range(0, len(token_ids), chunk_size):
            chunk = list(token_ids[start : start + chunk_size])
            output = SchedulerOutput([_bare_row(chunk, start, blocks.tables)], len(chunk), len(chunk), [])
            chunks.append(np.asarray(self.runner.forward(output, logit_rows(output.scheduled)))[: len(chunk)])
        pools.release(blocks)
        return np.concatenate(chunks)

    # ---- before a step ---------------------------------------------------------------------------------------------

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        now = time.monotonic()
        for request in output.scheduled:
            timings = self._generations[request.request_id].timings
            if timings.first_scheduled is None:
                timings.first_scheduled = now
            timings.num_preemptions = max(timings.num_preemptions, request.generation)

    def _sampling_rows(self, output: SchedulerOutput) -> list[SamplingRow]:
        """What the sampler must know of each row of logits, in the order of `batching.logit_rows`."""
        rows = []
        trash_slot = self.runner.shape.trash_slot
        for row in logit_rows(output.scheduled):
            request = output.scheduled[row.row]
            generation = self._generations[request.request_id]
            if row.is_sampling:
                completion = generation.completions[request.index]
                biases = completion.biases(request)
                rows.append(SamplingRow(request.params, request.slot, completion.key, row.position + 1, None, biases))
            else:
                target = generation.request.prompt_token_ids[row.position + 1]
                rows.append(SamplingRow(request.params, trash_slot, (0, 0), row.position + 1, target, {}))
        return rows

    # ---- after a step ----------------------------------------------------------------------------------------------

    def _deltas(self, output: SchedulerOutput, step: StepOutput, updates: Sequence[SequenceUpdate]) -> list[RequestDelta]:
        for request, logprobs in zip(output.scheduled, step.prompt_logprobs or (), strict=False):
            self._generations[request.request_id].prompt_logprobs.extend(logprobs)
        by_request: dict[RequestId, list[CompletionOutput]] = {}
        for update in updates:
            completion = self._generations[update.request_id].completions[update.index]
            text = completion.push(update)
            if text.is_stopped_by_text:
                self.scheduler.finish(update.seq_id)
            by_request.setdefault(update.request_id, []).append(text.output)
        return [self._delta(request_id, outputs) for request_id, outputs in by_request.items()]

    def _delta(self, request_id: RequestId, outputs: list[CompletionOutput]) -> RequestDelta:
        generation = self._generations[request_id]
        timings = generation.timings
        now = time.monotonic()
        timings.first_token = timings.first_token or now
        for output in outputs:
            self.counters.num_generation_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                del generation.completions[output.index]
        delta = RequestDelta(request_id, outputs, timings=timings)
        if not generation.is_announced:
            generation.is_announced = True
            delta.prompt_token_ids = generation.request.prompt_token_ids
        # The first of the n completions computes them, but another one may be the first with a token.
        if generation.request.params.prompt_logprobs is not None and len(generation.prompt_logprobs) == len(
            generation.request.prompt_token_ids
        ):
            delta.prompt_logprobs, generation.prompt_logprobs = generation.prompt_logprobs, []
        if not generation.completions:
            timings.finished = now
            delta.is_finished = True
            del self._generations[request_id]
            self._count_finish(outputs[-1].finish_reason or FinishReason.STOP)
        return delta

    def _count_finish(self, reason: FinishReason) -> None:
        counts = self.counters.finished_by_reason
        counts[reason.value] = counts.get(reason.value, 0) + 1


def _bare_row(token_ids: list[int], start: int, tables: list[list[int]]) -> ScheduledRequest:
    """Tokens of no request, all of whose logits are wanted."""
    return ScheduledRequest(
        seq_id=SeqId(0),
        request_id=RequestId(""),
        index=0,
        generation=0,
        slot=0,
        token_ids=token_ids,
        num_computed_tokens=start,
        num_prompt_tokens=start + len(token_ids),
        num_output_tokens=0,
        block_ids=tables,
        is_sampling=False,
        is_first_of_slot=False,
        prompt_logprob_positions=range(start, start + len(token_ids)),
        params=SamplingParams(),
    )
