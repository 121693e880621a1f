"""The engine: schedule, launch, land. The only file that sees both the host and the device side of a step."""

from __future__ import annotations

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxinfer.batching import LogitRow, bare_row, logit_rows
from jaxinfer.client import EngineDescription, EngineSnapshot
from jaxinfer.completion import Completion, bad_word_ids
from jaxinfer.config import EngineConfig
from jaxinfer.errors import RequestError
from jaxinfer.generation import Deadlines, Generation
from jaxinfer.in_flight import InFlightStep
from jaxinfer.kv.kv_map import KVMap
from jaxinfer.messages import SchedulerOutput, SequenceUpdate, StepOutput
from jaxinfer.metrics import CompileCounter, EngineCounters
from jaxinfer.request import CompletionOutput, FinishReason, GenerationRequest, RequestDelta, RequestId, RequestTimings
from jaxinfer.runner import ModelRunner
from jaxinfer.sampling.batch import SamplingRow
from jaxinfer.scheduler import Scheduler
from jaxinfer.snapshot import take_snapshot
from jaxinfer.step_trace import StepTimes, StepTrace
from jaxinfer.tokenizer import Tokenizer

MAX_WAIT_SECONDS = 0.02
"""A step that has nothing but a disk to wait for ends after this: whoever drives the engine may have a new request, or an abort."""


class Engine:
    """Runs requests through a model; not thread-safe, one thread owns it. Build one with `startup.build_engine`.

    With `async_scheduling` a step is planned and launched while the one before it still runs: its sampled tokens feed the
    next step on the device, and the host reads them afterwards. `clock` gives the seconds of deadlines and timings.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        description: EngineDescription,
        compile_counter: CompileCounter,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.description = description
        self.counters = EngineCounters()
        self.trace: StepTrace | None = None
        """Collects the times of each step, when there is one."""
        self._clock = clock
        self._generations: dict[RequestId, Generation] = {}
        self._deadlines = Deadlines()
        self._in_flight: deque[tuple[InFlightStep, StepTimes]] = deque()
        self._num_ahead = 1 if scheduler.config.async_scheduling == "on" else 0
        self._seeds = random.Random(seed) if seed else random.SystemRandom()
        self._compile_counter = compile_counter
        self._is_stepping = False
        self._is_closed = False
        self._last_ready = 0.0
        self._fetch_begins: dict[int, float] = {}
        # Also at the interpreter's end, whether closed or not: a program that still runs when XLA's threads go is a crash.
        weakref.finalize(self, _wait_for, self._in_flight)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model, compile every program and be ready."""
        from jaxinfer.startup import build_engine

        return build_engine(config)[0]

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.scheduler.has_work or self.scheduler.has_cancelled_fetches or bool(self._in_flight)

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
        sequences = self.scheduler.add(request)
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
        generation = Generation(request, sequences[0].seq_id, completions, RequestTimings(arrival=self._clock()))
        self._generations[request.request_id] = generation
        self._deadlines.add(generation, (request.timeout, self.scheduler.config.request_timeout))
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: RequestId) -> None:
        """End a request and free its blocks now; unknown ids are ignored."""
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            generation.is_finished = True
            self.scheduler.abort(request_id)
            self._count_finish(FinishReason.ABORT)

    def token_ids(self, request_id: RequestId, index: int = 0) -> tuple[int, ...]:
        """Prompt and output so far of an unfinished completion.

        Raises:
            RequestError: when there is none.
        """
        generation = self._generations.get(request_id)
        if generation is None or index not in generation.completions:
            raise RequestError(f"request {request_id!r} has no running completion {index}", param="fork_of")
        return (*generation.request.prompt_token_ids, *generation.completions[index].output_ids)

    def step(self) -> list[RequestDelta]:
        """Plan and launch a step, and return what the step that landed added to each request.

        A request's first delta comes one call later when steps overlap. Where nothing can be computed, what is in flight
        lands; where everybody waits for blocks, this waits for the first of them, but for a disk no longer than a moment.
        """
        num_programs = self._compile_counter.num_programs
        self._is_stepping = True
        try:
            self._take_fetched()
            deltas = self._expire()
            is_launched = self._launch(*self._schedule())
            if len(self._in_flight) > (self._num_ahead if is_launched else 0):
                deltas += self._land()
            elif not is_launched and self.scheduler.has_work and self.runner.mover is not None:
                self.runner.mover.wait(MAX_WAIT_SECONDS)
            return deltas
        finally:
            self._is_stepping = False
            self.counters.num_recompiles += self._compile_counter.num_programs - num_programs
            self.counters.last_step_time = self._clock()

    def close(self) -> None:
        """End every request, let what is in flight land, and bring cached blocks to disk. The engine is of no use afterwards."""
        for request_id in self.running_ids:
            self.abort(request_id)
        self._land_all()
        if self.runner.mover is not None and not self._is_closed:
            self.scheduler.tiers.flush_to_disk()
            self.runner.move_blocks(self.scheduler.take_moves())
            self.runner.mover.close()
        self._is_closed = True

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges of this moment; other threads may ask while a step runs."""
        return take_snapshot(self.scheduler, self.counters, is_stepping=self._is_stepping)

    def kv_map(self) -> KVMap:
        """Which blocks are free, cached or held by whom, for people."""
        return self.scheduler.kv_map()

    def logits_for(self, token_ids: Sequence[int], chunk_size: int | None = None) -> np.ndarray:
        """Logits [len, V] (float32) of a sequence, computed by the engine's own steps; for evaluation and tests.

        Args:
            token_ids: at most what one sequence can hold.
            chunk_size: tokens per step; default: as many as a step gives logits for.

        Raises:
            RequestError: requests are running (their blocks are in the pool), or the sequence does not fit.
        """
        if self.scheduler.has_work:
            raise RequestError("logits_for needs an idle engine, requests are running")
        if not 0 < len(token_ids) <= self.scheduler.max_seq_tokens:
            raise RequestError(f"token_ids must be 1 to {self.scheduler.max_seq_tokens} tokens, got {len(token_ids)}", param="token_ids")
        self._land_all()
        pools = self.scheduler.pools
        blocks = pools.new_tables()
        pools.extend(blocks, len(token_ids))
        self.runner.move_blocks(self.scheduler.take_moves())
        chunk_size = min(chunk_size or self.runner.buckets.max_num_logit_rows, self.runner.buckets.max_num_logit_rows)
        chunks = []
        for start in range(0, len(token_ids), chunk_size):
            chunk = list(token_ids[start : start + chunk_size])
            output = SchedulerOutput([bare_row(chunk, start, blocks.tables)], len(chunk), len(chunk), [])
            chunks.append(np.asarray(self.runner.forward(output, logit_rows(output.scheduled)))[: len(chunk)])
        pools.release(blocks)
        return np.concatenate(chunks)

    # ---- before a step ---------------------------------------------------------------------------------------------

    def _take_fetched(self) -> None:
        """Tell the scheduler which blocks came near the device, and which the disk lost."""
        mover = self.runner.mover
        if mover is not None:
            now = self._clock()
            for result in mover.finished():
                self.counters.fetch_wait_seconds += now - self._fetch_begins.pop(result.ticket, now)
                self.scheduler.fetched(result)
            if lost := mover.lost_entries():
                self.scheduler.forget_on_disk(lost, takes_more=mover.takes_writes)

    def _expire(self) -> list[RequestDelta]:
        """End what has passed its deadline, wherever it stands."""
        deltas = []
        for generation in self._deadlines.pop_expired(self._clock()):
            self.scheduler.abort(generation.request.request_id, FinishReason.TIMEOUT)
            deltas.append(self._delta(generation, generation.end(FinishReason.TIMEOUT)))
        return deltas

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[SchedulerOutput | None, StepTimes]:
        times = StepTimes(self.counters.num_steps + len(self._in_flight), schedule_begin=self._clock())
        output = self.scheduler.schedule()
        times.schedule_end = self._clock()
        self.counters.scheduler_seconds += times.schedule_end - times.schedule_begin
        return output, times

    def _launch(self, output: SchedulerOutput | None, times: StepTimes) -> bool:
        """Enqueue a step; False when there are no rows to compute, only blocks to move, or nothing at all."""
        if output is None:
            return False
        for ticket in output.cancelled_fetches:
            self._fetch_begins.pop(ticket, None)
        self._fetch_begins |= {fetch.ticket: times.schedule_end for fetch in output.fetches}
        if not output.scheduled:
            self.runner.move(output)
            return False
        times.launch_begin = self._clock()
        for request in output.scheduled:
            self._generations[request.request_id].note_scheduled(request, times.launch_begin)
        rows = logit_rows(output.scheduled)
        step = self.runner.launch(output, rows, self._sampling_rows(output, rows))
        if self.trace is not None and self._in_flight:
            times.was_ahead = not self._in_flight[-1][0].is_ready
        times.num_rows, times.num_tokens, times.launch_end = len(output.scheduled), output.num_tokens, self._clock()
        self._in_flight.append((step, times))
        return True

    def _land(self) -> list[RequestDelta]:
        """Wait for the oldest step in flight and account for its results."""
        step, times = self._in_flight.popleft()
        result = step.result()
        times.ready = self._clock()
        updates = self.scheduler.update(step.output, result)
        counters = self.counters
        counters.scheduler_seconds += self._clock() - times.ready
        deltas = self._deltas(step.output, result, updates)
        times.update_end = self._clock()
        counters.num_steps += 1
        counters.step_seconds += times.ready - max(times.launch_begin, self._last_ready)
        self._last_ready = times.ready
        if self.trace is not None:
            self.trace.steps.append(times)
        return deltas

    def _land_all(self) -> None:
        """Let everything land when all requests have ended, so that nothing of it concerns anybody."""
        while self._in_flight:
            self._land()

    def _sampling_rows(self, output: SchedulerOutput, rows: Sequence[LogitRow]) -> list[SamplingRow]:
        """What the sampler must know of each row of logits."""
        sampling_rows = []
        trash_slot = self.runner.shape.trash_slot
        for row in rows:
            request = output.scheduled[row.row]
            generation = self._generations[request.request_id]
            if row.is_sampling:
                completion = generation.completions[request.index]
                biases = completion.biases(request)
                sampling_rows.append(SamplingRow(request.params, request.slot, completion.key, row.position + 1, None, biases))
            else:
                target = generation.request.prompt_token_ids[row.position + 1]
                sampling_rows.append(SamplingRow(request.params, trash_slot, (0, 0), row.position + 1, target, {}))
        return sampling_rows

    # ---- after a step ----------------------------------------------------------------------------------------------

    def _deltas(self, output: SchedulerOutput, step: StepOutput, updates: Sequence[SequenceUpdate]) -> list[RequestDelta]:
        for request, logprobs in zip(output.scheduled, step.prompt_logprobs or (), strict=False):
            if logprobs and (generation := self._generations.get(request.request_id)) is not None:
                generation.add_prompt_logprobs(request, logprobs)
        by_request: dict[RequestId, list[CompletionOutput]] = {}
        for update in updates:
            text = self._generations[update.request_id].completions[update.index].push(update)
            if text.is_stopped_by_text:
                self.scheduler.finish(update.seq_id)
            by_request.setdefault(update.request_id, []).append(text.output)
        return [self._delta(self._generations[request_id], outputs) for request_id, outputs in by_request.items()]

    def _delta(self, generation: Generation, outputs: list[CompletionOutput]) -> RequestDelta:
        self.counters.num_generation_tokens += sum(len(output.token_ids) for output in outputs)
        delta = generation.delta(outputs, self._clock())
        if delta.is_finished:
            del self._generations[delta.request_id]
            self._count_finish(outputs[-1].finish_reason or FinishReason.STOP)
        return delta

    def _count_finish(self, reason: FinishReason) -> None:
        counts = self.counters.finished_by_reason
        counts[reason.value] = counts.get(reason.value, 0) + 1


def _wait_for(in_flight: Iterable[tuple[InFlightStep, StepTimes]]) -> None:
    for step, _ in in_flight:
        step.wait()
