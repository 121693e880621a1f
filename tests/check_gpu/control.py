"""Checks of the checker: small kernels, each with one flaw that must be found, and one without."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.budget import MAX_SHARED_BYTES, KernelCheck
from tests.check_gpu.outcome import Outcome

TILE_M, TILE_K = 64, 64
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _product(
    x_gmem: Any, w_gmem: Any, y_gmem: Any, x_smem: Any, w_smem: Any, y_smem: Any, loaded: Any, *, multiply: Callable[..., Any]
) -> None:
    """A thread block that makes one tile with `multiply`."""
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
    plgpu.copy_gmem_to_smem(w_gmem, w_smem, loaded)
    plgpu.barrier_wait(loaded)
    y_smem[...] = multiply(x_smem, w_smem).astype(y_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_smem, y_gmem)
    plgpu.wait_smem_to_gmem(0)


def once(x: Any, w: Any) -> Any:
    def scope(total: Any) -> Any:
        plgpu.wgmma(total, x, w)
        return total[...]

    return pl.run_scoped(scope, plgpu.ACC((x.shape[0], w.shape[1]), jnp.float32))


def twice_at_once(x: Any, w: Any) -> Any:
    """Two sums of 64 x 256 are all the registers that there are."""

    def scope(first: Any, second: Any) -> Any:
        plgpu.wgmma(first, x, w)
        plgpu.wgmma(second, x, w)
        plgpu.wgmma_wait(0)
        return first[...] + second[...]

    accumulator = plgpu.ACC((x.shape[0], w.shape[1]), jnp.float32)
    return pl.run_scoped(scope, accumulator, accumulator)


def product(x: jax.Array, w: jax.Array, *, multiply: Callable[..., Any] = once) -> jax.Array:
    """A tile of bfloat16."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    scratch: list[Any] = [plgpu.SMEM(shape, x.dtype, transforms=SWIZZLED) for shape in (x.shape, w.shape, out.shape)]
    body = functools.partial(_product, multiply=multiply)
    scratch.append(plgpu.Barrier(num_arrivals=2))
    return plgpu.kernel(body, out_type=out, scratch_types=scratch, kernel_name="control")(x, w)


def arguments(width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((TILE_M, TILE_K), jnp.bfloat16), jax.ShapeDtypeStruct((TILE_K, width), jnp.bfloat16)


WGMMA = (r"wgmma.*\.bf16\.bf16", r"cp\.async\.bulk\.tensor\.\dd\.load")


def tile(
    name: str, *, width: int, multiply: Callable[..., Any] = once, max_registers: int = 255, required: tuple[str, ...] = WGMMA
) -> KernelCheck:
    """The check of a tile of `width` columns."""
    return KernelCheck(
        name=name,
        run=functools.partial(product, multiply=multiply),
        arguments=arguments(width),
        devices=("h200",),
        max_registers=max_registers,
        max_shared_bytes=MAX_SHARED_BYTES,
        required=required,
        floor_bytes=1,
    )


KERNELS = (
    tile("sound", width=128),
    tile("spills", width=256, multiply=twice_at_once),
    tile("lacks_int8", width=128, required=(r"wgmma.*\.s8\.s8",)),
    tile("many_registers", width=256, max_registers=64),
)

EXPECTED: Mapping[str, tuple[str, ...]] = {
    "sound": (),
    "spills": (r"spills \d+ bytes", r"C7511: wgmma.* serialized"),
    "lacks_int8": (r"no instruction wgmma",),
    "many_registers": (r"\d+ registers, at most 64",),
}
"""What has to be said of each kernel, in this order, and nothing else."""


def judge(name: str, outcome: Outcome) -> Outcome:
    """The outcome of the check that a control is: its flaws were all found, and no others."""
    expected = EXPECTED[name]
    matched = [re.search(pattern, said) for pattern, said in zip(expected, outcome.problems, strict=False)]
    if len(outcome.problems) == len(expected) and all(matched):
        return Outcome(figures=outcome.figures, seconds=outcome.seconds)
    wanted, said = "; ".join(expected) or "nothing", "; ".join(outcome.problems) or "nothing"
    return Outcome(problems=(f"the checker should have said: {wanted}; it said: {said}",), seconds=outcome.seconds)
