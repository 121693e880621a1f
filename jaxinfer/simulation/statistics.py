"""Figures of any number of samples in bounded memory: quantiles, time series, fairness."""

from __future__ import annotations

import math
from collections.abc import Collection

RESOLUTION = 0.005
"""Ratio of neighbouring histogram edges, less 1: quantiles are right within half of it."""
SMALLEST = 1e-6
"""Samples below count as 0."""
_LOG_STEP = math.log1p(RESOLUTION)


class Histogram:
    """Counts of samples >= 0 on a logarithmic scale."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.num_samples = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count one sample."""
        index = round(math.log(value / SMALLEST) / _LOG_STEP) if value > SMALLEST else -1
        self._counts[index] = self._counts.get(index, 0) + 1
        self.num_samples += 1
        self.total += value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        """Of all samples, exact; 0 without any."""
        return self.total / max(1, self.num_samples)

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of the samples do not exceed, within RESOLUTION / 2; 0 without samples."""
        wanted = max(1, math.ceil(share * self.num_samples))
        seen = 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= wanted:
                return min(self.largest, SMALLEST * math.exp(index * _LOG_STEP)) if index >= 0 else 0.0
        return 0.0


class TimeSeries:
    """Rows of numbers over time, at most `max_points`: when there are more, every second one is dropped and as many skipped.

    Until then, which is what small scenarios see, every row offered is kept.
    """

    def __init__(self, max_points: int = 4096):
        self._max_points = max_points
        self._stride = 1
        self._num_offered = 0
        self.times: list[float] = []
        self.rows: list[tuple[float, ...]] = []

    def is_due(self) -> bool:
        """Whether the next row is wanted; to be asked once for every row there is, before it is made."""
        self._num_offered += 1
        return (self._num_offered - 1) % self._stride == 0

    def add(self, time: float, row: tuple[float, ...]) -> None:
        """Keep a row that was due."""
        self.times.append(time)
        self.rows.append(row)
        if len(self.times) >= self._max_points:
            self.times, self.rows = self.times[::2], self.rows[::2]
            self._stride *= 2


def jain_index(shares: Collection[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe 1984)."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class Fairness:
    """Jain's index of the tokens that users were served, window by window of simulated time.

    Over a whole run every user gets all they asked for, so it is only told apart while they compete: a window counts the
    users who had unfinished requests all through it, and weighs as long as it is; one with fewer than two such users counts
    nothing. A window begins when the one before it ends, and when a second user comes to one who was alone.
    """

    def __init__(self, window_seconds: float):
        self.window_seconds = window_seconds
        self.window_end = window_seconds
        self._unfinished: dict[str, int] = {}
        self._competing: set[str] = set()
        self._served: dict[str, float] = {}
        self._weighted = 0.0
        self._seconds = 0.0

    def is_second(self, user: str) -> bool:
        """Whether a request of this user would begin a window; what others got before must have been told by then."""
        return user not in self._unfinished and len(self._unfinished) == 1

    def arrived(self, user: str, now: float) -> None:
        """A request of a user has come."""
        begins = self.is_second(user)
        self._unfinished[user] = self._unfinished.get(user, 0) + 1
        if begins:
            self._begin_window(now)

    def ended(self, user: str) -> None:
        """A request of a user has ended."""
        self._unfinished[user] -= 1
        if not self._unfinished[user]:
            del self._unfinished[user]
            self._competing.discard(user)

    def serve(self, user: str, num_tokens: int) -> None:
        """A user got tokens in this window: those of the prompt with the first of the answer."""
        self._served[user] = self._served.get(user, 0.0) + num_tokens

    def end_window(self, now: float) -> None:
        """Close the window that has `window_end` behind it; `now` begins the next one."""
        if len(self._competing) > 1:
            seconds = self.window_seconds + now - self.window_end
            self._weighted += seconds * jain_index([self._served.get(user, 0.0) for user in self._competing])
            self._seconds += seconds
        self._begin_window(now)

    def _begin_window(self, now: float) -> None:
        self._served.clear()
        self._competing = set(self._unfinished)
        self.window_end = now + self.window_seconds

    @property
    def index(self) -> float | None:
        """Mean over the windows; None when users never competed for a whole one."""
        return self._weighted / self._seconds if self._seconds else None
