"""The public signature of paged attention and its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.paged_attention import native, reference, xla

OPERATION = Operation(
    name="paged_attention",
    implementations={"native": native.paged_attention, "xla": xla.paged_attention, "reference": reference.paged_attention},
)


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Float[Array, "K N S D"],
    v_blocks: Float[Array, "K N S D"],
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each row's queries over that row's keys (PagedAttention, arXiv:2309.06180).

    Row b owns queries `query_start_loc[b]:query_start_loc[b + 1]`, the last of its `context_lens[b]` tokens; their
    keys and values are already in the blocks. Query head h reads KV head h // (H / K). Queries past the last row,
    and rows without queries, are padding: their output is finite and means nothing.

    Args:
        q: queries, rows one after another.
        k_blocks: the pool of keys: KV heads, blocks, slots of a block, head dim. May hold NaN where no row looks.
        v_blocks: the pool of values.
        block_tables: block ids of each row in order; entries past the context are ignored.
        query_start_loc: B + 1 offsets into q, non-decreasing.
        context_lens: keys of each row, its queries' own included.
        scale: what scores are multiplied by, usually D ** -0.5.
        window: a query sees this many last keys, its own included; None: all of them.
        implementation: run this one and no other.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_blocks.shape[0]
    if k_blocks.shape != v_blocks.shape or k_blocks.shape[3] != head_dim:
        raise ValueError(f"k_blocks {k_blocks.shape} and v_blocks {v_blocks.shape} must agree and end in head dim {head_dim}")
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads ({num_heads}) must be a multiple of KV heads ({num_kv_heads})")
    if query_start_loc.shape[0] != context_lens.shape[0] + 1 or block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"rows disagree: block_tables {block_tables.shape}, query_start_loc {query_start_loc.shape}, context_lens {context_lens.shape}"
        )
    return OPERATION(
        q,
        k_blocks,
        v_blocks,
        block_tables,
        query_start_loc,
        context_lens,
        scale=scale,
        window=window,
        implementation=implementation,
    )
