from __future__ import annotations

import math
import random

import numpy as np
import pytest

from jaxinfer.simulation.statistics import RESOLUTION, Fairness, Histogram, TimeSeries, jain_index


def test_quantiles_are_those_of_the_sorted_samples_within_the_resolution() -> None:
    drawn = random.Random(0)
    samples = [drawn.lognormvariate(-3, 3) for _ in range(5000)]
    histogram = Histogram()
    for sample in samples:
        histogram.add(sample)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.quantile(samples, share, method="inverted_cdf"))
        assert histogram.quantile(share) == pytest.approx(exact, rel=RESOLUTION)
    assert histogram.mean == pytest.approx(math.fsum(samples) / 5000)
    assert histogram.largest == max(samples)


def test_a_histogram_of_nothing_and_of_nothing_but_zeros() -> None:
    histogram = Histogram()
    assert (histogram.quantile(0.5), histogram.mean) == (0, 0)
    histogram.add(0.0)
    assert (histogram.quantile(0.5), histogram.largest) == (0, 0)


def test_a_series_keeps_everything_until_it_is_full_and_then_evenly_spaced_rows() -> None:
    series = TimeSeries(max_points=8)
    for index in range(1000):
        if series.is_due():
            series.add(float(index), (index,))
        if index == 6:
            assert series.times == list(range(7))
    assert len(series.times) <= 8
    steps = set(np.diff(series.times).tolist())
    assert len(steps) == 1
    assert series.times[0] == 0
    assert series.times[-1] > 1000 - 2 * steps.pop()


def test_jains_index() -> None:
    assert jain_index([3, 3, 3]) == pytest.approx(1)
    assert jain_index([5, 0, 0, 0]) == pytest.approx(1 / 4)
    assert jain_index([1, 3]) == pytest.approx(16 / (2 * 10))
    assert jain_index([0, 0]) == 1


def test_fairness_counts_who_competes_for_a_whole_window() -> None:
    fairness = Fairness(10.0)
    fairness.arrived("ann", 0.0)
    fairness.serve("ann", 1000)  # alone
    fairness.arrived("bob", 5.0)  # a window begins
    fairness.arrived("cid", 6.0)  # too late for it
    assert fairness.window_end == 15
    fairness.serve("ann", 30)
    fairness.serve("bob", 10)
    fairness.serve("cid", 500)
    fairness.end_window(15.0)
    first = jain_index([30, 10])
    assert fairness.index == pytest.approx(first)
    fairness.serve("ann", 20)
    fairness.serve("bob", 10)
    fairness.serve("cid", 10)
    fairness.ended("cid")  # so that only ann and bob are there to its end
    fairness.arrived("dan", 16.0)
    fairness.end_window(25.0)
    second = jain_index([20, 10])
    assert fairness.index == pytest.approx((first + second) / 2)
    fairness.ended("dan")
    fairness.serve("ann", 7)
    fairness.end_window(55.0)  # ann and bob for thirty seconds, in which bob got nothing
    assert fairness.index == pytest.approx((10 * first + 10 * second + 30 * 0.5) / 50)
    fairness.ended("bob")
    fairness.end_window(65.0)
    assert fairness.index == pytest.approx((10 * first + 10 * second + 30 * 0.5) / 50)


def test_users_who_are_never_there_together_have_no_index() -> None:
    fairness = Fairness(10.0)
    for user in ("ann", "bob"):
        fairness.arrived(user, 0.0)
        fairness.serve(user, 5)
        fairness.ended(user)
    fairness.end_window(10.0)
    assert fairness.index is None
