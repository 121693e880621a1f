"""Named argument sets of paged attention, for the test, the bench and the tuner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.one_byte import has_scales

MAX_ROW_ERROR = 2e-6
"""float32 against float64; the sums have up to a few hundred terms. An int8 cache is an exact input like any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A batch: each row is (queries, keys); `num_padding` tokens and `num_padding_rows` rows follow.

    `value_dim` None: as wide as the keys; `is_latent`: values are that many first columns of the keys; `is_freed`: blocks that
    no query's window reaches have been given back, and the trash block stands in their place. `max_row_error`: against the oracle, see
    `limit`. Scores of these arguments are of size 1, so a cap has to be about as small to matter.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_padding: int = 0
    num_padding_rows: int = 0
    window: int | None = None
    dtype: str = "float32"
    cache_dtype: str = "float32"
    soft_cap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    is_latent: bool = False
    is_freed: bool = False
    max_row_error: float | None = None

    @property
    def limit(self) -> float:
        """The largest row error that an implementation may have: rounding to bfloat16 is most of it where there is any."""
        if self.max_row_error is not None:
            return self.max_row_error
        return 1e-2 if self.dtype == "bfloat16" else MAX_ROW_ERROR


MIX = ((1, 50), (20, 180), (1, 1), (3, 131))
LONG = ((1, 1100), (20, 1040), (1, 1024), (3, 1026), (1, 2100), (1, 30))
LATENT: dict[str, Any] = {"num_kv_heads": 1, "is_latent": True}
SPECS = (
    Spec(name="one_token", rows=((1, 1),)),
    Spec(name="decode", rows=((1, 5), (1, 128), (1, 129), (1, 300))),
    Spec(name="decode_padded", rows=((1, 40), (1, 17)), num_padding=6, num_padding_rows=6),
    Spec(name="whole_prompts", rows=((33, 33), (64, 64), (5, 5)), num_padding=26, num_padding_rows=1),
    Spec(name="chunks_and_decodes", rows=((1, 50), (20, 180), (1, 1), (16, 16), (3, 131)), num_padding=23, num_padding_rows=3),
    Spec(name="one_head_per_group", rows=((1, 20), (7, 30)), num_heads=3, num_kv_heads=3),
    Spec(name="nine_heads_three_groups", rows=((1, 200), (9, 9)), num_heads=9, num_kv_heads=3, head_dim=64),
    Spec(name="block_of_one", rows=((4, 9), (1, 3)), block_size=1),
    Spec(name="block_of_256", rows=((4, 300), (1, 257)), block_size=256),
    Spec(name="long", rows=LONG, num_heads=2, num_kv_heads=1),
    Spec(name="long_window_sinks", rows=LONG, num_heads=2, num_kv_heads=1, window=500, has_sinks=True),
    Spec(name="window", rows=((1, 200), (40, 170), (8, 8)), window=32),
    Spec(name="bfloat16", rows=((1, 100), (12, 40)), dtype="bfloat16", cache_dtype="bfloat16"),
    Spec(name="bfloat16_cache", rows=MIX, cache_dtype="bfloat16"),
    Spec(name="bfloat16_queries", rows=((1, 100), (12, 40)), dtype="bfloat16"),
    Spec(name="one_kv_head", rows=((1, 200),), num_kv_heads=1, head_dim=256),
    Spec(name="head_dim_112", rows=MIX, head_dim=112),
    Spec(name="head_dim_24", rows=MIX, head_dim=24),
    Spec(name="soft_cap", rows=MIX, soft_cap=1.5, num_padding=5, num_padding_rows=1),
    Spec(name="soft_cap_window", rows=MIX, soft_cap=1.5, window=20),
    Spec(name="sinks", rows=MIX, has_sinks=True, num_padding=5, num_padding_rows=1),
    Spec(name="sinks_window", rows=MIX, has_sinks=True, window=20, num_heads=8),
    Spec(name="sinks_bfloat16", rows=((1, 100), (12, 40)), has_sinks=True, dtype="bfloat16", cache_dtype="bfloat16"),
    Spec(name="int8", rows=MIX, cache_dtype="int8", head_dim=64, num_padding=5, num_padding_rows=1),
    Spec(name="int8_one_head_per_group", rows=((1, 90), (1, 33)), num_heads=3, num_kv_heads=3, cache_dtype="int8"),
    Spec(name="int8_window", rows=MIX, cache_dtype="int8", window=20),
    Spec(name="window_freed", rows=MIX, window=20, is_freed=True),
    Spec(name="int8_window_freed", rows=MIX, window=20, is_freed=True, cache_dtype="int8"),
    Spec(name="float8", rows=MIX, cache_dtype="float8_e4m3fn", head_dim=64, num_padding=5, num_padding_rows=1),
    Spec(name="float8_window_sinks", rows=MIX, cache_dtype="float8_e4m3fn", window=20, is_freed=True, has_sinks=True),
    Spec(name="int8_sinks_soft_cap", rows=MIX, cache_dtype="int8", has_sinks=True, soft_cap=1.5),
    Spec(name="narrow_values", rows=MIX, head_dim=48, value_dim=32),
    Spec(name="narrow_values_int8_window", rows=MIX, head_dim=48, value_dim=16, cache_dtype="int8", window=20),
    Spec(name="wide_values", rows=MIX, head_dim=16, value_dim=80),
    Spec(name="latent", rows=MIX, head_dim=48, value_dim=32, num_padding=5, num_padding_rows=1, **LATENT),
    Spec(name="latent_int8", rows=MIX, head_dim=48, value_dim=32, cache_dtype="int8", **LATENT),
    Spec(name="latent_float8", rows=MIX, head_dim=48, value_dim=32, cache_dtype="float8_e4m3fn", **LATENT),
    Spec(name="latent_576", rows=((1, 70), (3, 40)), num_heads=16, head_dim=576, value_dim=512, **LATENT),
    Spec(name="latent_576_bfloat16_cache", rows=((1, 70),), num_heads=16, head_dim=576, value_dim=512, cache_dtype="bfloat16", **LATENT),
)

_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "cache_dtype": "bfloat16", "head_dim": 64, "max_row_error": 6e-3}
_INT8: dict[str, Any] = _BFLOAT16 | {"cache_dtype": "int8", "max_row_error": 8e-3}
_FLOAT8: dict[str, Any] = _INT8 | {"cache_dtype": "float8_e4m3fn"}
_LATENT: dict[str, Any] = _BFLOAT16 | LATENT | {"num_heads": 16}
DECODE_SPECS = (
    Spec(name="partial_blocks", rows=((1, 1), (1, 16), (1, 64), (1, 65), (1, 143)), **_BFLOAT16),
    Spec(name="padding", rows=((1, 40), (1, 17)), num_padding=2, num_padding_rows=3, **_BFLOAT16),
    Spec(name="no_context", rows=((0, 0), (1, 17), (0, 0)), num_padding=1, **_BFLOAT16),
    Spec(name="bfloat16_128_block_32", rows=((1, 150),), block_size=32, **_BFLOAT16 | {"head_dim": 128}),
    Spec(name="bfloat16_256_block_64", rows=((1, 130),), block_size=64, **_BFLOAT16 | {"head_dim": 256}),
    Spec(name="block_256", rows=((1, 300), (1, 257)), block_size=256, **_BFLOAT16),
    Spec(name="block_8", rows=((1, 30),), block_size=8, **_BFLOAT16),
    Spec(name="float32_queries", rows=((1, 100), (1, 33)), **_BFLOAT16 | {"dtype": "float32"}),
    Spec(name="one_head_per_group", rows=((1, 90),), num_heads=3, num_kv_heads=3, **_BFLOAT16),
    Spec(name="sixteen_heads_per_group", rows=((1, 90),), num_heads=16, num_kv_heads=1, **_BFLOAT16),
    Spec(name="ten_heads_per_group", rows=((1, 90),), num_heads=10, num_kv_heads=1, **_BFLOAT16),
    Spec(name="parts_of_a_group", rows=((1, 70),), num_heads=66, num_kv_heads=1, **_BFLOAT16),
    Spec(name="window", rows=((1, 200), (1, 129), (1, 8)), window=32, is_freed=True, **_BFLOAT16),
    Spec(name="window_of_one", rows=((1, 65), (1, 64)), window=1, is_freed=True, **_BFLOAT16),
    Spec(name="soft_cap", rows=((1, 150), (1, 3)), soft_cap=1.5, **_BFLOAT16),
    Spec(name="sinks", rows=((1, 150), (1, 1)), has_sinks=True, **_BFLOAT16),
    Spec(name="sinks_window_soft_cap", rows=((1, 200), (1, 1)), has_sinks=True, window=70, is_freed=True, soft_cap=1.5, **_BFLOAT16),
    Spec(name="split", rows=((1, 1300), (1, 500)), num_heads=2, num_kv_heads=1, block_size=64, **_BFLOAT16),
    Spec(
        name="split_sinks_window",
        rows=((1, 1400), (1, 20)),
        num_heads=2,
        num_kv_heads=1,
        block_size=64,
        window=1100,
        has_sinks=True,
        **_BFLOAT16,
    ),
    Spec(name="int8", rows=((1, 150), (1, 1)), num_padding=1, num_padding_rows=1, **_INT8 | {"head_dim": 128}),
    Spec(name="int8_window_sinks", rows=((1, 150), (1, 33)), window=70, is_freed=True, has_sinks=True, **_INT8),
    Spec(name="int8_split", rows=((1, 1100),), num_heads=4, num_kv_heads=1, block_size=64, **_INT8),
    Spec(name="float8", rows=((1, 150), (1, 1)), **_FLOAT8 | {"head_dim": 128}),
    Spec(name="float8_window_soft_cap", rows=((1, 150), (1, 33)), window=70, is_freed=True, soft_cap=1.5, **_FLOAT8),
    Spec(name="narrow_values", rows=((1, 90),), value_dim=32, **_BFLOAT16),
    Spec(name="wide_values", rows=((1, 90),), value_dim=128, **_BFLOAT16),
    Spec(name="keys_192_values_128", rows=((1, 70),), value_dim=128, **_BFLOAT16 | {"head_dim": 192}),
    Spec(name="head_dim_80", rows=((1, 90),), **_BFLOAT16 | {"head_dim": 80}),
    Spec(name="head_dim_96_float8", rows=((1, 90),), **_FLOAT8 | {"head_dim": 96}),
    Spec(name="head_dim_112", rows=((1, 90),), **_BFLOAT16 | {"head_dim": 112}),
    Spec(name="latent", rows=((1, 130), (1, 1)), value_dim=512, **_LATENT | {"head_dim": 576}),
    Spec(name="latent_int8", rows=((1, 70),), value_dim=128, **_LATENT | {"head_dim": 192, "cache_dtype": "int8", "max_row_error": 8e-3}),
    Spec(name="latent_float8", rows=((1, 70),), value_dim=128, **_LATENT | {"head_dim": 192, "cache_dtype": "float8_e4m3fn"}),
    Spec(name="latent_48", rows=((1, 70), (1, 16)), value_dim=32, **_LATENT | {"head_dim": 48, "num_heads": 4}),
)
"""For the interpreter of the Mosaic GPU decode kernel: few blocks, bfloat16 products."""

PREFILL_SPECS = (
    Spec(name="prompts", rows=((40, 40), (3, 3), (21, 21)), **_BFLOAT16),
    Spec(name="chunks_and_decodes", rows=((1, 50), (20, 90), (2, 2), (1, 1), (17, 40)), num_padding=6, num_padding_rows=2, **_BFLOAT16),
    Spec(name="odd_number_of_tokens", rows=((5, 30), (0, 0), (4, 4)), **_BFLOAT16),
    Spec(name="longer_than_a_tile", rows=((150, 160),), num_heads=2, num_kv_heads=1, **_BFLOAT16),
    Spec(name="bfloat16_128_block_32", rows=((9, 150),), num_kv_heads=1, block_size=32, **_BFLOAT16 | {"head_dim": 128}),
    Spec(name="bfloat16_256_block_64", rows=((5, 70),), num_kv_heads=1, block_size=64, **_BFLOAT16 | {"head_dim": 256}),
    Spec(name="block_256", rows=((4, 300), (6, 257)), block_size=256, **_BFLOAT16),
    Spec(name="block_8", rows=((10, 30),), block_size=8, **_BFLOAT16),
    Spec(name="float32_queries", rows=((16, 33),), **_BFLOAT16 | {"dtype": "float32"}),
    Spec(name="one_head_per_group", rows=((9, 40),), num_heads=3, num_kv_heads=3, **_BFLOAT16),
    Spec(name="three_heads_per_group", rows=((50, 60),), num_heads=3, num_kv_heads=1, **_BFLOAT16),
    Spec(name="parts_of_a_group", rows=((9, 20),), num_heads=20, num_kv_heads=1, **_BFLOAT16),
    Spec(name="window", rows=((40, 170), (8, 8)), window=32, is_freed=True, **_BFLOAT16),
    Spec(name="window_with_whole_tiles", rows=((16, 460),), num_heads=2, num_kv_heads=1, window=300, is_freed=True, **_BFLOAT16),
    Spec(name="soft_cap", rows=((12, 40),), soft_cap=1.5, **_BFLOAT16),
    Spec(name="sinks", rows=((12, 40), (2, 2)), has_sinks=True, **_BFLOAT16),
    Spec(name="sinks_window_soft_cap", rows=((10, 200),), has_sinks=True, window=70, is_freed=True, soft_cap=1.5, **_BFLOAT16),
    Spec(name="int8", rows=((12, 150), (1, 20), (2, 2)), **_INT8 | {"head_dim": 128, "num_kv_heads": 1}),
    Spec(name="int8_window_sinks", rows=((12, 150),), window=70, is_freed=True, has_sinks=True, **_INT8),
    Spec(name="float8", rows=((12, 150), (2, 2)), **_FLOAT8),
    Spec(name="float8_window_soft_cap", rows=((12, 150),), window=70, is_freed=True, soft_cap=1.5, **_FLOAT8 | {"head_dim": 96}),
    Spec(name="narrow_values", rows=((12, 40),), value_dim=32, **_BFLOAT16),
    Spec(name="keys_192_values_128", rows=((12, 40),), value_dim=128, **_BFLOAT16 | {"head_dim": 192}),
    Spec(name="head_dim_80", rows=((12, 40),), **_BFLOAT16 | {"head_dim": 80}),
    Spec(name="latent", rows=((12, 70), (1, 1)), value_dim=512, **_LATENT | {"head_dim": 576}),
    Spec(name="latent_int8", rows=((5, 70),), value_dim=512, **_LATENT | {"head_dim": 576, "cache_dtype": "int8", "max_row_error": 8e-3}),
    Spec(name="latent_48", rows=((9, 70),), value_dim=32, **_LATENT | {"head_dim": 48, "num_heads": 4}),
)
"""Likewise of the prefill kernel."""


def static_arguments(spec: Spec) -> dict[str, Any]:
    """What is not an array."""
    static = {"scale": spec.head_dim**-0.5, "window": spec.window, "soft_cap": spec.soft_cap}
    return static | {"value_dim": spec.value_dim if spec.is_latent else None}


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, Any]:
    """Arguments as numpy arrays: shuffled blocks; the trash block, every unused slot and its scale hold NaN (127 in int8)."""
    draws = np.random.default_rng(seed)
    blocks_of = [-(-keys // spec.block_size) for _, keys in spec.rows]
    order = draws.permutation(np.arange(1, sum(blocks_of) + 3))
    num_rows = len(spec.rows) + spec.num_padding_rows
    tables = np.zeros((num_rows, max(blocks_of) + 1), np.int32)
    used = np.zeros((len(order) + 1, spec.block_size), bool)
    start = 0
    for row, (count, (_, keys)) in enumerate(zip(blocks_of, spec.rows, strict=True)):
        tables[row, :count] = order[start : start + count]
        start += count
        for key in range(keys):
            used[tables[row, key // spec.block_size], key % spec.block_size] = True
        if spec.is_freed and spec.window is not None:
            num_freed = max(0, keys - spec.rows[row][0] + 1 - spec.window) // spec.block_size
            used[tables[row, :num_freed]] = False
            tables[row, :num_freed] = 0
    lengths = [queries for queries, _ in spec.rows] + [0] * spec.num_padding_rows
    k_blocks, k_scales = _pool(draws, spec, used, spec.head_dim)
    v_blocks, v_scales = (None, None) if spec.is_latent else _pool(draws, spec, used, spec.value_dim or spec.head_dim)
    num_tokens = sum(lengths) + spec.num_padding
    arguments = {
        "q": draws.standard_normal((num_tokens, spec.num_heads, spec.head_dim)).astype(jnp.dtype(spec.dtype)),
        "k_blocks": k_blocks,
        "v_blocks": v_blocks,
        "block_tables": tables,
        "query_start_loc": np.cumsum([0, *lengths]).astype(np.int32),
        "context_lens": np.array([keys for _, keys in spec.rows] + [0] * spec.num_padding_rows, np.int32),
    }
    sinks = draws.standard_normal(spec.num_heads).astype(np.float32) + 2 if spec.has_sinks else None
    optional = {"sinks": sinks, "k_scales": k_scales, "v_scales": v_scales}
    return arguments | {name: array for name, array in optional.items() if array is not None}


def _pool(draws: np.random.Generator, spec: Spec, used: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Vectors of size 1 per column, and their scales."""
    shape = (spec.num_kv_heads, *used.shape, dim)
    dtype = jnp.dtype(spec.cache_dtype)
    if not has_scales(dtype):
        return np.where(used[..., None], draws.standard_normal(shape), np.nan).astype(dtype), None
    if dtype == jnp.int8:
        numbers = np.where(used[..., None], draws.integers(-127, 128, shape), 127).astype(dtype)
    else:
        numbers = np.where(used[..., None], draws.standard_normal(shape) * 64, np.nan).astype(dtype)
    return numbers, np.where(used, draws.uniform(0.005, 0.025, shape[:3]), np.nan).astype(np.float32)
