"""What paging saves against one contiguous reservation per sequence."""

from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.simulation.options import TraceOptions
from jaxinfer.simulation.traces import TraceRequest
from tests.simulation.running import ONE_SECOND, GivenTrace, run

ALONE = GivenTrace([TraceRequest(0.0, tuple(range(2, 12)), 11)])
"""10 tokens of prompt and 11 of answer: 11 steps of a second after which 10, 11, .. 20 tokens are computed."""
SAME = {"async_scheduling": "off", "max_model_len": 64, "num_kv_blocks": 8, "block_size": 16, "host_kv_bytes": 0, "prefix_caching": "off"}
TOKENS = sum(range(10, 21))


def test_static_waste_is_what_is_set_aside_and_not_used() -> None:
    figures = run(ALONE, ONE_SECOND, allocation="static", **SAME).figures
    assert figures["kv_waste_percent"] == pytest.approx(100 * (1 - TOKENS / (11 * 64)))
    assert figures["kv_held_percent"] == pytest.approx(100 * 64 / 128)


def test_paged_waste_is_what_the_last_blocks_have_free() -> None:
    held = 7 * 16 + 4 * 32  # one block up to 16 tokens, two from 17 on
    figures = run(ALONE, ONE_SECOND, **SAME).figures
    assert figures["kv_waste_percent"] == pytest.approx(100 * (1 - TOKENS / held))
    assert figures["kv_held_percent"] == pytest.approx(100 * held / 11 / 128)


def test_static_allocation_runs_as_many_as_have_room() -> None:
    """The pool holds two reservations, so the third of three equal requests waits for the first two, which end together."""
    three = GivenTrace([TraceRequest(0.0, (2, 3), 5)] * 3)
    assert run(three, ONE_SECOND, allocation="static", **SAME).figures["simulated_seconds"] == pytest.approx(10)
    assert run(three, ONE_SECOND, **SAME).figures["simulated_seconds"] == pytest.approx(5)


def test_sharegpt_wastes_over_half_of_static_and_under_four_percent_of_paged_memory() -> None:
    asked = TraceOptions(num_requests=150, request_rate=50.0)
    same = {"max_model_len": 2048, "max_num_seqs": 64, "num_kv_blocks": 8192, "max_num_batched_tokens": 2048}
    static, paged = (run(asked, allocation=allocation, **same).figures for allocation in ("static", "paged"))
    assert static["kv_waste_percent"] >= 50
    assert 0 < paged["kv_waste_percent"] < 4


def test_a_pool_without_room_for_one_reservation_is_refused() -> None:
    with pytest.raises(ConfigError, match="sets aside --max-model-len 64 tokens for a sequence, and the pool has only 32"):
        run(ALONE, ONE_SECOND, allocation="static", **SAME | {"num_kv_blocks": 2})
