"""write_kv against numpy, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.write_kv import OPERATION, mosaic, write_kv
from pallas_kernels.write_kv.specs import SPECS, Spec, make_arguments
from tests.kernels import oracles


def check_pools(written: tuple[Any, ...], arguments: dict[str, Any]) -> None:
    """Every slot, those that nobody wrote included; a dropped token or a wrong slot changes whole vectors."""
    for pool, expected in zip(written, oracles.write_kv(**arguments), strict=True):
        if expected is None:
            assert pool is None
        else:
            assert pool.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(pool).view(np.uint8), expected.view(np.uint8))
    assert (np.asarray(written[0]) != arguments["k_blocks"]).any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_pools_equal_the_oracle(spec: Spec) -> None:
    """XLA's scatter, jitted."""
    arguments = make_arguments(spec)
    check_pools(jax.jit(lambda kwargs: write_kv(**kwargs))(arguments), arguments)


def test_int8_rounds_half_to_even_and_zeros_have_scale_one() -> None:
    """Values chosen such that steps are exactly 1 and many lie in the middle between two."""
    halves = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 3.5, -127], np.float32)
    new = np.stack([halves, np.zeros(8, np.float32)])[:, None]
    empty = jnp.zeros((1, 2, 2, 8), jnp.int8), jnp.full((1, 2, 2), 9.0)
    blocks, _, scales, _ = write_kv(empty[0], None, jnp.asarray(new), None, jnp.array([2, 1]), empty[1])
    assert scales is not None
    np.testing.assert_array_equal(np.asarray(blocks)[0, 1, 0], [127, 0, 2, 2, 0, -2, 4, -127])
    np.testing.assert_array_equal(np.asarray(blocks)[0, 0, 1], np.zeros(8))
    np.testing.assert_array_equal(np.asarray(scales)[0], [[9, 1], [1, 9]])


def test_float8_rounds_half_to_even_and_stays_finite() -> None:
    """Scale 1; between 16 and 32 numbers are 2 apart, below 2 ** -6 they are 2 ** -9 apart. 448 is the largest."""
    new = np.array([448, 17, 19, -21, 0.0015, 0.0009, 447, -448], np.float32)[None, None]
    empty = jnp.zeros((1, 1, 1, 8), jnp.float8_e4m3fn), jnp.zeros((1, 1, 1))
    blocks, _, scales, _ = write_kv(empty[0], None, jnp.asarray(new), None, jnp.array([0]), empty[1])
    assert scales is not None and float(scales[0, 0, 0]) == 1
    np.testing.assert_array_equal(np.asarray(blocks).astype(np.float32).ravel(), [448, 16, 20, -20, 2**-9, 0, 448, -448])


def test_the_oracle_rounds_to_float8_as_ml_dtypes_does() -> None:
    """Every number that is half way between two, and its neighbours."""
    codes = np.arange(127, dtype=np.uint8)
    numbers = oracles.float8_e4m3fn(codes)
    halves = (numbers[1:] + numbers[:-1]).astype(np.float32) / 2
    probes = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(500))])
    for probe in (probes, -probes):
        np.testing.assert_array_equal(oracles.nearest_float8(probe), probe.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_tiny_vectors_are_zeros() -> None:
    """Below 2 ** -100 the inverse of the scale would leave float32."""
    new = np.full((1, 1, 8), 1e-38, np.float32)
    blocks, _, scales, _ = write_kv(jnp.ones((1, 1, 1, 8), jnp.int8), None, jnp.asarray(new), None, jnp.array([0]), jnp.zeros((1, 1, 1)))
    assert scales is not None and float(scales[0, 0, 0]) == 1 and not np.asarray(blocks).any()


def test_what_does_not_fit_is_refused() -> None:
    """One-byte pools and scales come together, keys and values too; shapes must fit."""
    arguments = make_arguments(next(spec for spec in SPECS if spec.name == "int8"))
    with pytest.raises(ValueError, match="int8 without scales"):
        write_kv(**arguments | {"k_scales": None})
    with pytest.raises(ValueError, match="float32 with scales"):
        write_kv(**arguments | {"v_blocks": arguments["v_blocks"].astype(np.float32)})
    with pytest.raises(ValueError, match=r"k_scales \(2, 8, 1\) must be \[K N S\]"):
        write_kv(**arguments | {"k_scales": arguments["k_scales"][:, :, :1]})
    with pytest.raises(ValueError, match=r"v \(16, 1, 64\) must be \[T K D\]"):
        write_kv(**arguments | {"v": arguments["v"][:, :1]})
    with pytest.raises(ValueError, match="v and v_blocks come together, got no v and v_blocks"):
        write_kv(**arguments | {"v": None})
    with pytest.raises(ValueError, match="v_scales must be None without v_blocks"):
        write_kv(**arguments | {"v": None, "v_blocks": None})


def test_config_fills_the_device_and_knows_its_limits() -> None:
    """A thread block per token until there are more tokens than multiprocessors."""
    device = Device(kind="NVIDIA H200", num_cores=132)
    sizes = {tokens: mosaic.pick_config(tokens, 8, device).tile_tokens for tokens in (1, 132, 263, 264, 4096)}
    assert sizes == {1: 1, 132: 1, 263: 1, 264: 2, 4096: 8}
    assert mosaic.pick_config(4096, 32, device).tile_tokens == 2
    with pytest.raises(UnsupportedByKernel, match="at most 64 KV heads on a device, got 65"):
        mosaic.pick_config(1, 65, device)
    assert (mosaic.columns(128, "bfloat16"), mosaic.columns(576, "int8"), mosaic.columns(80, "float32")) == (128, 96, 80)
    with pytest.raises(UnsupportedByKernel, match="multiple of 16 bytes, got 8 of int8"):
        mosaic.columns(8, "int8")
    with pytest.raises(UnsupportedByKernel, match="needs a Hopper GPU"):
        mosaic.write_kv(**make_arguments(SPECS[0]))
    int8 = make_arguments(Spec(name="int8", num_tokens=6, cache_dtype="int8"))
    with pytest.raises(UnsupportedByKernel, match=r"multiple of 8 as those of .*, got \(6, 2\)"):
        mosaic.write_kv(**int8, interpret=True, config=mosaic.Config(tile_tokens=4))
    with pytest.raises(UnsupportedByKernel, match="of 2 heads are more than 64 rows"):
        mosaic.write_kv(**int8, interpret=True, config=mosaic.Config(tile_tokens=33))


@pytest.mark.parametrize(("name", "chosen"), [("one_token", "mosaic"), ("bfloat16", "xla"), ("int8", "mosaic")])
def test_on_a_gpu_what_launches_least_is_chosen(name: str, chosen: str) -> None:
    """XLA fuses a scatter of floats with what makes them, unless there is one token."""
    arguments = make_arguments(next(spec for spec in SPECS if spec.name == name))
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
        assert OPERATION.choice(arguments, {})[0] == chosen
