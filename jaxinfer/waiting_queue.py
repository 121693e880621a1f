"""Who is next: sequences without a batch slot, in the order of a scheduling policy. No jax."""

from __future__ import annotations

import heapq
from typing import Protocol

from jaxinfer.config import SchedulingPolicy
from jaxinfer.sequence import Sequence

_MIN_USERS = 1_024
"""Counters that are kept before it is worth looking for superfluous ones."""


class WaitingQueue(Protocol):
    """Sequences that wait. One that ends while it waits is told by its status and skipped."""

    def __len__(self) -> int:
        """Sequences that wait, those that have ended left out."""
        ...

    def push(self, seq: Sequence) -> None:
        """Add a sequence; a preempted one comes in front of all that arrived after it."""
        ...

    def head(self) -> Sequence | None:
        """The next in order, None when nobody waits."""
        ...

    def pop(self) -> None:
        """Take away what `head` returned."""
        ...

    def note_end(self, seq: Sequence) -> None:
        """Note that one of the waiting has ended."""
        ...

    def arrive(self, user: str) -> None:
        """A sequence of this user begins to exist, waiting or not."""
        ...

    def leave(self, user: str) -> None:
        """A sequence of this user has ended."""
        ...

    def charge(self, user: str, num_tokens: int) -> None:
        """Tokens are computed for a user."""
        ...


def make_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """The queue of a policy."""
    return FairQueue() if policy == "fair" else OrderedQueue()


class OrderedQueue:
    """By `Sequence.order`: O(log n) to add and to take the first, whatever waits.

    One that ends while it waits stays where it is until it comes to the front or the ended are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def push(self, seq: Sequence) -> None:
        """See WaitingQueue."""
        heapq.heappush(self._heap, (seq.order, seq))

    def head(self) -> Sequence | None:
        """See WaitingQueue."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """See WaitingQueue."""
        heapq.heappop(self._heap)

    def note_end(self, seq: Sequence) -> None:
        """See WaitingQueue."""
        self._num_ended += 1
        if self._num_ended > len(self) + 64:
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)
            self._num_ended = 0

    def arrive(self, user: str) -> None:
        """Nobody's tokens are counted here."""

    def leave(self, user: str) -> None:
        """Nobody's tokens are counted here."""

    def charge(self, user: str, num_tokens: int) -> None:
        """Nobody's tokens are counted here."""


class FairQueue:
    """The user who has been served least comes first; within a user, by order of arrival.

    A virtual counter per user grows with the tokens computed for it. A user who comes anew is lifted to the least counter
    of those who are there: having been away is no credit. (Virtual token counter: Sheng et al., "Fairness in Serving Large
    Language Models", 2024, with equal weights of input and output.)
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedQueue] = {}
        self._served: dict[str, int] = {}
        self._num_living: dict[str, int] = {}
        self._max_users = _MIN_USERS
        # (counter when pushed, user): the counters only grow, so an entry at the top that is up to date is the least.
        self._heap: list[tuple[int, str]] = []
        self._head_user = ""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, seq: Sequence) -> None:
        """See WaitingQueue."""
        queue = self._queues.get(seq.user)
        if queue is None:
            queue = self._queues[seq.user] = OrderedQueue()
            heapq.heappush(self._heap, (self._served[seq.user], seq.user))
        queue.push(seq)

    def head(self) -> Sequence | None:
        """See WaitingQueue."""
        while self._heap:
            served, user = self._heap[0]
            queue = self._queues.get(user)
            seq = queue.head() if queue is not None else None
            if seq is None:
                heapq.heappop(self._heap)
                self._queues.pop(user, None)
            elif served < self._served[user]:
                heapq.heapreplace(self._heap, (self._served[user], user))
            else:
                self._head_user = user
                return seq
        return None

    def pop(self) -> None:
        """See WaitingQueue."""
        self._queues[self._head_user].pop()

    def note_end(self, seq: Sequence) -> None:
        """See WaitingQueue."""
        self._queues[seq.user].note_end(seq)

    def arrive(self, user: str) -> None:
        """See WaitingQueue."""
        count = self._num_living.get(user, 0)
        self._num_living[user] = count + 1
        if count == 0:
            least = min((self._served[other] for other in self._num_living if other != user), default=0)
            self._served[user] = max(self._served.get(user, 0), least)

    def leave(self, user: str) -> None:
        """See WaitingQueue."""
        self._num_living[user] -= 1
        if self._num_living[user] == 0:
            del self._num_living[user]
            if not self._num_living:
                # Nobody is there to be compared with.
                self._served.clear()
                self._queues.clear()
                self._heap.clear()
            elif len(self._served) > self._max_users:
                self._forget_absent()

    def charge(self, user: str, num_tokens: int) -> None:
        """See WaitingQueue."""
        self._served[user] += num_tokens

    def _forget_absent(self) -> None:
        """Drop the counters of those who would be lifted above them anyway if they came back."""
        least = min(self._served[user] for user in self._num_living)
        self._served = {user: served for user, served in self._served.items() if user in self._num_living or served > least}
        self._max_users = max(_MIN_USERS, 2 * len(self._served))
