"""What the goldens do not show of latent attention: the bits of its products, and the growth of scores."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxinfer.layers.latent_attention import _absorb, _values, latent_scale
from jaxinfer.layers.rope import LinearScaling, Rope, YarnScaling

NUM_HEADS, NARROW, RANK = 4, 16, 32


@pytest.mark.parametrize(
    ("product", "num_in", "formula"), [(_absorb, NARROW, "thn,hnr->thr"), (_values, RANK, "thr,hnr->thn")], ids=["absorb", "values"]
)
def test_each_head_has_its_own_matrix_and_a_token_its_own_bits(product: Callable[..., jax.Array], num_in: int, formula: str) -> None:
    """Against numpy float64; 64 tokens together, and eight at a time."""
    draws = np.random.default_rng(0)
    x = draws.standard_normal((64, NUM_HEADS, num_in)).astype(np.float32)
    matrices = draws.standard_normal((NUM_HEADS, NARROW, RANK)).astype(np.float32)
    run = jax.jit(product)
    together = np.asarray(run(x, matrices))
    np.testing.assert_allclose(together, np.einsum(formula, x.astype(np.float64), matrices.astype(np.float64)), atol=1e-5)
    for start in range(0, 64, 8):
        np.testing.assert_array_equal(np.asarray(run(x[start : start + 8], matrices)), together[start : start + 8])


def test_scores_grow_with_the_context_where_the_rotation_does_not() -> None:
    """DeepSeek-V2-Lite: a factor of 40 and mscale_all_dim 0.707 make 0.1 * 0.707 * ln(40) + 1 = 1.2608, squared."""
    yarn = YarnScaling(
        factor=40.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0, is_truncated=True, magnitude=1.0, mscale_all_dim=0.707
    )
    assert latent_scale(192, Rope(theta=1e4, size=64, scaling=yarn)) == pytest.approx(1.26080**2 / 192**0.5, rel=1e-4)
    for scaling in (None, LinearScaling(factor=40.0)):
        assert latent_scale(192, Rope(theta=1e4, size=64, scaling=scaling)) == 192**-0.5
