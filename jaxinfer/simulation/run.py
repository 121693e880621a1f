"""The simulation: a clock that jumps from event to event around the real scheduler.

Events are arrivals, deadlines, the ends of steps and of fetches. As in the engine, with async scheduling a step is planned
while the one before it runs, and without it after that one has ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.errors import RequestError
from jaxinfer.messages import FetchResult, ScheduledRequest, SchedulerOutput, SeqId, StepOutput
from jaxinfer.request import FinishReason, GenerationRequest, RequestId, SamplingParams
from jaxinfer.simulation.recorder import LiveRequest, PoolUse, Recorder, wasted_tokens
from jaxinfer.simulation.server import Server
from jaxinfer.simulation.timing import StepWork, Timing
from jaxinfer.simulation.traces import ANSWER_TOKEN, END_TOKEN, Trace, TraceRequest
from jaxinfer.simulation.transfers import Transfers

PARAMS = SamplingParams(temperature=0.0, max_tokens=None)
"""Of every request: nobody knows beforehand when an answer ends."""
ANSWER, END, NOTHING = [ANSWER_TOKEN], [END_TOKEN], []
STEPS_PER_PROGRESS = 64
OnProgress = Callable[[int, int | None], None]
"""Called now and then with the requests that have ended and, where known, how many there will be."""


@dataclass(slots=True)
class _Flight:
    """A step between its launch and its end."""

    output: SchedulerOutput
    start: float
    end: float


def work_of(rows: list[ScheduledRequest], num_tokens: int, num_copied_bytes: float) -> StepWork:
    """What a step's rows cost."""
    num_before = sum([row.num_computed_tokens for row in rows])
    num_pairs = num_before + num_tokens
    if num_tokens > len(rows):
        for row in rows:
            count = len(row.token_ids)
            num_pairs += (count - 1) * row.num_computed_tokens + count * (count - 1) // 2
    return StepWork(num_tokens, num_pairs, num_before + num_tokens, num_copied_bytes)


class Simulation:
    """One run of a trace; used once.

    Args:
        server: idle.
        trace: what arrives.
        timing: how long steps and copies take.
        on_progress: told how many have ended.
    """

    def __init__(self, server: Server, trace: Trace, timing: Timing, on_progress: OnProgress = lambda done, total: None):
        self.server = server
        self.scheduler = server.scheduler
        self.recorder = Recorder()
        self.now = 0.0
        self._trace = trace
        self._timing = timing
        self._on_progress = on_progress
        self._is_async = self.scheduler.config.async_scheduling == "on"
        self._has_priorities = self.scheduler.config.scheduling_policy == "priority"
        self.transfers = Transfers(timing, [server.block_bytes])
        self._first_turns = trace.requests()
        self._next_first = next(self._first_turns, None)
        self._follow_ups: list[tuple[float, int, TraceRequest]] = []
        self._live: dict[SeqId, LiveRequest] = {}
        self._num_outputs: dict[SeqId, int] = {}
        self._deadlines: deque[tuple[float, SeqId]] = deque()
        self._flights: deque[_Flight] = deque()
        self._fetches: list[tuple[float, int]] = []
        self._cancelled: set[int] = set()
        self._device_free = 0.0
        self._num_arrived = 0
        self._num_ended = 0
        self._num_follow_ups = 0

    def run(self) -> Recorder:
        """Until everything that arrives has ended."""
        while True:
            self._arrive()
            self._expire()
            self._launch()
            now = self._next_event()
            if now is None:
                assert not self._live, f"the scheduler waits for nothing with {len(self._live)} requests unfinished"
                self._on_progress(self._num_ended, self._num_ended)
                return self.recorder
            self.now = max(self.now, now)
            self._end_fetches()
            if self._flights and self._flights[0].end <= self.now:
                self._land(self._flights.popleft())

    # ---- what comes ------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> float | None:
        first = self._next_first.arrival_seconds if self._next_first is not None else None
        if self._follow_ups and (first is None or self._follow_ups[0][0] < first):
            return self._follow_ups[0][0]
        return first

    def _arrive(self) -> None:
        """Queue what is due."""
        while (arrival := self._next_arrival()) is not None and arrival <= self.now:
            if self._follow_ups and self._follow_ups[0][0] == arrival:
                request = heapq.heappop(self._follow_ups)[2]
            else:
                request = self._next_first
                assert request is not None
                self._next_first = next(self._first_turns, None)
            self._queue(request)

    def _queue(self, request: TraceRequest) -> None:
        name = RequestId(str(self._num_arrived))
        self._num_arrived += 1
        try:
            sequences = self.scheduler.add(
                GenerationRequest(
                    request_id=name,
                    prompt_token_ids=request.prompt_token_ids,
                    params=PARAMS,
                    priority=request.priority if self._has_priorities else 0,
                    user=request.user,
                )
            )
        except RequestError:  # it can never run: the server would say so at once
            self.recorder.num_refused += 1
            self._follow(request)
            return
        live = LiveRequest(request, sequences[0])
        seq_id = sequences[0].seq_id
        self._live[seq_id] = live
        self._num_outputs[seq_id] = request.num_output_tokens
        if self.recorder.fairness.is_second(request.user):
            self._credit_running()
        self.recorder.arrived(live)
        timeout = self.scheduler.config.request_timeout
        if timeout is not None:
            self._deadlines.append((request.arrival_seconds + timeout, seq_id))

    def _expire(self) -> None:
        """End what has passed its deadline; all have the same time, so they expire as they arrive."""
        while self._deadlines and (self._deadlines[0][0] <= self.now or self._deadlines[0][1] not in self._live):
            _, seq_id = self._deadlines.popleft()
            if seq_id in self._live:
                self.scheduler.abort(self._live[seq_id].seq.request_id, FinishReason.TIMEOUT)
                self._end(seq_id, FinishReason.TIMEOUT)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Plan and launch as many steps as there may be at once."""
        while len(self._flights) < 1 + self._is_async:
            output = self.scheduler.schedule()
            if output is None:
                return
            start, copied = self.transfers.run_moves(output.moves, max(self.now, self._device_free))
            self._cancelled.update(output.cancelled_fetches)
            for fetch in output.fetches:
                heapq.heappush(self._fetches, (self.transfers.fetch(fetch, self.now), fetch.ticket))
            rows = output.scheduled
            if not rows:
                # Blocks to move or fetches to begin, and nobody who can go on yet.
                self._device_free = start + 2 * copied / self._timing.memory_bytes_per_second
                continue
            seconds = self._timing.step_seconds(work_of(rows, output.num_tokens, copied))
            host = self._timing.host_seconds
            end = start + (max(seconds, host) if self._is_async else seconds + host)
            self._device_free = end
            self._flights.append(_Flight(output, start, end))
            if self.recorder.series.is_due():
                self._sample(rows, start, end - start)

    def _next_event(self) -> float | None:
        """When something happens next; None when nothing ever will."""
        times = [self._flights[0].end] if self._flights else []
        if len(self._flights) < 1 + self._is_async:
            # What arrives while no step can be planned is queued when one can.
            arrival = self._next_arrival()
            times += [] if arrival is None else [arrival]
            times += [self._deadlines[0][0]] if self._deadlines else []
        times += [self._fetches[0][0]] if self._fetches else []
        return min(times, default=None)

    def _end_fetches(self) -> None:
        while self._fetches and self._fetches[0][0] <= self.now:
            _, ticket = heapq.heappop(self._fetches)
            if ticket in self._cancelled:
                self._cancelled.discard(ticket)
            else:
                self.scheduler.fetched(FetchResult(ticket))

    def _land(self, flight: _Flight) -> None:
        """Account for a step that has ended now."""
        output, recorder = flight.output, self.recorder
        recorder.num_steps += 1
        recorder.num_computed_tokens += output.num_tokens
        recorder.busy_seconds += flight.end - flight.start
        updates = self.scheduler.update(output, StepOutput(self._sampled(output.scheduled, flight)))
        for update in updates:
            if update.finish_reason is not None:
                self._end(update.seq_id, update.finish_reason)
        if self.now >= recorder.fairness.window_end:
            self._end_window()
        recorder.max_waiting = max(recorder.max_waiting, self.scheduler.num_waiting)
        if recorder.num_steps % STEPS_PER_PROGRESS == 0:
            self._on_progress(self._num_ended, self._trace.num_requests)

    def _sampled(self, rows: list[ScheduledRequest], flight: _Flight) -> list[list[int]]:
        """The tokens of a step: an end where an answer has its length, anything elsewhere."""
        wanted = self._num_outputs
        sampled = []
        for row in rows:
            num_output_tokens = row.num_output_tokens
            if row.is_first_of_slot or not num_output_tokens:
                self._note_start(row, flight)
            if row.is_sampling:
                # One that has ended meanwhile wants nothing; the scheduler drops its row.
                sampled.append(ANSWER if num_output_tokens + 1 < wanted.get(row.seq_id, 0) else END)
            else:
                sampled.append(NOTHING)
        return sampled

    def _note_start(self, row: ScheduledRequest, flight: _Flight) -> None:
        live = self._live.get(row.seq_id)
        if live is None:
            return
        if live.started_seconds is None:
            self.recorder.first_row(live, flight.start)
        if row.is_sampling and live.first_token_seconds is None:
            self.recorder.first_sampled(live, flight.end)

    def _end(self, seq_id: SeqId, reason: FinishReason) -> None:
        live = self._live.pop(seq_id)
        del self._num_outputs[seq_id]
        self._num_ended += 1
        self.recorder.ended(live, reason, self.now)
        self._follow(live.request)

    def _follow(self, request: TraceRequest) -> None:
        follow_up = self._trace.next_turn(request, self.now)
        if follow_up is not None:
            self._num_follow_ups += 1
            heapq.heappush(self._follow_ups, (follow_up.arrival_seconds, self._num_follow_ups, follow_up))

    # ---- what is seen ----------------------------------------------------------------------------------------------

    def _end_window(self) -> None:
        self._credit_running()
        self.recorder.fairness.end_window(self.now)

    def _credit_running(self) -> None:
        for live in self._live.values():
            if live.first_token_seconds is not None:
                self.recorder.credit(live)

    def _sample(self, rows: list[ScheduledRequest], start: float, seconds: float) -> None:
        pool, size = self.scheduler.pools.pools[0], self.scheduler.pools.block_size
        use = PoolUse(pool.num_held * size, pool.num_cached * size, wasted_tokens(rows, 0, size))
        self.recorder.sample(start, seconds, self.scheduler.num_waiting, self.scheduler.num_running, use)
