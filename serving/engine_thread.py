"""One thread owns the Engine; everybody else talks to that thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from jaxinfer.client import EngineDescription, EngineSnapshot
from jaxinfer.errors import EngineDeadError, RequestError
from jaxinfer.request import GenerationRequest, RequestId
from jaxinfer.tokenizer import Tokenizer
from serving.admission import Admission
from serving.delta_stream import DeltaStream, News, tell
from serving.garbage_collector import settle_garbage_collector
from serving.kv_view import KVView, KVViewer
from serving.step_engine import EngineState, StepEngine
from serving.wakeups import Wakeups

logger = logging.getLogger(__name__)


class EngineThread:
    """An EngineClient whose engine is built, stepped and stopped by a thread of its own.

    A fault in a step ends every request in flight with EngineDeadError, and so does every later submit; a fault in taking
    a request in ends that request alone. `max_queue`: how many sequences may wait; more are refused.
    """

    def __init__(self, build_engine: Callable[[], StepEngine], *, step_timeout_seconds: float = 30.0, max_queue: int | None = None):
        self._build_engine = build_engine
        self._step_timeout_seconds = step_timeout_seconds
        self._engine: StepEngine | None = None
        self._state = EngineState.LOADING
        self._fault: str | None = None
        self._load_error: BaseException | None = None
        # Guards state, inbox, streams and admission. Never held during a step.
        self._condition = threading.Condition()
        self._arrivals: deque[GenerationRequest] = deque()
        self._aborts: set[RequestId] = set()
        self._streams: dict[RequestId, DeltaStream] = {}
        self._snapshot = EngineSnapshot()
        self._step_started: float | None = None
        self._admission = Admission(max_queue)
        self._viewer = KVViewer()
        self._load_waiters = Wakeups()
        self._idle_waiters = Wakeups()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- any thread ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which begins by building the engine."""
        self._thread.start()

    async def wait_loaded(self) -> None:
        """Return when the engine takes requests.

        Raises:
            Exception: whatever building the engine raised.
        """
        with self._condition:
            loaded = self._load_waiters.add() if self._state is EngineState.LOADING else None
        if loaded is not None:
            await loaded.wait()
        if self._load_error is not None:
            raise self._load_error

    @property
    def state(self) -> EngineState:
        """Loading, ready, draining, stopped or dead."""
        return self._state

    @property
    def fault(self) -> str | None:
        """The kind of fault that ended the engine."""
        return self._fault

    @property
    def is_hung(self) -> bool:
        """Whether the running step has taken longer than any step should."""
        started = self._step_started
        return started is not None and time.monotonic() - started > self._step_timeout_seconds

    @property
    def description(self) -> EngineDescription:
        """What is served.

        Raises:
            EngineDeadError: while the engine is loading.
        """
        return self._loaded_engine().description

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises as `description` does."""
        return self._loaded_engine().tokenizer

    def submit(self, request: GenerationRequest) -> DeltaStream:
        """Queue a request from a coroutine; see EngineClient.submit."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[DeltaStream]:
        """Queue requests that belong together: all of them, or none when one is refused. Raises as `submit`."""
        engine = self._loaded_engine()
        for request in requests:
            engine.validate(request)
        loop = asyncio.get_running_loop()
        streams = {request.request_id: DeltaStream(request.request_id, loop, self.abort) for request in requests}
        with self._condition:
            self._require_ready()
            for request_id in streams.keys() & self._streams.keys():
                raise RequestError(f"request_id {request_id!r:.80} is in use by a running request", param="request_id")
            self._admission.admit(_num_sequences(requests), num_requests=len(requests), max_num_seqs=engine.description.max_num_seqs)
            self._streams.update(streams)
            self._arrivals.extend(requests)
            self._condition.notify()
        return list(streams.values())

    def abort(self, request_id: RequestId) -> None:
        """End a request; unknown ids are ignored."""
        with self._condition:
            if request_id in self._streams:
                self._aborts.add(request_id)
                self._condition.notify()

    def snapshot(self) -> EngineSnapshot:
        """Counters as of the last step, with what has arrived since counted as waiting."""
        with self._condition:
            num_arrivals = _num_sequences(self._arrivals)
        last = self._snapshot
        return replace(last, num_waiting=last.num_waiting + num_arrivals, is_stepping=self._step_started is not None, fault=self._fault)

    @property
    def num_refused(self) -> int:
        """Requests that found the queue full."""
        return self._admission.num_refused

    async def kv_view(self) -> KVView:
        """The blocks as the engine's thread sees them between two steps; waits for the running step.

        Raises:
            EngineDeadError: the engine is loading or has ended.
            Exception: whatever looking at the blocks raised.
        """
        self._loaded_engine()
        ordered = self._viewer.order()
        with self._condition:
            self._condition.notify()
        return await ordered

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; returns whether all ended in time.

        May be cancelled to cut the wait short; `end_requests` then ends those still there.
        """
        with self._condition:
            if self._state in (EngineState.LOADING, EngineState.READY):
                self._state = EngineState.DRAINING
            if not self._streams:
                return True
            idle = self._idle_waiters.add()
        try:
            async with asyncio.timeout(timeout_seconds):
                await idle.wait()
        except TimeoutError:
            return False
        return True

    def end_requests(self, reason: str) -> None:
        """End every request in flight with EngineDeadError(reason)."""
        with self._condition:
            self._aborts.update(self._streams)
            streams = list(self._streams.values())
            self._condition.notify()
        self._tell({stream: EngineDeadError(reason) for stream in streams})

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after its running step, and the engine with it; returns whether both have ended."""
        with self._condition:
            if self._state is not EngineState.DEAD:
                self._state = EngineState.STOPPED
            self._condition.notify()
        self.end_requests("the server is shutting down")
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _loaded_engine(self) -> StepEngine:
        engine = self._engine
        if engine is None:
            raise EngineDeadError("the model failed to load" if self._load_error else "the model is still loading")
        return engine

    def _require_ready(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDeadError(f"the engine has stopped after a fault ({self._fault})")
        if self._state is not EngineState.READY:
            raise EngineDeadError("the server is shutting down")

    # -- the engine's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build_engine()
        except BaseException as error:  # Whatever it is, wait_loaded raises it in the main thread.
            self._load_error = error
            self._finish_loading(EngineState.DEAD)
            return
        settle_garbage_collector()
        self._snapshot = engine.snapshot()
        self._engine = engine
        self._finish_loading(EngineState.READY)
        try:
            while self._wait_for_work(engine):
                self._step(engine, self._take_in(engine))
                self._viewer.serve(engine)
            engine.close()
        except Exception as error:  # The outermost edge: nothing is known of the engine's state any more.
            self._die(error)
        finally:
            self._viewer.close()

    def _finish_loading(self, state: EngineState) -> None:
        with self._condition:
            if self._state is EngineState.LOADING:
                self._state = state
            wake = self._load_waiters.take()
        wake()

    def _wait_for_work(self, engine: StepEngine) -> bool:
        with self._condition:
            while not (self._arrivals or self._aborts or engine.has_work or self._state is EngineState.STOPPED or self._viewer.has_orders):
                self._condition.wait()
            return self._state is not EngineState.STOPPED

    def _take_in(self, engine: StepEngine) -> int:
        """Hand arrivals and aborts to the engine; returns how many sequences arrived."""
        with self._condition:
            arrivals, aborts = list(self._arrivals), self._aborts
            self._arrivals.clear()
            self._aborts = set()
        failed: dict[RequestId, Exception] = {}
        for request in arrivals:
            if request.request_id in aborts:
                continue
            try:
                engine.add_request(request)
            except RequestError as error:
                failed[request.request_id] = error
            except Exception as error:
                logger.exception("fault in taking in request %s", request.request_id)
                failed[request.request_id] = EngineDeadError(f"the request could not be taken in ({type(error).__name__})")
        for request_id in aborts:
            engine.abort(request_id)
        if arrivals or aborts:
            # Before the streams go: a gauge that still counts a request whose answer has ended would be wrong.
            self._snapshot = engine.snapshot()
        with self._condition:
            news = {self._streams[request_id]: error for request_id, error in failed.items() if request_id in self._streams}
        self._end([*aborts, *failed], news)
        return _num_sequences(arrivals)

    def _step(self, engine: StepEngine, num_taken: int) -> None:
        """Run a step, if there is one to run, and tell what it did; `num_taken` sequences were taken in before it."""
        deltas = []
        if engine.has_work:
            self._step_started = time.monotonic()
            deltas = engine.step()
            self._snapshot = engine.snapshot()
            self._step_started = None
        num_finished = sum(output.finish_reason is not None for delta in deltas for output in delta.outputs)
        with self._condition:
            # Before the news: whoever reads the end of a request may send the next one.
            self._admission.settle(self._snapshot, num_taken=num_taken, num_finished=num_finished, is_idle=not engine.has_work)
            news = {stream: delta for delta in deltas if (stream := self._streams.get(delta.request_id)) is not None}
        self._end([delta.request_id for delta in deltas if delta.is_finished], news)

    def _die(self, error: Exception) -> None:
        logger.exception("the engine has stopped after a fault")
        self._fault = type(error).__name__
        self._step_started = None
        with self._condition:
            self._state = EngineState.DEAD
            streams = list(self._streams.values())
            self._arrivals.clear()
        self._snapshot = replace(self._snapshot, num_running=0, num_waiting=0)
        news = {stream: EngineDeadError(f"the engine has stopped after a fault ({self._fault})") for stream in streams}
        self._end([stream.request_id for stream in streams], news)

    def _end(self, request_ids: list[RequestId], news: Mapping[DeltaStream, News]) -> None:
        """Drop the streams of requests that have ended, tell the news, and then those who wait until all is idle.

        In this order: whoever reads the end of a request may use its id again.
        """
        with self._condition:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            wake = None if self._streams else self._idle_waiters.take()
        self._tell(news)
        if wake is not None:
            wake()

    def _tell(self, news: Mapping[DeltaStream, News]) -> None:
        for stream in tell(news):
            self.abort(stream.request_id)


def _num_sequences(requests: Iterable[GenerationRequest]) -> int:
    return sum(request.params.n for request in requests)
