"""The public signature of paged attention and its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.common.mosaic import late
from pallas_kernels.common.one_byte import LARGEST, has_scales
from pallas_kernels.paged_attention import native, reference, xla

OPERATION = Operation(
    name="paged_attention",
    implementations={
        "mosaic": late("pallas_kernels.paged_attention.mosaic", "paged_attention"),
        "native": native.paged_attention,
        "xla": xla.paged_attention,
        "reference": reference.paged_attention,
    },
    if_named={"mosaic": {"interpret": True}},
)


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, "H"] | None = None,
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    value_dim: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H Dv"]:
    """Causal attention of each row's queries over that row's keys (PagedAttention, arXiv:2309.06180).

    Row b owns queries `query_start_loc[b]:query_start_loc[b + 1]`, the last of its `context_lens[b]` tokens; their
    keys and values are already in the blocks. Query head h reads KV head h // (H / K). Queries past the last row,
    and rows without queries, are padding: their output is finite and means nothing.

    Args:
        q: queries, rows one after another.
        k_blocks: the pool of keys: KV heads, blocks, slots of a block, head dim. May hold NaN where no row looks.
        v_blocks: the pool of values, of the keys' dtype; None for a latent cache (DeepSeek-V2, arXiv:2405.04434, the absorbed
            form of 2.1.2), where a value is the first `value_dim` columns of its key.
        block_tables: block ids of each row in order; entries past the context are ignored.
        query_start_loc: B + 1 offsets into q, non-decreasing.
        context_lens: keys of each row, its queries' own included.
        scale: what scores are multiplied by, usually D ** -0.5.
        window: a query sees this many last keys, its own included; None: all of them.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap) before the mask (Gemma 2, arXiv:2408.00118, 2).
        sinks: a logit for each query head that joins the softmax's maximum and sum and has no value (gpt_oss,
            `modeling_gpt_oss.eager_attention_forward` of HF transformers). Not capped.
        k_scales: of keys of one byte a number (int8, float8_e4m3fn), what each token and head's vector is multiplied by; else None. May hold NaN where no row looks.
        v_scales: likewise of values; None with a latent cache.
        value_dim: width of the values; needed for a latent cache only.
        implementation: run this one and no other.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check_shapes(q, k_blocks, v_blocks, value_dim, sinks)
    _check_scales(k_blocks, v_blocks, k_scales, v_scales)
    if query_start_loc.shape[0] != context_lens.shape[0] + 1 or block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"rows disagree: block_tables {block_tables.shape}, query_start_loc {query_start_loc.shape}, context_lens {context_lens.shape}"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "k_scales": k_scales, "v_scales": v_scales, "value_dim": value_dim}
    rows = (block_tables, query_start_loc, context_lens)
    return OPERATION(q, k_blocks, v_blocks, *rows, scale=scale, **options, implementation=implementation)


def _check_shapes(q: Array, k_blocks: Array, v_blocks: Array | None, value_dim: int | None, sinks: Array | None) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_blocks.shape[0]
    if k_blocks.shape[3] != head_dim:
        raise ValueError(f"k_blocks {k_blocks.shape} must end in the queries' head dim {head_dim}")
    if v_blocks is None:
        if value_dim is None or not 0 < value_dim <= head_dim:
            raise ValueError(f"without v_blocks value_dim must be 1..{head_dim}, got {value_dim}")
    else:
        if v_blocks.shape[:3] != k_blocks.shape[:3] or v_blocks.dtype != k_blocks.dtype:
            raise ValueError(
                f"k_blocks {k_blocks.shape} {k_blocks.dtype} and v_blocks {v_blocks.shape} {v_blocks.dtype} must agree but in the last axis"
            )
        if value_dim not in (None, v_blocks.shape[3]):
            raise ValueError(f"value_dim {value_dim} contradicts v_blocks {v_blocks.shape}")
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads ({num_heads}) must be a multiple of KV heads ({num_kv_heads})")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {sinks.shape} must have one logit for each of {num_heads} query heads")


def _check_scales(k_blocks: Array, v_blocks: Array | None, k_scales: Array | None, v_scales: Array | None) -> None:
    if v_blocks is None and v_scales is not None:
        raise ValueError("v_scales must be None without v_blocks: the values are columns of the keys and share their scales")
    for blocks, scales, name in ((k_blocks, k_scales, "k_scales"), (v_blocks, v_scales, "v_scales")):
        if blocks is None:
            continue
        if has_scales(blocks.dtype) != (scales is not None):
            got = f"{'none' if scales is None else 'some'} for {blocks.dtype}"
            raise ValueError(f"{name} go with a pool of {' or '.join(LARGEST)} and no other, got {got}")
        if scales is not None and scales.shape != blocks.shape[:3]:
            raise ValueError(f"{name} {scales.shape} must be {blocks.shape[:3]}")
