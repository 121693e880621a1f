"""How many blocks each group of layers gets."""

from __future__ import annotations

from jaxinfer import sharding
from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.sizing import CPU_POOL_BYTES, resolve_num_blocks


def group(layers: int, head_dim: int, window: int | None = None, dtype: str = "float32") -> KVGroupSpec:
    tensors = tuple(KVTensorSpec(name=name, num_heads=1, head_dim=head_dim, dtype=dtype) for name in ("keys", "values"))
    return KVGroupSpec(kind="full" if window is None else "window", layers=tuple(range(layers)), window=window, tensors=tensors)


def blocks(groups: list[KVGroupSpec], max_model_len: int, **cache: int) -> list[int]:
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return resolve_num_blocks(CacheConfig(**cache), limits, groups, max_model_len, sharding.make_mesh(1))


def test_a_window_needs_no_more_than_itself_and_a_step() -> None:
    """4 sequences: 1024 / 16 blocks each, but (128 + 64) / 16 + 1 where 128 tokens are seen; on a grid of 64."""
    assert blocks([group(1, 8), group(1, 8, window=128)], 1024) == [256, 64]
    assert blocks([group(1, 8, window=5000)], 1024) == [256], "never more than the whole sequence"


def test_what_was_asked_for_is_given() -> None:
    assert blocks([group(1, 8), group(1, 8, window=32)], 1024, num_kv_blocks=7) == [7, 7]


def test_the_budget_is_kept_and_one_sequence_always_fits() -> None:
    big = group(30, 4096)
    [count] = blocks([big], 8192)
    per_block = 16 * 30 * 2 * 4096 * 4
    assert (512 <= count < 4 * 512 and (count - 64) * per_block <= CPU_POOL_BYTES) or count == 512
    [int8_count] = blocks([group(30, 4096, dtype="int8")], 8192)
    assert int8_count > count, "int8 takes a fourth, so that more fits"
