"""write_kv against numpy, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.write_kv import write_kv
from pallas_kernels.write_kv.specs import SPECS, Spec, make_arguments
from tests.kernels import oracles


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_pools_equal_the_oracle(spec: Spec) -> None:
    """Every slot, those that nobody wrote included; a dropped token or a wrong slot changes whole vectors."""
    arguments = make_arguments(spec)
    blocks, scales = jax.jit(lambda kwargs: write_kv(**kwargs))(arguments)
    expected_blocks, expected_scales = oracles.write_kv(**arguments)
    assert (np.asarray(blocks) != arguments["blocks"]).any() and blocks.dtype == arguments["blocks"].dtype
    np.testing.assert_array_equal(np.asarray(blocks), expected_blocks)
    if expected_scales is None:
        assert scales is None
    else:
        np.testing.assert_array_equal(np.asarray(scales), expected_scales)


def test_int8_rounds_half_to_even_and_zeros_have_scale_one() -> None:
    """Values chosen such that steps are exactly 1 and many lie in the middle between two."""
    halves = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 3.5, -127], np.float32)
    new = np.stack([halves, np.zeros(8, np.float32)])[:, None]
    empty = jnp.zeros((1, 2, 2, 8), jnp.int8), jnp.full((1, 2, 2), 9.0)
    blocks, scales = write_kv(empty[0], jnp.asarray(new), jnp.array([2, 1]), empty[1])
    assert scales is not None
    np.testing.assert_array_equal(np.asarray(blocks)[0, 1, 0], [127, 0, 2, 2, 0, -2, 4, -127])
    np.testing.assert_array_equal(np.asarray(blocks)[0, 0, 1], np.zeros(8))
    np.testing.assert_array_equal(np.asarray(scales)[0], [[9, 1], [1, 9]])


def test_int8_pools_and_scales_come_together() -> None:
    """Scales say that the pool is int8, and the reverse; shapes must fit."""
    arguments = make_arguments(next(spec for spec in SPECS if spec.name == "int8"))
    with pytest.raises(ValueError, match="int8 without scales"):
        write_kv(**arguments | {"scales": None})
    with pytest.raises(ValueError, match="float32 with scales"):
        write_kv(**arguments | {"blocks": arguments["blocks"].astype(np.float32)})
    with pytest.raises(ValueError, match=r"must be \[K N S\]"):
        write_kv(**arguments | {"scales": arguments["scales"][:, :, :1]})
    with pytest.raises(ValueError, match=r"must be \[T K D\]"):
        write_kv(**arguments | {"new": arguments["new"][:, :1]})
