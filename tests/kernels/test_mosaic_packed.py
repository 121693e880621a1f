"""The packed product in Mosaic GPU: numbers, races and bytes in the interpreter, broken forms of it, and how its work is cut up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import interpreter, registers, tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.packed_matmul import OPERATION, PackedMatrix, mosaic, packed_matmul
from pallas_kernels.packed_matmul.mosaic import call, kernel, unpack
from pallas_kernels.packed_matmul.mosaic.config import MAX_GROUP, SWIZZLES, Config, Problem, cut, pick_config
from pallas_kernels.packed_matmul.specs import FP4_VALUES, MAX_ROW_ERROR, MOSAIC_SPECS, Spec, make_arguments
from tests.kernels import oracles

H200 = Device(kind="NVIDIA H200", num_cores=132)
SPECS = {spec.name: spec for spec in MOSAIC_SPECS}
PLAIN = Config(tile_m=8, num_warpgroups=1, row_blocks=1, tile_bytes=32, num_stages=2, num_spans=1, splits=True)
LONG = Spec(name="long", num_rows=3, num_outputs=72, num_inputs=512, zero=8, dtype="bfloat16")
"""Eight stages of the smallest size."""
LONG_ROWS = Spec(
    name="long_rows",
    num_rows=3,
    num_outputs=72,
    num_inputs=256,
    bits=8,
    group_size=0,
    codes="int8",
    scales="float32",
    dtype="bfloat16",
)


def smallest(spec: Spec) -> Config:
    """The smallest stages that hold a group, and two of them."""
    least = min(spec.group_size, MAX_GROUP) * spec.bits // 8
    return dataclasses.replace(PLAIN, tile_bytes=next(size for size in reversed(SWIZZLES) if size >= least))


def run(spec: Spec, config: Config | None, arguments: dict[str, Any] | None = None) -> tuple[np.ndarray, interpreter.Run]:
    """Interpreted, with memory that starts as NaN."""
    function = jax.jit(lambda kwargs: mosaic.packed_matmul(**kwargs, interpret=True, config=config))
    with interpreter.interpreted() as counted:
        result = np.asarray(function(jax.tree.map(jnp.asarray, arguments or make_arguments(spec))))
    return result, counted


def expected(spec: Spec) -> np.ndarray:
    return oracles.packed_matmul(**make_arguments(spec))


@pytest.mark.kernels
@pytest.mark.parametrize("name", SPECS)
def test_kernel_equals_the_oracle(name: str) -> None:
    """Codes are exact and sums are float32: the limit is that of the products in float32. Every format, sizes that fill no tile."""
    spec = SPECS[name]
    result, counted = run(spec, smallest(spec))
    assert row_error(result, expected(spec)) <= MAX_ROW_ERROR
    assert not counted.has_races
    for broken in (np.zeros_like(result), np.roll(result, 1, axis=-1)):
        assert row_error(broken, expected(spec)) > MAX_ROW_ERROR, "the comparison would accept a broken kernel"


CUTS = {
    "spans": dataclasses.replace(PLAIN, num_spans=2),
    "spans_in_one_block": dataclasses.replace(PLAIN, tile_m=16, num_spans=2, splits=False),
    "two_warpgroups": dataclasses.replace(PLAIN, num_warpgroups=2, num_stages=3),
    "two_row_blocks": dataclasses.replace(PLAIN, row_blocks=2, num_stages=3),
    "large_stages": dataclasses.replace(PLAIN, tile_bytes=128, num_stages=1),
}


@pytest.mark.kernels
@pytest.mark.parametrize("what", CUTS)
@pytest.mark.parametrize("spec", [LONG, LONG_ROWS], ids=lambda spec: spec.name)
def test_every_cut_gives_the_same_numbers(spec: Spec, what: str) -> None:
    """More rows than one tile where there are spans in one block, so that not all are whole."""
    spec = dataclasses.replace(spec, num_rows=20 if what == "spans_in_one_block" else spec.num_rows)
    result, counted = run(spec, CUTS[what])
    assert row_error(result, expected(spec)) <= MAX_ROW_ERROR
    assert not counted.has_races


@pytest.mark.kernels
def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Alone, first and last of seven, and whatever the others are."""
    spec = dataclasses.replace(LONG, num_rows=7)
    arguments = make_arguments(spec)
    together, _ = run(spec, None)
    alone, _ = run(spec, None, arguments | {"x": arguments["x"][6:]})
    np.testing.assert_array_equal(alone[0], together[6])
    turned, _ = run(spec, None, arguments | {"x": arguments["x"][::-1].copy()})
    np.testing.assert_array_equal(turned[::-1], together)


def test_what_decides_the_bits_does_not_depend_on_the_rows() -> None:
    """Spans, the codes that are summed before they are scaled, and therefore the order of all sums."""
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (576, 1536), (128256, 4096)):
        for bits, group_size in ((4, 32), (4, 128), (4, 256), (8, 0), (8, 32), (8, 128)):
            sizes = {"num_outputs": outputs, "num_inputs": inputs, "bits": bits, "group_size": group_size}
            configs = [pick_config(Problem(num_rows=rows, **sizes), H200) for rows in (1, 7, 16, 17, 64, 65, 256, 4096)]
            assert len({config.num_spans for config in configs}) == 1
            for config in configs:
                assert not group_size or config.tile_k(bits) % min(group_size, MAX_GROUP) == 0
                assert inputs % (config.tile_k(bits) * config.num_spans) == 0


def matrix_of(problem: Problem) -> PackedMatrix:
    """Shapes."""
    size, groups = (problem.num_outputs, problem.num_inputs), problem.num_inputs // problem.group_size if problem.group_size else 1
    codes = jax.ShapeDtypeStruct(size, jnp.int8)
    if problem.bits == 4:
        codes = jax.ShapeDtypeStruct((size[0], size[1] // 32, 16), jnp.uint8)
    numbers = jax.ShapeDtypeStruct((size[0], groups), jnp.float16)
    offsets = numbers if problem.has_offsets else None
    return PackedMatrix(codes=codes, scales=numbers, offsets=offsets, bits=problem.bits, group_size=problem.group_size)


@pytest.mark.parametrize("num_rows", [1, 8, 16, 33, 64, 100, 256, 4096])
def test_shared_memory_suffices(num_rows: int) -> None:
    """Of what the kernel allocates, at all sizes that are served; and copies are in flight."""
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (576, 1536), (3072, 576), (128256, 4096)):
        for bits, group_size, has_offsets in (
            (4, 32, False),
            (4, 32, True),
            (4, 128, False),
            (8, 0, False),
            (8, 32, False),
            (8, 128, False),
        ):
            if inputs % (group_size or 1):
                continue
            sizes = {"num_outputs": outputs, "num_inputs": inputs, "bits": bits, "group_size": group_size}
            problem = Problem(num_rows=num_rows, num_levels=1 + has_offsets, has_offsets=has_offsets, **sizes)
            matrix = matrix_of(problem)
            assert call.problem_of(num_rows, matrix) == problem
            config = pick_config(problem, H200)
            plan = call.make_plan(matrix, config)
            leaves = jax.tree.leaves(plan.scratch(), is_leaf=lambda leaf: hasattr(leaf, "memory_space"))
            arrays = [leaf for leaf in leaves if hasattr(leaf, "memory_space") and np.dtype(leaf.dtype).kind != "O"]
            assert len(arrays) >= 3
            used = sum(int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize for array in arrays)
            assert used <= MAX_SHARED_BYTES - 1024
            assert config.num_stages >= 2


def test_the_multiprocessors_are_kept_busy() -> None:
    """Nine tenths of 132 for the two projections that have too few outputs; one part where there are many."""
    sizes = {"num_rows": 1, "bits": 8, "group_size": 0}
    for outputs, inputs in ((6144, 4096), (4096, 4096), (4096, 14336)):
        warpgroups, spans = cut(Problem(num_outputs=outputs, num_inputs=inputs, **sizes), H200)
        blocks = -(-outputs // (64 * warpgroups)) * spans
        assert 0.9 <= blocks / 132 <= 1
    assert cut(Problem(num_outputs=128256, num_inputs=4096, **sizes), H200) == (4, 1)


def test_a_table_stands_in_for_the_rule_but_not_for_the_spans() -> None:
    problem = Problem(num_rows=5, num_outputs=4096, num_inputs=4096, bits=4, group_size=32)
    measured = dataclasses.asdict(dataclasses.replace(PLAIN, num_stages=7))
    with tuned.trying("packed_matmul", "w4", measured) as trial:
        assert pick_config(problem, H200) == dataclasses.replace(PLAIN, num_stages=7, num_spans=cut(problem, H200)[1])
    assert trial.keys == ["w4 m=8 n=4096 k=4096 group=32 levels=1"]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_order_of_activations_is_that_of_the_codes(bits: int) -> None:
    """Of a matrix whose codes say where they stand, every row unpacks to numbers in the order of the columns of x."""
    place = np.arange(64) % 16
    codes = place.astype(np.uint8)
    if bits == 4:
        runs = codes.reshape(2, 32)
        codes = (runs[:, :16] | (runs[:, 16:] << 4)).reshape(-1)
    words = jnp.asarray(np.tile(codes, (64, 1)).view(np.uint16))
    formula = unpack.unsigned4 if bits == 4 else unpack.unsigned8
    unpacked = jax.jit(lambda words: unpack.numbers(words, bits, formula, 0))
    with registers.modelling():
        numbers = np.asarray(unpacked(words), np.float32)
    x = jnp.asarray(place[None].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(numbers[5], np.asarray(unpack.in_order(x, bits), np.float32)[0])


@pytest.mark.parametrize(
    ("formula", "dtype", "factor"),
    [
        (unpack.signed8, "int8", 1.0),
        (unpack.unsigned8, "uint8", 1.0),
        (unpack.e4m3, "float8_e4m3fn", 2.0**8),
        (unpack.e2m1, "float4_e2m1fn", 4.0),
    ],
)
def test_every_code_is_exact(formula: unpack.Unpack, dtype: str, factor: float) -> None:
    """All 256 bytes in every place of a word, or all nibbles, beside other codes."""
    every = np.arange(256, dtype=np.uint8)
    bits = 4 if dtype == "float4_e2m1fn" else 8
    for neighbour in (0, 0x5A, 0xFF):
        pairs = np.stack([every, np.full_like(every, neighbour)], axis=-1)
        for place, column in ((0, 0), (16 // bits // 2, 1)):
            words = jnp.asarray(np.ascontiguousarray(pairs if column == 0 else pairs[:, ::-1]).view(np.uint16).reshape(16, 16))
            with registers.modelling():
                numbers = np.asarray(jax.jit(lambda words, place=place: formula(words, place, 0))(words), np.float64).reshape(-1)
            codes = every & 15 if bits == 4 else every
            expected = codes.view(getattr(ml_dtypes, dtype, dtype)).astype(np.float64) * factor
            is_number = np.isfinite(expected)
            np.testing.assert_array_equal(numbers[is_number], expected[is_number])


def test_the_table_of_lop3() -> None:
    """Bit 4 a + 2 b + c of it is the result for bits a, b and c: PTX ISA, lop3."""
    for index in range(8):
        a, b, c = index >> 2, index >> 1 & 1, index & 1
        assert registers.AND_OR >> index & 1 == (a & b) | c


@pytest.mark.parametrize("zero", [0, 8, 128])
def test_differences_to_zero_points_are_exact(zero: int) -> None:
    words = jnp.asarray(np.arange(65536, dtype=np.uint16).reshape(256, 256))
    for formula, bits in ((unpack.unsigned8, 8), (unpack.unsigned4, 4)):
        for place in range(16 // bits):
            codes = np.arange(65536) >> (bits * place) & ((1 << bits) - 1)
            with registers.modelling():
                numbers = np.asarray(jax.jit(lambda words, run=formula, place=place: run(words, place, zero))(words), np.float64)
            np.testing.assert_array_equal(numbers.reshape(-1), codes - zero)


def shifted_by_a_group(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, i, start, level: original(self, i, (start + level.group) % self.plan.tile_k, level)


def nothing(_: Callable[..., Any]) -> Callable[..., None]:
    return lambda *_: None


def swapped_nibbles(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda words, place, zero: original(words, place ^ 1, zero)


def next_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, i, row_block: original(self, i + 1, row_block)


BROKEN = {
    "codes are used before they are there": (kernel.Block, "wait_for_stage", nothing),
    "a stage is refilled while it is used": (kernel.Block, "wait_until_free", nothing),
    "groups have their neighbours' scales": (kernel.Block, "group_column", shifted_by_a_group),
    "low and high nibbles change places": (unpack, "unsigned4", swapped_nibbles),
    "codes are those of the next stage": (kernel.Block, "load_words", next_stage),
    "activations are not put in the order of the codes": (unpack, "in_order", lambda _: lambda x, bits: x),
    "a stage is given back without a fence": (kernel, "fence_reads", nothing),
}


@pytest.mark.kernels
@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers, by the detector of races, or by a barrier that fills up again before anybody has seen it full."""
    owner, name, broken = BROKEN[what]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    try:
        result, counted = run(LONG, CUTS["spans"])
    except Exception as error:
        assert "barrier" in str(error).lower()
        return
    assert counted.has_races or row_error(result, expected(LONG)) > 100 * MAX_ROW_ERROR


def test_the_automatic_choice_off_a_gpu_passes_it_over() -> None:
    name, refusals = OPERATION.choice(make_arguments(SPECS["symmetric"]), {})
    assert name in ("native", "xla")
    assert refusals[0] == "mosaic: needs a Hopper GPU (H100, H200), this is cpu"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "five bits": ({"bits": 5}, "4 or 8 bits"),
    "groups of 48": ({"num_inputs": 96, "group_size": 48}, "groups must be"),
    "another codebook": ({"codebook": tuple(float(i) for i in range(16))}, "codebook"),
    "an offset for a row": ({"group_size": 0, "has_offsets": True}, "whole row"),
    "zero points of int8": ({"bits": 8, "codes": "int8", "has_zeros": True}, "no zero point"),
    "a row that no copy takes": ({"num_inputs": 32}, "multiple of 32 bytes"),
    "float32": ({"dtype": "float32"}, "must be bfloat16"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    """With a reason, before anything is traced."""
    fields, reason = REFUSED[what]
    spec = dataclasses.replace(LONG, zero=0, **fields)
    with pytest.raises(UnsupportedByKernel, match=reason):
        packed_matmul(**make_arguments(spec), implementation="mosaic")


def test_levels_that_fill_no_stages_are_refused() -> None:
    """Four float32 scales of scales, the least that is copied, for 96 codes each, and stages of 256 codes."""
    spec = dataclasses.replace(LONG, num_inputs=768, scales="uint8", per_super=3)
    matrix = make_arguments(spec)["matrix"]
    assert call.make_plan(matrix, dataclasses.replace(PLAIN, tile_bytes=128)).levels["super_scales"].period == 3
    with pytest.raises(UnsupportedByKernel, match="4 super_scales for 96 codes each are no whole stages of 256"):
        wide = dataclasses.replace(matrix, super_scales=matrix.super_scales.astype(np.float32))
        call.make_plan(wide, dataclasses.replace(PLAIN, tile_bytes=128))


def test_codebooks_are_known_by_their_values() -> None:
    """e2m1 and twice it, which is how MXFP4 is stored."""
    matrix = make_arguments(SPECS["codebook"])["matrix"]
    config = smallest(SPECS["codebook"])
    assert call.make_plan(matrix, config).factor == 0.5
    halved = dataclasses.replace(matrix, codebook=tuple(value / 2 for value in FP4_VALUES))
    assert call.make_plan(halved, config).factor == 0.25
