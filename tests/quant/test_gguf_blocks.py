"""GGUF blocks kept packed: the values of the gguf library, bit for bit, in hardly more bytes than the file's."""

from __future__ import annotations

import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.quant import gguf_blocks
from pallas_kernels.common.compare import row_error

Kind = GGMLQuantizationType
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4, Kind.IQ4_NL, Kind.IQ4_XS)
HALVES = {Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.MXFP4: ()}
NUM_INPUTS = 512
MAX_BYTES = 1.06


def random_blocks(kind: Kind, *rows: int, largest: float = 1e4) -> np.ndarray:
    """Random bytes, but for the halves, which are finite: of both signs, and denormal now and then."""
    draws = np.random.default_rng(int(kind))
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = draws.integers(0, 256, (*rows, NUM_INPUTS // block_size, block_bytes)).astype(np.uint8)
    for start in HALVES.get(kind, (0,)):
        halves = 10 ** draws.uniform(-7, np.log10(largest), blocks.shape[:-1]) * draws.choice([-1, 1], blocks.shape[:-1])
        blocks[..., start : start + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[..., 0] = draws.choice([0, 1, 2, 120, 127, 140, 200], blocks.shape[:-1])
    return blocks.reshape(*rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_the_librarys(kind: Kind) -> None:
    stored = random_blocks(kind, 40)
    packed = gguf_blocks.pack(kind, stored)
    assert packed is not None
    np.testing.assert_array_equal(packed.dequantize(), gguf.quants.dequantize(stored, kind))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) <= MAX_BYTES * stored.nbytes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_those_of_the_librarys_values(kind: Kind) -> None:
    stored = random_blocks(kind, 37, largest=1e-2)
    if kind == Kind.MXFP4:  # of sizes that can be added to each other
        stored = stored.reshape(37, -1, 17)
        stored[..., 0] = stored[..., 0] % 8 + 120
        stored = stored.reshape(37, -1)
    packed = jax.tree.map(jnp.asarray, gguf_blocks.pack(kind, stored))
    floats = gguf.quants.dequantize(stored, kind).astype(np.float64)
    x = np.random.default_rng(0).standard_normal((5, NUM_INPUTS)).astype(np.float32)
    output = np.asarray(packed.matmul(jnp.asarray(x)))
    assert row_error(output, x @ floats.T) <= 1e-6
    np.testing.assert_allclose(np.asarray(packed.rows(jnp.array([3, 40, 0], jnp.int32))), [floats[3], 0 * floats[0], floats[0]], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stacks_and_cut_rows(kind: Kind) -> None:
    """Experts lie on a first axis; rows are cut, joined and reordered array by array."""
    stored = random_blocks(kind, 3, 8)
    stack = gguf_blocks.pack(kind, stored)
    assert stack is not None
    floats = gguf.quants.dequantize(stored.reshape(24, -1), kind).reshape(3, 8, NUM_INPUTS)
    np.testing.assert_array_equal(stack.dequantize(), floats)
    order = np.array([7, 0, 3, 3])
    cut = jax.tree.map(lambda leaf: leaf[1][order], stack)
    np.testing.assert_array_equal(cut.dequantize(), floats[1][order])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [(8,), (3, 8)], ids=str)
def test_abstract_is_what_pack_gives(kind: Kind, rows: tuple[int, ...]) -> None:
    packed, struct = gguf_blocks.pack(kind, random_blocks(kind, *rows)), gguf_blocks.abstract(kind, (*rows, NUM_INPUTS))
    assert jax.tree.structure(packed) == jax.tree.structure(struct)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(packed)] == [(b.shape, b.dtype) for b in jax.tree.leaves(struct)]


def test_what_is_not_kept_packed() -> None:
    for kind in (Kind.F16, Kind.Q2_K, Kind.IQ2_XXS):
        assert gguf_blocks.pack(kind, np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)) is None
        assert gguf_blocks.abstract(kind, (4, 256)) is None
    assert gguf_blocks.abstract(Kind.Q4_K, (4, 128)) is None, "half a block"
