"""What paged attention's kernels may compile to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import interpreter
from pallas_kernels.common.budget import CopiedBytes, KernelCheck
from pallas_kernels.common.one_byte import has_scales
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.specs import LATENT, Spec, make_arguments, static_arguments

NAMES = ("q", "k_blocks", "v_blocks", "block_tables", "query_start_loc", "context_lens", "sinks", "k_scales", "v_scales")
PRODUCTS_AND_COPIES = (r"wgmma\.m64n.*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor")
TWO_ON_A_CORE = 115_712
"""Shared memory of a thread block that leaves room for a second one."""


def shapes(spec: Spec) -> tuple[Any, ...]:
    """Arguments of a spec as shapes, in the order of `NAMES`."""
    num_rows, num_tokens = len(spec.rows) + spec.num_padding_rows, sum(queries for queries, _ in spec.rows) + spec.num_padding
    num_blocks = [-(-keys // spec.block_size) for _, keys in spec.rows]
    pool = (spec.num_kv_heads, sum(num_blocks) + 1, spec.block_size)
    cache_dtype = jnp.dtype(spec.cache_dtype)
    values = None if spec.is_latent else jax.ShapeDtypeStruct((*pool, spec.value_dim or spec.head_dim), cache_dtype)
    scales = jax.ShapeDtypeStruct(pool, jnp.float32) if has_scales(cache_dtype) else None
    return (
        jax.ShapeDtypeStruct((num_tokens, spec.num_heads, spec.head_dim), jnp.dtype(spec.dtype)),
        jax.ShapeDtypeStruct((*pool, spec.head_dim), cache_dtype),
        values,
        jax.ShapeDtypeStruct((num_rows, max(num_blocks)), jnp.int32),
        jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((spec.num_heads,), jnp.float32) if spec.has_sinks else None,
        scales,
        None if spec.is_latent else scales,
    )


def attend(*arguments: Any, static: dict[str, Any]) -> jax.Array:
    """The kernel with arguments in the order of `NAMES`."""
    return mosaic.paged_attention(**dict(zip(NAMES, arguments, strict=True)), **static)


def floor_bytes(spec: Spec) -> int:
    """Queries, the keys and values that a row's queries see, and where they are, once; outputs once."""
    value_dim = spec.value_dim or spec.head_dim
    per_key = (spec.head_dim + (0 if spec.is_latent else value_dim)) * jnp.dtype(spec.cache_dtype).itemsize
    if has_scales(spec.cache_dtype):
        per_key += 4 if spec.is_latent else 8
    seen = [min(keys, keys if spec.window is None else spec.window + queries - 1) for queries, keys in spec.rows]
    tables = 4 * sum(-(-keys // spec.block_size) for keys in seen) + 4 * (2 * len(spec.rows) + 1)
    vectors = sum(queries for queries, _ in spec.rows) * spec.num_heads * (spec.head_dim + value_dim) * jnp.dtype(spec.dtype).itemsize
    return sum(seen) * spec.num_kv_heads * per_key + vectors + tables


def floor_flops(spec: Spec) -> int:
    """Of both products, keys after a query left out."""
    pairs = 0
    for queries, keys in spec.rows:
        pairs += sum(min(end, spec.window or end) for end in range(keys - queries + 1, keys + 1))
    return 2 * pairs * spec.num_heads * (spec.head_dim + (spec.value_dim or spec.head_dim))


def count(spec: Spec) -> int:
    """Bytes that the interpreted kernel copies."""
    with interpreter.interpreted(detect_races=False) as counted:
        call = jax.jit(lambda kwargs: mosaic.paged_attention(**kwargs, **static_arguments(spec), interpret=True))
        jax.block_until_ready(call(make_arguments(spec)))
    return counted.bytes_read + counted.bytes_written


def _check(name: str, max_registers: int, max_shared_bytes: int, *, copied: Spec | None = None, **sizes: Any) -> KernelCheck:
    """32 rows of 2048 keys, unless `sizes` say otherwise."""
    served: dict[str, Any] = {"rows": ((1, 2048),) * 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    spec = Spec(name=name, **served | {"cache_dtype": "bfloat16"} | sizes)
    counted: Callable[[], int] | None = None if copied is None else partial(count, copied)
    return KernelCheck(
        name=name,
        run=partial(attend, static=static_arguments(spec)),
        arguments=shapes(spec),
        max_registers=max_registers,
        max_shared_bytes=max_shared_bytes,
        required=PRODUCTS_AND_COPIES,
        floor_bytes=floor_bytes(spec),
        floor_flops=floor_flops(spec),
        copied=None if counted is None or copied is None else CopiedBytes(count=counted, floor_bytes=floor_bytes(copied)),
    )


SMALL = Spec(
    name="small",
    rows=((1, 2048), (1, 2100)),
    num_heads=4,
    num_kv_heads=1,
    head_dim=128,
    block_size=64,
    dtype="bfloat16",
    cache_dtype="bfloat16",
)
"""Long enough for a row to be split."""
SMALL_LATENT = replace(SMALL, rows=((1, 3072),), num_heads=16, head_dim=576, value_dim=512, is_latent=True)
LATENT_SIZES = LATENT | {"num_heads": 16, "head_dim": 576, "value_dim": 512}

KERNELS = (
    _check("decode_bfloat16_128", 128, TWO_ON_A_CORE, copied=SMALL),
    _check("decode_bfloat16_64", 128, TWO_ON_A_CORE, head_dim=64),
    _check("decode_bfloat16_256", 200, 232_448, head_dim=256, num_heads=8, num_kv_heads=4),
    _check("decode_bfloat16_128_block_64", 128, TWO_ON_A_CORE, block_size=64),
    _check("decode_int8_128", 128, TWO_ON_A_CORE, cache_dtype="int8", copied=replace(SMALL, cache_dtype="int8")),
    _check("decode_float8_128", 128, TWO_ON_A_CORE, cache_dtype="float8_e4m3fn"),
    _check("decode_latent", 255, 232_448, copied=SMALL_LATENT, **LATENT_SIZES),
    _check("decode_latent_int8", 255, 232_448, cache_dtype="int8", **LATENT_SIZES),
    _check("decode_sinks_window", 128, TWO_ON_A_CORE, head_dim=64, num_heads=64, has_sinks=True, window=128),
    _check("decode_soft_cap", 200, 232_448, head_dim=256, num_heads=16, soft_cap=50.0, window=4096),
    _check("decode_head_dim_96", 160, 232_448, head_dim=96, num_heads=32, num_kv_heads=32),
    _check("prefill_bfloat16_128", 255, 232_448, rows=((4096, 4096),)),
    _check("prefill_int8_128", 255, 232_448, rows=((4096, 4096),), cache_dtype="int8"),
    _check("prefill_latent", 255, 232_448, rows=((4096, 4096),), **LATENT_SIZES),
    _check("mixed_bfloat16_128", 255, 232_448, rows=((1, 2048),) * 32 + ((1024, 2048),)),
)
