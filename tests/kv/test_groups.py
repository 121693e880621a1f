from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec

TENSORS = (KVTensorSpec(name="key", num_heads=1, head_dim=8, dtype="float32"),)
WINDOWS = (None, 1, 2, 3, 4, 8, 31, 32, 33)


def group(window: int | None) -> KVGroupSpec:
    return KVGroupSpec(kind="full" if window is None else "window", window=window, layers=(0,), tensors=TENSORS)


def seen_blocks(window: int | None, start: int, end: int, block_size: int) -> set[int]:
    """By definition: blocks with a position that a token at start..end-1 attends to."""
    return {key // block_size for position in range(start, end) for key in range(position + 1) if window is None or key > position - window}


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", WINDOWS)
def test_block_arithmetic_is_what_attention_sees(window, block_size):
    spec, horizon = group(window), 80
    for start in range(horizon):
        assert spec.num_dead_blocks(start, block_size) == min(seen_blocks(window, start, start + 40, block_size))
    # Needed: exactly the worst moment of a long sequence computed in steps of up to a block that begin anywhere.
    worst = max(len(seen_blocks(window, start, start + block_size, block_size)) for start in range(horizon - block_size))
    assert spec.num_blocks_for(horizon, block_size) == (horizon // block_size if window is None else worst)
    for num_tokens in (1, block_size, block_size + 1):
        assert spec.num_blocks_for(num_tokens, block_size) <= len(seen_blocks(None, 0, num_tokens, block_size))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_longest_sequence_is_where_decoding_one_by_one_runs_out(window, block_size):
    for num_blocks in (1, 2, 3, 9, 33):
        horizon = (num_blocks + 1) * block_size + 2 * (window or 0)
        keys = [range(0 if window is None else max(0, p - window + 1), p + 1) for p in range(horizon)]
        fits = [seen[-1] // block_size - seen[0] // block_size + 1 <= num_blocks for seen in keys]
        assert group(window).max_tokens(num_blocks, block_size) == (None if all(fits) else fits.index(False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sliding"}, "full, window or latent, got 'sliding'"),
        ({"layers": ()}, "at least one layer"),
        ({"kind": "window"}, "window >= 1 exactly when"),
        ({"kind": "window", "window": 0}, "window >= 1 exactly when"),
        ({"kind": "latent", "window": 4}, "window >= 1 exactly when"),
    ],
)
def test_a_wrong_group_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        KVGroupSpec(**({"kind": "full", "layers": (0,), "tensors": TENSORS} | changes))
