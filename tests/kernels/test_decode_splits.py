"""What the decode kernel is told before it runs: tile sizes for every shape, and who computes what. No kernel runs here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.paged_attention.mosaic.config import CANDIDATES, MAX_PARTIAL_SHARE, Config, fits, heads_of, pick_config, shared_bytes
from pallas_kernels.paged_attention.mosaic.splits import FIELDS, Items, every_token, most_splits, rows_of_one, work_of
from pallas_kernels.paged_attention.mosaic.tiles import Cache
from pallas_kernels.paged_attention.specs import DECODE_SPECS

H200 = Device(kind="NVIDIA H200", num_cores=132)
CONFIG = Config(tile_keys=64, num_stages=2, num_query_slots=2, min_split_keys=256, max_splits=4, blocks_per_core=1)


def cache_of(key_dim: int, value_dim: int, dtype: str, block_size: int, is_latent: bool) -> Cache:
    keys = SimpleNamespace(shape=(1, 1, block_size, key_dim), dtype=jnp.dtype(dtype))
    values = None if is_latent else SimpleNamespace(shape=(1, 1, block_size, value_dim), dtype=jnp.dtype(dtype))
    return Cache.of(keys, values, value_dim if is_latent else None)


def check(cache: Cache, group: int) -> None:
    """What the kernel relies on."""
    config = pick_config(cache, group, H200)
    heads = heads_of(cache, group)
    assert fits(cache, config, heads) and shared_bytes(cache, config, heads) <= MAX_SHARED_BYTES
    assert heads.parts * heads.live == group * cache.num_kv_heads and heads.parts % cache.num_kv_heads == 0
    assert heads.live <= heads.tile <= 64 and heads.tile % 8 == 0
    assert config.tile_keys % 64 == 0 and config.min_split_keys % config.tile_keys == 0
    assert config.num_stages >= 2
    partial = 2 * 4 * group * cache.value_dim
    assert partial <= MAX_PARTIAL_SHARE * config.min_split_keys * cache.bytes_per_key
    # Accumulators of the products and the sums, of 255 registers that a thread has.
    assert heads.tile * (cache.value_columns + 3 * config.tile_keys) // 128 <= 192


def test_there_is_a_config_for_every_spec() -> None:
    for spec in DECODE_SPECS:
        sizes = (spec.head_dim, spec.value_dim or spec.head_dim, spec.cache_dtype, spec.block_size, spec.is_latent)
        check(cache_of(*sizes), spec.num_heads // spec.num_kv_heads)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_there_is_a_config_for_every_shape(dtype: str) -> None:
    dims = [*range(16, 257, 16)]
    pairs = [(dim, dim) for dim in dims] + [(192, 128), (128, 64), (64, 256), (256, 16)]
    for (key_dim, value_dim), group, block_size in itertools.product(pairs, (1, 2, 4, 5, 7, 8, 12, 16, 32, 64, 71, 128), (8, 16, 64, 256)):
        check(cache_of(key_dim, value_dim, dtype, block_size, False), group)
    for key_dim, value_dim in ((576, 512), (288, 256), (192, 128), (48, 32)):
        for group in (1, 8, 16, 20, 64, 128):
            check(cache_of(key_dim, value_dim, dtype, 16, True), group)


def test_config_is_a_table_entry_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {name: getattr(CONFIG, name) for name in Config.__slots__}
    monkeypatch.setattr("pallas_kernels.common.tuned.lookup", lambda operation, kind, key: entry if "key_dim=128" in key else None)
    assert pick_config(cache_of(128, 128, "bfloat16", 16, False), 4, H200) == CONFIG
    assert pick_config(cache_of(64, 64, "bfloat16", 16, False), 4, H200) != CONFIG


def test_candidates_fit_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that asks for too much is refused, not compiled."""
    cache = cache_of(128, 128, "bfloat16", 16, False)
    heads = heads_of(cache, 4)
    for config in CANDIDATES:
        monkeypatch.setattr(
            "pallas_kernels.common.tuned.lookup", lambda *_, config=config: {n: getattr(config, n) for n in Config.__slots__}
        )
        if fits(cache, config, heads):
            assert pick_config(cache, 4, H200) == config
        else:
            with pytest.raises(UnsupportedByKernel, match="does not fit"):
                pick_config(cache, 4, H200)
    assert 10 < sum(fits(cache, config, heads) for config in CANDIDATES) < len(CANDIDATES)


def test_what_does_not_fit_is_refused() -> None:
    wide = replace(cache_of(576, 512, "bfloat16", 16, True), key_dim=1152)
    with pytest.raises(UnsupportedByKernel, match="two tiles"):
        pick_config(wide, 16, H200)


def items_of(ends: list[int], live: list[bool] | None = None) -> Items:
    number = jnp.arange(len(ends), dtype=jnp.int32)
    return Items(number, number, jnp.array(ends, jnp.int32), jnp.array(live or [True] * len(ends)))


def entries(items: Items, window: int | None = None, most_keys: int = 4096) -> list[dict[str, int]]:
    work = work_of(items, CONFIG, window, most_keys)
    count = int(work.count[0])
    assert count <= work.entries.shape[0]
    return [dict(zip(FIELDS, map(int, row), strict=True)) for row in np.asarray(work.entries)[:count]]


@pytest.mark.parametrize("window", [None, 1, 70, 300])
def test_every_key_that_is_seen_lies_in_one_entry(window: int | None) -> None:
    ends = [0, 1, 63, 64, 65, 255, 256, 511, 512, 513, 1000, 1024, 2048, 4000, 4096]
    found = entries(items_of(ends), window)
    for item, end in enumerate(ends):
        mine = [entry for entry in found if entry["token"] == item]
        first = 0 if window is None else max(0, end - window)
        assert all((entry["first"], entry["end"], entry["num_splits"]) == (first, end, len(mine)) for entry in mine)
        tiles = [tile for entry in mine for tile in range(entry["first_tile"], entry["end_tile"])]
        assert tiles == list(range(first // 64, -(-end // 64)))
        assert len(mine) == 1 or all(entry["end_tile"] - entry["first_tile"] >= 3 for entry in mine)
        assert 1 <= len(mine) <= CONFIG.max_splits


def test_how_an_item_is_split_does_not_depend_on_the_batch() -> None:
    ends = [700, 1, 4096, 1500, 0, 333]
    together = entries(items_of(ends))
    for item, end in enumerate(ends):
        mine = [entry | {"token": 0, "row": 0} for entry in together if entry["token"] == item]
        assert entries(items_of([end]), most_keys=-(-max(end, 1) // 64) * 64) == mine


def test_items_that_are_not_live_have_no_entries() -> None:
    found = entries(items_of([700, 1, 333], [False, True, False]))
    assert [entry["token"] for entry in found] == [1]
    assert int(work_of(items_of([5, 6], [False, False]), CONFIG, None, 64).count[0]) == 0


def test_merges_name_the_entries_of_each_item() -> None:
    work = work_of(items_of([700, 1, 4096]), CONFIG, None, 4096)
    tokens = np.asarray(work.entries)[:, 0]
    for token, first, count in np.asarray(work.merges):
        assert (tokens[first : first + count] == token).all()
        assert first == 0 or tokens[first - 1] != token


def test_bound_on_splits_is_reached() -> None:
    assert most_splits(CONFIG, 4096) == 4 and most_splits(CONFIG, 511) == 2 and most_splits(CONFIG, 200) == 1


def test_items_of_a_batch() -> None:
    """Rows of 2, 0, 1 and 1 queries, and two tokens of padding."""
    starts, lens = jnp.array([0, 2, 2, 3, 4], jnp.int32), jnp.array([9, 0, 5, 7], jnp.int32)
    tokens = every_token(6, starts, lens)
    assert tokens.end.tolist() == [8, 9, 5, 7, 0, 0]
    assert tokens.row.tolist()[:4] == [0, 0, 2, 3]
    rows = rows_of_one(starts, lens)
    assert rows.is_live.tolist() == [False, False, True, True]
    assert rows.token.tolist()[2:] == [2, 3] and rows.end.tolist()[2:] == [5, 7]
