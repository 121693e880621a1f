"""The Mosaic GPU form of write_kv in the interpreter: bits, races, bytes; and broken forms of it, which must be noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import interpreter
from pallas_kernels.write_kv import OPERATION, mosaic
from pallas_kernels.write_kv.mosaic import Config
from pallas_kernels.write_kv.specs import SPECS, Spec, make_arguments
from tests.kernels import oracles
from tests.kernels.test_write_kv import check_pools

pytestmark = pytest.mark.kernels

SMALL = {spec.name: replace(spec, num_tokens=min(spec.num_tokens, 5)) for spec in SPECS}


def run(arguments: dict[str, Any], tile_tokens: int) -> tuple[tuple[Any, ...], interpreter.Run]:
    """Interpreted, with memory that starts as NaN; the pools are donated."""
    pools = {name: jnp.asarray(array) for name, array in arguments.items() if "_" in name and name != "slot_mapping" and array is not None}
    rest = {name: array for name, array in arguments.items() if name not in pools}
    call = jax.jit(
        lambda pools, rest: mosaic.write_kv(**pools, **rest, interpret=True, config=Config(tile_tokens=tile_tokens)), donate_argnums=0
    )
    with interpreter.interpreted() as counted:
        written = jax.block_until_ready(call(pools, rest))
    return written, counted


@pytest.mark.parametrize("tile_tokens", [1, 3])
@pytest.mark.parametrize("name", SMALL)
def test_pools_equal_the_oracle(name: str, tile_tokens: int) -> None:
    """With a tile of 3 the last one is partly empty."""
    arguments = make_arguments(SMALL[name])
    written, counted = run(arguments, tile_tokens)
    check_pools(written, arguments)
    assert not counted.has_races


def test_the_operation_runs_it_by_name() -> None:
    """Off a GPU the automatic choice is XLA's scatter."""
    arguments = make_arguments(SMALL["bfloat16"])
    check_pools(OPERATION(**arguments, implementation="mosaic"), arguments)
    assert OPERATION.choice(arguments, {})[0] == "xla"


def test_bytes_are_those_of_the_vectors_and_their_slots() -> None:
    """Nothing of the pool is read, and what is written is as many vectors as have a slot."""
    spec = SMALL["int8"]
    _, counted = run(make_arguments(spec), tile_tokens=1)
    vectors = 2 * spec.num_tokens * spec.num_heads
    assert counted.bytes_read == vectors * spec.head_dim * 2 + 2 * spec.num_tokens * 4
    assert counted.bytes_written == 2 * (spec.num_tokens - 1) * spec.num_heads * (spec.head_dim + 4)


def test_tokens_in_one_slot_leave_the_other_slots_alone() -> None:
    """As padding tokens do in the trash block."""
    arguments = make_arguments(Spec(name="padding", num_tokens=5))
    arguments["slot_mapping"] = np.array([9, 0, 0, 0, 30], np.int32)
    written, _ = run(arguments, tile_tokens=4)
    expected = oracles.write_kv(**arguments)
    for pool, wanted in zip(written[:2], expected[:2], strict=True):
        assert wanted is not None
        np.testing.assert_array_equal(np.asarray(pool).reshape(2, 32, -1)[:, 1:], wanted.reshape(2, 32, -1)[:, 1:])


def test_a_donated_pool_is_written_where_it_lies() -> None:
    """The program's result takes over the argument's memory and nothing of the pool's size is allocated beside it."""
    arguments = make_arguments(SMALL["float8"])
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arguments.items()}
    donated = {name: shapes.pop(name) for name in ("k_blocks", "v_blocks", "k_scales", "v_scales")}
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda donated, rest: mosaic.write_kv(**donated, **rest, interpret=True), donate_argnums=0).trace(donated, shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    assert call.count("output_operand_alias<") == 4
    assert text.count("tf.aliasing_output") == 4


@pytest.mark.parametrize("name", ["bfloat16", "float8"])
def test_a_slot_off_by_one_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, so every place counts."""
    place_of = mosaic.place_of
    monkeypatch.setattr(mosaic, "place_of", lambda slot, block_size: place_of(jnp.maximum(slot - 1, 0), block_size))
    arguments = make_arguments(SMALL[name])
    written, _ = run(arguments, tile_tokens=1)
    with pytest.raises(AssertionError, match="not equal"):
        check_pools(written, arguments)


@pytest.mark.parametrize(("name", "seam"), [("bfloat16", "wait_for"), ("int8", "wait_for"), ("int8", "publish")])
def test_a_wait_that_is_left_out_is_a_race(name: str, seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the copy that brings the vectors, and for the rounded numbers to be seen by the copy that takes them away."""
    monkeypatch.setattr(mosaic, seam, lambda *arrived: None)
    _, counted = run(make_arguments(SMALL[name]), tile_tokens=3)
    assert counted.has_races
