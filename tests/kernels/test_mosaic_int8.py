"""The int8 product in Mosaic GPU: numbers, races and bytes in the interpreter, broken forms of it, and how its work is cut up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.common import interpreter, tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.int8_matmul import OPERATION, int8_matmul, mosaic
from pallas_kernels.int8_matmul.mosaic import CANDIDATES, Config, Shape, body, pick_config, quantize
from pallas_kernels.int8_matmul.mosaic.config import estimated_clocks, refusal
from pallas_kernels.int8_matmul.specs import MAX_ROW_ERROR, MOSAIC_SPECS, Spec, make_arguments, static_arguments
from tests.kernels import oracles

H200 = Device(kind="NVIDIA H200", num_cores=132)
SPECS = {spec.name: spec for spec in MOSAIC_SPECS}
PLAIN = Config(tile_columns=16, num_consumers=1, tile_k=128, num_stages=2)
WIDE = Config(tile_columns=32, num_consumers=2, tile_k=128, num_stages=3)
SPLIT = Config(tile_columns=16, num_consumers=1, tile_k=128, num_stages=2, num_splits=2)
LONG = Spec(name="long", num_rows=5, num_outputs=136, num_inputs=640, num_terms=2)
"""Three stages' worth of steps and more, for each of two splits."""


def limit(spec: Spec) -> float:
    return 1e-2 if spec.dtype == "bfloat16" else MAX_ROW_ERROR


def run(spec: Spec, config: Config | None, arguments: dict[str, Any] | None = None) -> tuple[np.ndarray, interpreter.Run]:
    """Interpreted, with memory that starts as NaN and the largest integers."""
    call = jax.jit(lambda kwargs: mosaic.int8_matmul(**kwargs, **static_arguments(spec), interpret=True, config=config))
    with interpreter.interpreted() as counted:
        result = np.asarray(call(arguments or make_arguments(spec)), np.float32)
    return result, counted


def expected(spec: Spec) -> np.ndarray:
    return oracles.int8_matmul(**make_arguments(spec), **static_arguments(spec))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "config"), [*((name, PLAIN) for name in SPECS), ("bias_silu_bfloat16", WIDE), ("two_tiles_of_rows", WIDE)]
)
def test_kernel_equals_the_oracle(name: str, config: Config) -> None:
    """Sizes that are no whole tiles of rows, outputs or inputs; one row; two terms; every kind of epilogue."""
    spec = SPECS[name]
    result, counted = run(spec, config)
    assert row_error(result, expected(spec)) <= limit(spec)
    assert not counted.has_races
    for broken in (np.zeros_like(result), np.roll(result, 1, axis=-1)):
        assert row_error(broken, expected(spec)) > limit(spec), "the comparison would accept a broken kernel"


@pytest.mark.kernels
def test_neither_other_rows_nor_the_cut_change_a_row() -> None:
    """Whatever is picked for a batch, a row has the bits that it has alone."""
    arguments = make_arguments(LONG)
    whole, counted = run(LONG, SPLIT)
    assert row_error(whole, expected(LONG)) <= MAX_ROW_ERROR
    assert not counted.has_races
    other_cut, counted = run(LONG, replace(WIDE, num_splits=1))
    assert not counted.has_races
    np.testing.assert_array_equal(other_cut, whole)
    alone, _ = run(LONG, None, arguments | {"x": arguments["x"][3:4]})
    np.testing.assert_array_equal(alone[0], whole[3])


@pytest.mark.kernels
def test_warpgroups_round_a_row_together() -> None:
    """A row for two of them, in pieces of several lengths; another of zeros."""
    x = np.random.default_rng(0).standard_normal((2, 6400)).astype(np.float32)
    x[1] = 0
    with interpreter.interpreted() as counted:
        terms, scales = quantize.quantize_rows(jax.numpy.asarray(x), 2, interpret=True)
    assert not counted.has_races
    assert quantize.num_warpgroups(x.shape[1]) == 2
    values = (np.asarray(terms[0], np.float64) + np.asarray(terms[1], np.float64) / 254) * np.asarray(scales, np.float64)[:, None]
    # Half a step of the second term, and what float32 loses of a quotient.
    assert np.abs(values - x).max() <= np.abs(x).max() / 127 / 254 * 0.51
    assert counted.bytes_read == x.nbytes
    assert counted.bytes_written == 2 * x.size + 4 * len(x)


@pytest.mark.kernels
def test_a_small_product_moves_little_more_than_the_weight() -> None:
    """Every block of 64 outputs reads the rounded row again."""
    spec = Spec(name="row", num_rows=1, num_outputs=128, num_inputs=256)
    _, counted = run(spec, PLAIN)
    rounded, vectors = spec.num_inputs, 4 * spec.num_outputs
    assert counted.bytes_read == spec.num_outputs * spec.num_inputs + 4 * spec.num_inputs + 2 * rounded + vectors + 2 * 4
    assert counted.bytes_written == rounded + 4 + 4 * spec.num_outputs


@pytest.mark.kernels
def test_the_operation_runs_it_by_name() -> None:
    """Off a GPU the automatic choice is XLA's product."""
    spec = SPECS["bias_gelu"]
    result = OPERATION(**make_arguments(spec), **static_arguments(spec), implementation="mosaic")
    assert row_error(np.asarray(result), expected(spec)) <= MAX_ROW_ERROR


def test_the_automatic_choice_off_a_gpu_is_xla() -> None:
    spec = SPECS["two_terms"]
    name, refusals = OPERATION.choice(make_arguments(spec), static_arguments(spec))
    assert name == "xla"
    assert refusals == ["mosaic: needs a Hopper GPU (H100, H200), this is cpu"]


def next_step(fetch: Callable[..., None]) -> Callable[..., None]:
    return lambda inputs, held, at, step, slot, plan: fetch(inputs, held, at, step + 1, slot, plan)


def next_outputs(fetch: Callable[..., None]) -> Callable[..., None]:
    return lambda inputs, held, at, plan: fetch(inputs, held, (at[0], at[1] + 8), plan)


def no_wait(_: Callable[..., None]) -> Callable[..., None]:
    return lambda *_: None


BROKEN = {
    "operands are used before they are there": (body, "wait_filled", no_wait),
    "a stage is refilled while it is used": (body, "wait_free", no_wait),
    "a stage is given back under a running product": (body, "wait_products", no_wait),
    "the sums of other blocks are not waited for": (body, "wait_splits", no_wait),
    "inputs are off by a step": (body, "fetch", next_step),
    "scales are those of other outputs": (body, "fetch_vectors", next_outputs),
    "the terms change places": (body, "combine", lambda combine: lambda terms: combine(terms[::-1])),
    "the largest input is taken for the one of largest magnitude": (
        quantize,
        "magnitudes",
        lambda _: lambda piece: piece.astype(np.float32),
    ),
}


@pytest.mark.kernels
@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers, by the detector of races, or by a barrier that fills up again before anybody has seen it full."""
    module, name, broken = BROKEN[what]
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    arguments = make_arguments(LONG)
    arguments["x"][0, 0] = -300
    try:
        result, counted = run(LONG, SPLIT, arguments)
    except jax.errors.JaxRuntimeError as failure:
        assert re.search(r"ValueError: .*[Bb]arrier .*phase \d", str(failure)), "a barrier that nobody, or not everybody, saw complete"
        return
    error = row_error(result, oracles.int8_matmul(**arguments, **static_arguments(LONG)))
    assert counted.has_races or error > MAX_ROW_ERROR


@pytest.mark.parametrize("num_terms", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 64, 100, 256, 1000, 4096])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (576, 1536), (768, 32)])
def test_what_is_picked_fits(num_rows: int, num_outputs: int, num_inputs: int, num_terms: int) -> None:
    shape = Shape(num_rows=num_rows, num_outputs=num_outputs, num_inputs=num_inputs, num_terms=num_terms)
    config = pick_config(shape, H200)
    assert refusal(config, shape) is None
    assert shape.shared_bytes(config) <= MAX_SHARED_BYTES
    assert config.num_stages >= 2
    assert config.tile_columns <= max(8 * num_terms, 2 * shape.num_columns)


def test_few_rows_read_the_weight_and_many_fill_the_tensor_cores() -> None:
    """The decoder's products of Llama-3-8B: what bounds each is what bounds the estimate of its configuration."""
    for num_outputs, num_inputs in ((6144, 4096), (28672, 4096), (4096, 14336)):
        few = Shape(num_rows=1, num_outputs=num_outputs, num_inputs=num_inputs)
        config = pick_config(few, H200)
        assert config.tile_columns == 8
        assert estimated_clocks(config, few, H200) <= 1.5 * num_outputs * num_inputs / 2700 + 6000
        many = replace(few, num_rows=4096, result_bytes=2)
        assert (pick_config(many, H200).tile_columns, pick_config(many, H200).num_consumers) == (256, 2)
        assert pick_config(many, H200).num_stages == 4


def test_multiprocessors_have_work() -> None:
    """256 rows and 4096 outputs are 32 of the largest tiles, for 132 multiprocessors."""
    shape = Shape(num_rows=256, num_outputs=4096, num_inputs=4096)
    assert shape.num_blocks(pick_config(shape, H200)) >= 96


def test_a_measured_configuration_goes_first() -> None:
    shape = Shape(num_rows=3, num_outputs=4096, num_inputs=4096, num_terms=2)
    with tuned.trying("int8_matmul", "int8_matmul", asdict(SPLIT)) as trial:
        assert pick_config(shape, H200) == SPLIT
    assert trial.keys == ["int8_matmul rows=4 outputs=4096 inputs=4096 terms=2 result_bytes=4"]


def test_every_candidate_fits_some_shape() -> None:
    shape = Shape(num_rows=4096, num_outputs=4096, num_inputs=4096, result_bytes=2)
    assert [config for config in CANDIDATES if refusal(config, shape)] == []


@pytest.mark.parametrize(
    ("sizes", "config", "reason"),
    [
        ({"num_inputs": 50}, None, "inputs must be a multiple of 32, got 50"),
        ({"num_outputs": 33}, None, "outputs must be a multiple of 8, got 33"),
        ({}, replace(PLAIN, num_splits=4), "64 inputs are 1 steps, too few for 4 splits"),
        ({}, replace(PLAIN, tile_columns=72), "rows of a tile must be a multiple of 8, beyond 64 of 64, .* got 72"),
        ({}, replace(PLAIN, num_stages=100), "at most 232448"),
    ],
)
def test_what_copies_cannot_take_is_refused(sizes: dict[str, int], config: Config | None, reason: str) -> None:
    spec = Spec(**{"name": "refused", "num_rows": 3, "num_outputs": 64, "num_inputs": 64} | sizes)
    with pytest.raises(UnsupportedByKernel, match=reason):
        mosaic.int8_matmul(**make_arguments(spec), interpret=True, config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "activation must be one of silu, gelu, gelu_tanh, got 'relu'"),
        ({"bias": np.zeros(3, np.float32)}, r"bias must be \(64,\) as weight_scale is, got \(3,\)"),
    ],
)
def test_epilogues_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = make_arguments(Spec(name="refused", num_rows=3, num_outputs=64, num_inputs=64))
    with pytest.raises(ValueError, match=message):
        int8_matmul(**arguments, **options)


@pytest.mark.parametrize(
    ("num_inputs", "warpgroups"), [(128, 1), (4096, 1), (8192, 2), (11008, 2), (14336, 4), (28672, 7), (576, None), (65536, None)]
)
def test_warpgroups_share_a_row_evenly(num_inputs: int, warpgroups: int | None) -> None:
    assert quantize.num_warpgroups(num_inputs) == warpgroups
