from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kv.costs import CopyCosts, break_even_tokens
from jaxinfer.kv.groups import ceil_div

SECONDS = st.fractions(0, 4, max_denominator=8)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.integers(1, 5))
def test_copying_is_cheaper_from_there_on_and_not_one_token_before(fixed, per_block, per_token, prefill_fixed, block_size):
    copy = CopyCosts(fixed, per_block)
    found = break_even_tokens(copy, per_token, prefill_fixed, block_size)
    if per_block >= per_token * block_size:
        assert found is None
        return
    # All costs are multiples of 1 / 840 and a block saves at least that much, from a difference of at most 4 + 4 * 5 seconds.
    saved = per_token * block_size - per_block
    horizon = int((4 + 4 * block_size) / saved + 2) * block_size
    is_cheaper = [fixed + per_block * ceil_div(n, block_size) < prefill_fixed + per_token * n for n in range(1, horizon)]
    assert found == len(is_cheaper) - next((i for i, cheaper in enumerate(reversed(is_cheaper)) if not cheaper), len(is_cheaper)) + 1


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (CopyCosts(0.0, 0.0), 1),
        (CopyCosts(0.5, 0.0), 51),  # 0.01 s a token
        (CopyCosts(0.5, 0.16), None),  # a block costs what its 16 tokens cost
        (CopyCosts(0.5, 0.20), None),
    ],
)
def test_the_ends(copy, expected):
    assert break_even_tokens(copy, 0.01, 0.0, 16) == expected


def test_a_round_trip_costs_both_ways():
    both = CopyCosts(1.0, 0.25) + CopyCosts(2.0, 0.5)
    assert both == CopyCosts(3.0, 0.75)
    assert both.seconds(4) == 6.0
