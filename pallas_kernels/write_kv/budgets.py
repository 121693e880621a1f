"""What write_kv's kernel may compile to."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import interpreter
from pallas_kernels.common.budget import CopiedBytes, KernelCheck
from pallas_kernels.common.one_byte import has_scales
from pallas_kernels.write_kv import mosaic, mosaic_rotated
from pallas_kernels.write_kv.specs import Spec, make_arguments

POOLS = (0, 1, 5, 6)
"""Arguments that are taken over."""
COPIES = (r"cp\.async\.bulk\.tensor.*",)
ATOMICS = (r"atom.*", r"red\..*")


def _arguments(spec: Spec) -> tuple[Any, ...]:
    """Shapes of a spec, in the order of the operation's arguments."""
    pool = (spec.num_heads, spec.num_blocks, spec.block_size)
    scales = jax.ShapeDtypeStruct(pool, jnp.float32) if has_scales(spec.cache_dtype) else None

    def blocks(head_dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*pool, head_dim), jnp.dtype(spec.cache_dtype))

    def new(head_dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((spec.num_tokens, spec.num_heads, head_dim), jnp.dtype(spec.dtype))

    slots = jax.ShapeDtypeStruct((spec.num_tokens,), jnp.int32)
    if spec.value_dim is None:
        return blocks(spec.head_dim), None, new(spec.head_dim), None, slots, scales, None
    return blocks(spec.head_dim), blocks(spec.value_dim), new(spec.head_dim), new(spec.value_dim), slots, scales, scales


def _floor(spec: Spec, num_dropped: int = 0) -> int:
    """New vectors and slots in, numbers and scales out."""
    size = spec.head_dim + (spec.value_dim or 0)
    num_pools = 1 if spec.value_dim is None else 2
    scale_bytes = 4 * num_pools if has_scales(spec.cache_dtype) else 0
    written = (spec.num_tokens - num_dropped) * spec.num_heads * (size * jnp.dtype(spec.cache_dtype).itemsize + scale_bytes)
    return spec.num_tokens * spec.num_heads * size * jnp.dtype(spec.dtype).itemsize + 4 * spec.num_tokens + written


def devices_of(spec: Spec) -> tuple[str, ...]:
    """An H100 gets the same code: as many multiprocessors, the same architecture."""
    return ("h100", "h200") if spec.num_tokens == 1 else ("h200",)


def _count() -> int:
    spec = SMALL
    with interpreter.interpreted(detect_races=False) as counted:
        jax.block_until_ready(jax.jit(lambda kwargs: mosaic.write_kv(**kwargs, interpret=True))(make_arguments(spec)))
    return counted.bytes_read + counted.bytes_written


SMALL = Spec(name="small", num_tokens=6, head_dim=64, value_dim=64, dtype="bfloat16", cache_dtype="int8")


def _check(name: str, max_registers: int, max_shared_bytes: int, *, copied: CopiedBytes | None = None, **sizes: Any) -> KernelCheck:
    served: dict[str, Any] = {"num_blocks": 4096, "num_heads": 8, "block_size": 16, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16"}
    spec = Spec(name=name, **served | sizes)
    return KernelCheck(
        name=name,
        devices=devices_of(spec),
        run=functools.partial(mosaic.write_kv, interpret=True),
        arguments=_arguments(spec),
        max_registers=max_registers,
        max_shared_bytes=max_shared_bytes,
        required=COPIES,
        forbidden=ATOMICS,
        floor_bytes=_floor(spec),
        donate_argnums=tuple(index for index in POOLS if _arguments(spec)[index] is not None),
        copied=copied,
    )


def _rotated(name: str, max_registers: int, max_shared_bytes: int, **sizes: Any) -> KernelCheck:
    spec = Spec(name=name, num_blocks=4096, num_heads=8, block_size=16, head_dim=128, value_dim=128, dtype="bfloat16", **sizes)
    keys, values, new, _, slots, *scales = _arguments(spec)
    num_queries = 32
    heads = num_queries + 2 * spec.num_heads
    qkv = jax.ShapeDtypeStruct((spec.num_tokens, heads, spec.head_dim), new.dtype)
    rotation = jax.ShapeDtypeStruct((spec.num_tokens, spec.head_dim), jnp.float32)
    queries = spec.num_tokens * num_queries * spec.head_dim
    return KernelCheck(
        name=name,
        devices=devices_of(spec),
        run=mosaic_rotated.rotate_and_write_kv,
        arguments=(qkv, rotation, keys, values, slots, *scales),
        max_registers=max_registers,
        max_shared_bytes=max_shared_bytes,
        required=COPIES,
        forbidden=ATOMICS,
        floor_bytes=_floor(spec) + 2 * queries * new.dtype.itemsize + rotation.size * 4,
        donate_argnums=(2, 3, 5, 6) if scales[0] is not None else (2, 3),
    )


KERNELS = (
    _rotated("rotated_one_token_bfloat16", 128, 34_500, num_tokens=1, cache_dtype="bfloat16"),
    _rotated("rotated_decode_int8", 184, 46_500, num_tokens=32, cache_dtype="int8"),
    _check("one_token_bfloat16", 40, 34_000, num_tokens=1, cache_dtype="bfloat16"),
    _check("decode_int8", 128, 56_000, num_tokens=32, cache_dtype="int8", copied=CopiedBytes(count=_count, floor_bytes=_floor(SMALL, 1))),
    _check("prompt_float8", 128, 56_000, num_tokens=4096, cache_dtype="float8_e4m3fn"),
    _check("latent_int8", 128, 120_000, num_tokens=256, num_heads=1, head_dim=576, value_dim=None, cache_dtype="int8"),
)
