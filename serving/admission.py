"""Who may still queue (`--max-queue`), and when the others should come again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from jaxinfer.client import EngineSnapshot
from jaxinfer.errors import QueueFullError, RequestError

RECENT_FINISHES = 64
"""How many finished sequences tell the rate at which places become free."""
MAX_RETRY_SECONDS = 600


class Admission:
    """Counts sequences on their way to a place in the batch. Its owner's lock guards every call.

    Nobody has looked yet whether what was admitted since the last step began can run: it only counts as waiting where more
    arrive than there are free places in the batch. A request of n answers is n sequences.
    """

    def __init__(self, max_queue: int | None, clock: Callable[[], float] = time.monotonic):
        self._max_queue = max_queue
        self._clock = clock
        self._num_new = 0
        self._num_waiting = 0
        self._num_running = 0
        self._num_freed = 0
        self._finishes: deque[float] = deque(maxlen=RECENT_FINISHES + 1)
        """Moments at which a sequence ended; the first entry is where counting began."""
        self.num_refused = 0

    def admit(self, num_sequences: int, *, num_requests: int, max_num_seqs: int) -> None:
        """Let the requests of one client's call in, all of them or none.

        Raises:
            QueueFullError: more than `max_queue` sequences would wait.
            RequestError: even an idle engine would have to refuse them.
        """
        if self._max_queue is not None:
            most = max_num_seqs + self._max_queue
            if num_sequences > most:
                what = f"prompts times n must be at most {most} here ({max_num_seqs} run at once, {self._max_queue} may wait)"
                raise RequestError(f"{what}, got {num_sequences}", param="n" if num_requests == 1 else "prompt")
            # Where some were left waiting although places were free, it was blocks that were missing; but the places of those
            # who ended since then have not been given out yet.
            num_places = max(0, max_num_seqs - self._num_running)
            if self._num_waiting:
                num_places = min(num_places, self._num_freed)
            num_over = self._num_waiting + self._num_new + num_sequences - num_places - self._max_queue
            if num_over > 0:
                self.num_refused += num_requests
                seconds = self._retry_after_seconds(num_over)
                message = f"the queue is full: {self._max_queue} requests wait already (--max-queue); try again in {seconds} s"
                raise QueueFullError(message, retry_after_seconds=seconds)
        self._num_new += num_sequences

    def settle(self, snapshot: EngineSnapshot, *, num_taken: int, num_finished: int, is_idle: bool) -> None:
        """Note how things stand after a step that began with `num_taken` of the admitted sequences taken in."""
        self._num_new -= num_taken
        self._num_waiting, self._num_running, self._num_freed = snapshot.num_waiting, snapshot.num_running, num_finished
        if is_idle:
            self._finishes.clear()
            return
        now = self._clock()
        self._finishes.extend([now] * (num_finished if self._finishes else 1))

    def _retry_after_seconds(self, num_places: int) -> int:
        """When this many sequences will have ended at the rate of the last ones; 1 while that is unknown."""
        num_finished = len(self._finishes) - 1
        if num_finished < 1:
            return 1
        seconds = num_places * (self._clock() - self._finishes[0]) / num_finished
        return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)
