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
    for user in ("ann", "bob", "cid"):
        fairness.arrived(user)
    fairness.serve("ann", 1000)
    fairness.end_window(10.0)  # nobody was there at its start
    assert fairness.index is None
    fairness.serve("ann", 30)
    fairness.serve("bob", 10)
    fairness.serve("cid", 10)
    fairness.ended("cid")  # so that only ann and bob are there to its end
    fairness.arrived("dan")
    fairness.end_window(20.0)
    assert fairness.index == pytest.approx(jain_index([30, 10]))
    fairness.ended("dan")
    fairness.serve("ann", 7)
    fairness.end_window(50.0)  # ann and bob for thirty seconds, in which bob got nothing
    assert fairness.index == pytest.approx((10 * jain_index([30, 10]) + 30 * 0.5) / 40)
