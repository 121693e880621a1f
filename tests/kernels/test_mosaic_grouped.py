"""The Mosaic GPU forms of the grouped product in the interpreter: numbers, races, bytes; and broken forms, which must be noticed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import interpreter
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.grouped_matmul import OPERATION, mosaic, specs
from pallas_kernels.grouped_matmul.mosaic import Config
from pallas_kernels.grouped_matmul.specs import Spec, make_arguments
from pallas_kernels.packed_matmul import PackedMatrix
from pallas_kernels.packed_matmul import specs as packed_specs
from pallas_kernels.packed_matmul.mosaic import grouped
from tests.kernels import oracles
from tests.kernels.test_grouped_matmul import oracle

H200 = Device(kind="NVIDIA H200", num_cores=132)
SPECS = [spec for spec in specs.SPECS if spec.dtype == "bfloat16"]
FORMATS = (
    packed_specs.Spec(name="int8_rows", num_rows=8, num_outputs=64, num_inputs=128, bits=8, group_size=0, codes="int8", scales="float32"),
    packed_specs.Spec(name="int4_groups", num_rows=8, num_outputs=96, num_inputs=128, has_offsets=True),
    packed_specs.Spec(name="codebook", num_rows=8, num_outputs=64, num_inputs=128, scales="bfloat16", codebook=packed_specs.FP4_VALUES),
)
TILE_EXPERT = np.array([0, 2, 2, 3], np.int32)
"""Of three experts; the last tile is empty."""


def run(arguments: dict[str, Any], config: Config) -> tuple[np.ndarray, interpreter.Run]:
    """Interpreted, with memory that starts as NaN."""
    with interpreter.interpreted() as counted:
        output = np.asarray(jax.jit(lambda kwargs: mosaic.grouped_matmul(**kwargs, interpret=True, config=config))(arguments))
    return output, counted


@pytest.mark.kernels
@pytest.mark.parametrize("config", [Config(num_consumers=1, num_stages=2), Config(num_consumers=2, num_stages=3)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_equals_the_oracle(spec: Spec, config: Config) -> None:
    """With edges that are no whole tiles, an expert without rows and a tile without an expert."""
    arguments = make_arguments(spec)
    output, counted = run(arguments, config)
    expected = oracle(**arguments)
    assert row_error(output, expected) <= specs.MAX_ROW_ERROR
    assert not output[-spec.num_empty :].any()
    assert not counted.has_races
    for broken in (np.zeros_like(output), np.roll(output, 1, axis=-1)):
        assert row_error(broken, expected) > 0.1, "the comparison would accept a broken kernel"


@pytest.mark.kernels
def test_each_expert_is_read_once_for_a_tile_and_empty_tiles_read_nothing() -> None:
    """Three tiles, two column tiles of 128: rows twice, weights once, and who the expert is from every warpgroup."""
    spec = Spec(name="bytes", tiles=(0, 2, 1), num_empty=1, num_outputs=256, num_inputs=128, dtype="bfloat16")
    _, counted = run(make_arguments(spec), Config(num_consumers=2, num_stages=2))
    assert counted.bytes_read == 3 * 2 * (256 * 128 + 2 * 8 * 128) + 4 * 2 * 3 * 4
    assert counted.bytes_written == 4 * 8 * 256 * 4


@pytest.mark.kernels
def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Its tile alone, and beside others."""
    arguments, config = make_arguments(SPECS[1]), Config(num_consumers=2, num_stages=2)
    together, _ = run(arguments, config)
    alone, _ = run(arguments | {"x": arguments["x"][2:3], "tile_expert": arguments["tile_expert"][2:3]}, config)
    np.testing.assert_array_equal(alone[0], together[2])


@pytest.mark.kernels
def test_the_operation_runs_it_by_name() -> None:
    arguments = make_arguments(SPECS[1])
    assert row_error(np.asarray(OPERATION(**arguments, implementation="mosaic")), oracle(**arguments)) <= specs.MAX_ROW_ERROR


@pytest.mark.kernels
@pytest.mark.parametrize("seam", ["wait_filled", "wait_free", "wait_products"])
def test_a_wait_that_is_left_out_is_noticed(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a stage to be there, to be free, and for a product to be done with it: a race, or a barrier that nobody saw complete."""
    monkeypatch.setattr(mosaic, seam, lambda *arguments: None)
    spec = Spec(name="race", tiles=(1, 1), num_outputs=64, num_inputs=384, dtype="bfloat16")
    try:
        _, counted = run(make_arguments(spec), Config(num_consumers=1, num_stages=2))
    except jax.errors.JaxRuntimeError as failure:
        assert re.search(r"ValueError: .*[Bb]arrier .*phase \d", str(failure)), "a barrier that nobody, or not everybody, saw complete"
        return
    assert counted.has_races


@pytest.mark.kernels
def test_the_neighbours_expert_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of experts differ in size too."""
    monkeypatch.setattr(mosaic, "expert_of", lambda tile_expert, tile: tile_expert[jnp.maximum(tile - 1, 0)])
    arguments = make_arguments(SPECS[1])
    output, _ = run(arguments, Config(num_consumers=1, num_stages=2))
    assert row_error(output, oracle(**arguments)) > 0.1


def stacked(spec: packed_specs.Spec) -> tuple[np.ndarray, PackedMatrix, np.ndarray]:
    """Four tiles of rows, three matrices, and the product in float64."""
    matrices = [packed_specs.make_matrix(spec, np.random.default_rng(seed)) for seed in range(3)]
    x = np.random.default_rng(3).standard_normal((4, spec.num_rows, spec.num_inputs)).astype(jnp.bfloat16)
    expected = np.zeros((4, spec.num_rows, spec.num_outputs))
    for tile, expert in enumerate(TILE_EXPERT[:3]):
        expected[tile] = oracles.packed_matmul(x[tile], matrices[expert])
    return x, jax.tree.map(lambda *leaves: np.stack(leaves), *matrices), expected


def run_packed(x: np.ndarray, matrices: PackedMatrix) -> tuple[np.ndarray, interpreter.Run]:
    """Interpreted, with memory that starts as NaN."""
    with interpreter.interpreted() as counted:
        call = jax.jit(lambda *arguments: grouped.grouped_packed_matmul(*arguments, interpret=True))
        output = np.asarray(call(x, matrices, TILE_EXPERT))
    return output, counted


@pytest.mark.kernels
@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_packed_matrices_equal_the_oracle(spec: packed_specs.Spec) -> None:
    """Each expert's codes and scales."""
    x, matrices, expected = stacked(spec)
    output, counted = run_packed(x, matrices)
    assert row_error(output, expected) <= packed_specs.MAX_ROW_ERROR
    assert not output[3].any()
    assert not counted.has_races
    assert row_error(np.zeros_like(output), expected) > 0.1


@pytest.mark.kernels
def test_a_packed_neighbour_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "expert_of", lambda tile_expert, tile: tile_expert[jnp.maximum(tile - 1, 0)])
    x, matrices, expected = stacked(FORMATS[0])
    assert row_error(run_packed(x, matrices)[0], expected) > 0.1


def test_config_fills_the_device_and_fits_into_it() -> None:
    """One token has too few blocks of two warpgroups; what many tokens take must leave room for two blocks."""
    assert mosaic.pick_config(8, 8, 1536, 2048, H200).num_consumers == 1
    for num_tiles, tile_rows in ((8, 8), (144, 8), (248, 16), (638, 64), (320, 128), (160, 256)):
        for num_outputs, num_inputs in ((1536, 2048), (2048, 768)):
            config = mosaic.pick_config(num_tiles, tile_rows, num_outputs, num_inputs, H200)
            assert config.num_stages >= 3
            assert mosaic.shared_bytes(config, tile_rows) * (2 if tile_rows <= 64 else 1) <= 232_448
    for tile_rows in (0, 4, 12, 96, 512):
        with pytest.raises(UnsupportedByKernel, match=f"got {tile_rows}$"):
            mosaic.pick_config(8, tile_rows, 1536, 2048, H200)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    """Off a GPU all of it; else dtypes and sizes."""
    arguments = make_arguments(SPECS[0])
    with pytest.raises(UnsupportedByKernel, match="needs a Hopper GPU"):
        mosaic.grouped_matmul(**arguments)
    with pytest.raises(UnsupportedByKernel, match="got float32 and bfloat16"):
        mosaic.grouped_matmul(**arguments | {"x": arguments["x"].astype(np.float32)}, interpret=True)
    with pytest.raises(UnsupportedByKernel, match="inputs must be a multiple of 16 and outputs of 8, got 204 and 104"):
        mosaic.grouped_matmul(arguments["x"][..., 4:], arguments["weight"][..., 4:], arguments["tile_expert"], interpret=True)
    x, matrices, _ = stacked(FORMATS[0])
    with pytest.raises(UnsupportedByKernel, match="power of two from 8 on, got 4"):
        grouped.grouped_packed_matmul(x[:, :4], matrices, TILE_EXPERT, interpret=True)
