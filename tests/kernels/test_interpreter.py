"""What the interpreter is taught: products from registers, accumulators that are stored, races with products, counted bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import interpreter, mosaic
from pallas_kernels.common.dispatch import UnsupportedByKernel

pytestmark = pytest.mark.kernels

TILE, NUM_STAGES = 64, 2
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def product_kernel(a: Any, b: Any, out: Any, a_stages: Any, b_stages: Any, out_tile: Any, arrived: Any, *, num_steps: int, variant: str):
    """A product of [64 K] and [K N]: one block per 64 columns, two stages; `variant` names what is different or wrong."""
    column = lax.axis_index("column")

    def fetch(step: Any, stage: Any) -> None:
        inner = pl.ds(step * TILE, TILE)
        plgpu.copy_gmem_to_smem(a.at[:, inner], a_stages.at[stage], arrived.at[stage])
        plgpu.copy_gmem_to_smem(b.at[inner, pl.ds(column * TILE, TILE)], b_stages.at[stage], arrived.at[stage])

    def refill(step: Any, stage: Any) -> None:
        pl.when(step + NUM_STAGES < num_steps)(lambda: fetch(step + NUM_STAGES, stage))

    def from_registers(acc: Any, stage: Any) -> Any:
        left = a_stages[stage]
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, left, b_stages.at[stage]))(plgpu.ACC.init(acc))
        if variant != "read without commit":
            plgpu.commit_smem()
        return acc

    def from_shared_memory(acc: Any, step: Any, stage: Any) -> Any:
        def multiply(ref: Any) -> Any:
            ref[...] = acc
            plgpu.wgmma(ref, a_stages.at[stage], b_stages.at[stage])
            if variant == "refilled under the product":
                refill(step, stage)
            plgpu.wgmma_wait(0)
            return ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))

    def multiply_step(step: Any, acc: Any) -> Any:
        stage = lax.rem(step, jnp.int32(NUM_STAGES))
        if variant != "no wait":
            plgpu.barrier_wait(arrived.at[stage])
        is_register = variant in ("registers", "read without commit")
        acc = from_registers(acc, stage) if is_register else from_shared_memory(acc, step, stage)
        if variant != "refilled under the product":
            refill(step, stage)
        return acc

    for stage in range(NUM_STAGES):
        fetch(stage, stage)
    zeros = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), plgpu.Layout.WGMMA)
    out_tile[...] = lax.fori_loop(0, num_steps, multiply_step, zeros)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_tile, out.at[:, pl.ds(column * TILE, TILE)])
    plgpu.wait_smem_to_gmem(0)


def product(a: np.ndarray, b: np.ndarray, variant: str, *, interpret: bool = True) -> jax.Array:
    """a @ b in float32."""
    stages = plgpu.SMEM((NUM_STAGES, TILE, TILE), a.dtype, transforms=SWIZZLED)
    return mosaic.kernel(
        partial(product_kernel, num_steps=a.shape[1] // TILE, variant=variant),
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((TILE, b.shape[1]), jnp.float32),
        grid=(b.shape[1] // TILE,),
        grid_names=("column",),
        scratch_types=[stages, stages, plgpu.SMEM((TILE, TILE), jnp.float32), plgpu.Barrier(num_arrivals=2, num_barriers=NUM_STAGES)],
    )(jnp.asarray(a), jnp.asarray(b))


@pytest.fixture
def factors() -> tuple[np.ndarray, np.ndarray]:
    """[64 256] and [256 128]: four steps, two blocks."""
    draws = np.random.default_rng(0)
    return tuple(draws.standard_normal(shape).astype(jnp.bfloat16) for shape in ((TILE, 256), (256, 128)))  # type: ignore[return-value]


@pytest.mark.parametrize("variant", ["shared memory", "registers"])
def test_products_and_bytes(factors: tuple[np.ndarray, np.ndarray], variant: str) -> None:
    """The right numbers, no race; the left factor is read once by each of the two blocks, the right one once."""
    a, b = factors
    with interpreter.interpreted() as run:
        output = np.asarray(product(a, b, variant))
    np.testing.assert_allclose(output, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)
    assert not run.has_races
    assert (run.bytes_read, run.bytes_written) == (2 * a.nbytes + b.nbytes, output.nbytes)


@pytest.mark.parametrize("variant", ["refilled under the product", "read without commit"])
def test_a_stage_refilled_too_early_is_a_race(factors: tuple[np.ndarray, np.ndarray], variant: str) -> None:
    """The numbers are right, for the interpreter multiplies at once; a GPU need not."""
    with interpreter.interpreted() as run:
        jax.block_until_ready(product(*factors, variant))
    assert run.has_races


def test_a_missing_wait_is_noticed(factors: tuple[np.ndarray, np.ndarray]) -> None:
    """The barrier that nobody looks at says so; the next kernel runs as if nothing had been."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="no threads observed"), interpreter.interpreted():
        jax.block_until_ready(product(*factors, "no wait"))
    test_products_and_bytes(factors, "registers")


def test_without_a_gpu_a_kernel_refuses_unless_it_may_be_interpreted(factors: tuple[np.ndarray, np.ndarray]) -> None:
    """Outside a test's context the interpreter counts nothing and looks for no races, and gives the same numbers."""
    a, b = factors
    with pytest.raises(UnsupportedByKernel, match="Hopper"):
        product(a, b, "registers", interpret=False)
    output = np.asarray(jax.jit(lambda: product(a, b, "registers"))())
    np.testing.assert_allclose(output, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)


def test_too_few_threads_are_refused(factors: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """A warpgroup that never gets a thread would be waited for without end."""
    monkeypatch.setattr(mosaic.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(mosaic.jax, "local_device_count", lambda backend: 1)
    with pytest.raises(UnsupportedByKernel, match="needs 2 threads and JAX has 1"):
        product(*factors, "registers")
