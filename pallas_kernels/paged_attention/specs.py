"""Named argument sets of paged attention, for the test, the bench and the tuner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ROW_ERROR = 2e-6
"""float32 against float64; the sums have up to a few hundred terms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A batch: each row is (queries, keys); `num_padding` tokens and `num_padding_rows` rows follow."""

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
    Spec(name="window", rows=((1, 200), (40, 170), (8, 8)), window=32),
    Spec(name="bfloat16", rows=((1, 100), (12, 40)), dtype="bfloat16"),
)


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments as numpy arrays: shuffled blocks; the trash block and every unused slot hold NaN."""
    draws = np.random.default_rng(seed)
    blocks_of = [-(-keys // spec.block_size) for _, keys in spec.rows]
    num_blocks = sum(blocks_of) + 3
    order = draws.permutation(np.arange(1, num_blocks))
    pool = (spec.num_kv_heads, num_blocks, spec.block_size, spec.head_dim)
    k, v = (np.full(pool, np.nan, np.float32) for _ in range(2))
    num_rows = len(spec.rows) + spec.num_padding_rows
    tables = np.zeros((num_rows, max(blocks_of) + 1), np.int32)
    start = 0
    for row, (count, (_, keys)) in enumerate(zip(blocks_of, spec.rows, strict=True)):
        tables[row, :count] = order[start : start + count]
        start += count
        for key in range(keys):
            place = tables[row, key // spec.block_size], key % spec.block_size
            k[:, *place], v[:, *place] = draws.standard_normal((2, spec.num_kv_heads, spec.head_dim))
    lengths = [queries for queries, _ in spec.rows] + [0] * spec.num_padding_rows
    q = draws.standard_normal((sum(lengths) + spec.num_padding, spec.num_heads, spec.head_dim)).astype(np.float32)
    return {
        "q": q,
        "k_blocks": k,
        "v_blocks": v,
        "block_tables": tables,
        "query_start_loc": np.cumsum([0, *lengths]).astype(np.int32),
        "context_lens": np.array([keys for _, keys in spec.rows] + [0] * spec.num_padding_rows, np.int32),
    }
