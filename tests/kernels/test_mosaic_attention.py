"""Decoding attention in Mosaic GPU, in the interpreter: numbers, races, bits in any batch; and broken forms of it, which must be noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.api import OPERATION, paged_attention
from pallas_kernels.paged_attention.mosaic import decode_kernel, merge, tiles
from pallas_kernels.paged_attention.specs import DECODE_SPECS, Spec, make_arguments, static_arguments
from tests.kernels.interpreted_attention import expect, run

pytestmark = pytest.mark.kernels

BY_NAME = {spec.name: spec for spec in DECODE_SPECS}


@pytest.mark.parametrize("name", BY_NAME)
def test_output_equals_the_oracle(name: str) -> None:
    spec = BY_NAME[name]
    arguments = make_arguments(spec)
    output, counted = run(spec, arguments)
    expected = expect(spec, arguments)
    assert np.isfinite(output).all(), "padding must stay finite: the next layer computes with it"
    assert not output[len(expected) :].any()
    output = output[: len(expected)]
    assert row_error(output, expected) <= spec.limit
    for broken in (np.zeros_like(output), np.roll(output, 1, axis=-1)):
        assert row_error(broken, expected) > spec.limit, "the comparison would accept a broken kernel"
    assert not counted.has_races


BITS = {
    "bfloat16": Spec(name="bfloat16", rows=((1, 1700), (1, 70), (1, 1100)), num_heads=2, num_kv_heads=1, block_size=64, head_dim=64),
    "everything": Spec(
        name="everything", rows=((1, 70), (1, 200)), cache_dtype="int8", has_sinks=True, soft_cap=2.0, window=70, head_dim=64
    ),
}


@pytest.mark.parametrize("name", BITS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    """Alone, with a block table of another width, and beside a row of several queries, which takes the other way in."""
    spec = replace(BITS[name], dtype="bfloat16", cache_dtype="bfloat16" if BITS[name].cache_dtype == "float32" else BITS[name].cache_dtype)
    arguments = make_arguments(spec)
    together, _ = run(spec, arguments, detect_races=False)
    tables, keys = arguments["block_tables"], arguments["context_lens"]
    pad = np.zeros((1, 40), np.int32)
    for row in range(len(spec.rows)):
        alone = arguments | {
            "q": arguments["q"][row : row + 1],
            "block_tables": np.concatenate([tables[row : row + 1], pad], axis=1),
            "query_start_loc": np.array([0, 1], np.int32),
            "context_lens": keys[row : row + 1],
        }
        np.testing.assert_array_equal(run(spec, alone, detect_races=False)[0][0], together[row])
    chunk = arguments | {
        "q": np.concatenate([arguments["q"][:1], arguments["q"][:1], arguments["q"][1:2]]),
        "block_tables": tables[[0, 1]],
        "query_start_loc": np.array([0, 2, 3], np.int32),
        "context_lens": keys[[0, 1]],
    }
    np.testing.assert_array_equal(run(spec, chunk, detect_races=False)[0][2], together[1])


def test_many_entries_for_few_thread_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes through several entries, with the stages and barriers of the one before."""
    monkeypatch.setattr("pallas_kernels.common.mosaic.H200_CORES", 1)
    spec = replace(BY_NAME["partial_blocks"], rows=((1, 143), (1, 1), (1, 16), (0, 0), (1, 64), (1, 65)))
    arguments = make_arguments(spec)
    output, counted = run(spec, arguments)
    assert row_error(output, expect(spec, arguments)) <= spec.limit
    assert not counted.has_races


def test_the_operation_runs_it_by_name() -> None:
    """Off a GPU the automatic choice passes it over."""
    spec = BY_NAME["sinks"]
    arguments = make_arguments(spec)
    output = np.asarray(paged_attention(**arguments, **static_arguments(spec), implementation="mosaic"), np.float32)
    assert row_error(output, expect(spec, arguments)) <= spec.limit
    assert OPERATION.choice(arguments, static_arguments(spec))[0] == "native"


# ---- broken kernels ----------------------------------------------------------------------------------------------------

LONG = Spec(
    name="long", rows=((1, 600),), num_heads=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", cache_dtype="bfloat16", block_size=64
)


def is_noticed(spec: Spec) -> bool:
    """By the numbers or by the race detector."""
    arguments = make_arguments(spec)
    output, counted = run(spec, arguments)
    return counted.has_races or row_error(output[: len(spec.rows)], expect(spec, arguments)) > spec.limit


def shifted_positions(*arguments: Any) -> Any:
    """As if keys began at 1."""
    return KEY_POSITIONS(*arguments) + 1


def next_blocks(cache: Any, tables: Any, row: Any, tile: Any, tile_keys: int) -> Any:
    """The blocks of the next tile."""
    return TILE_BLOCKS(cache, tables, row, tile + 1, tile_keys)


def unweighted(part: Any, part_highest: Any, part_total: Any, highest: Any, total: Any, weighted: Any) -> Any:
    """Partial results added without regard to what they are relative to."""
    _, added_total, added = ADD(part, part_highest, part_total, highest * 0, total, weighted)
    return highest * 0, added_total, added


KEY_POSITIONS, TILE_BLOCKS, ADD = tiles.key_positions, tiles.tile_blocks, merge._add
AWAIT_TILE, RELEASE_TILE, ADD_TILE = decode_kernel.await_tile, decode_kernel.release_tile, decode_kernel._add_tile


def late(shared: Any, options: Any, entry: Any, tile: Any, slot: Any, *rest: Any) -> Any:
    """A tile that is awaited when it has been read."""

    def await_and_release(free: Any, slot: Any) -> None:
        AWAIT_TILE(shared.stages.full, slot)
        RELEASE_TILE(free, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "await_tile", lambda full, slot: None)
        patch.setattr(decode_kernel, "release_tile", await_and_release)
        return ADD_TILE(shared, options, entry, tile, slot, *rest)


def early(shared: Any, options: Any, entry: Any, tile: Any, slot: Any, *rest: Any) -> Any:
    """A stage that is given back before it was read."""

    def await_and_release(full: Any, slot: Any) -> None:
        AWAIT_TILE(full, slot)
        RELEASE_TILE(shared.stages.free, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "await_tile", await_and_release)
        patch.setattr(decode_kernel, "release_tile", lambda free, slot: None)
        return ADD_TILE(shared, options, entry, tile, slot, *rest)


BROKEN = {
    "read before the copies have landed": (LONG, decode_kernel, "_add_tile", late),
    "refilled while it is read": (LONG, decode_kernel, "_add_tile", early),
    "weights not published": (LONG, decode_kernel, "publish", lambda: None),
    "values from the keys": (BY_NAME["partial_blocks"], decode_kernel, "value_stage", lambda stages, cache: stages.keys),
    "mask off by one": (BY_NAME["partial_blocks"], tiles, "key_positions", shifted_positions),
    "blocks off by one": (LONG, tiles, "tile_blocks", next_blocks),
    "NaN not cleared": (BY_NAME["window"], tiles, "only_seen", lambda vectors, first_key, first, end: vectors),
    "parts added as they are": (BY_NAME["split"], merge, "_add", unweighted),
}


def test_what_is_broken_below_is_sound_before() -> None:
    assert not is_noticed(LONG)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, module, seam, replacement = BROKEN[fault]
    monkeypatch.setattr(module, seam, replacement)
    assert is_noticed(spec)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache_dtype": "float32"}, "the cache must be bfloat16 or int8 or float8_e4m3fn, got float32"),
        ({"block_size": 4}, "the block size must be one of 8, 16, 32, 64, 128, 256, got 4"),
        ({"head_dim": 72}, "multiples of 16 up to 256, got 72 and 72"),
        ({"head_dim": 272}, "multiples of 16 up to 256, got 272 and 272"),
    ],
)
def test_what_it_cannot_do_is_refused(changed: dict[str, Any], message: str) -> None:
    spec = replace(BY_NAME["partial_blocks"], **changed)
    with pytest.raises(UnsupportedByKernel, match=message):
        mosaic.paged_attention(**make_arguments(spec), **static_arguments(spec), interpret=True)


def test_off_a_gpu_it_refuses_unless_it_may_be_interpreted() -> None:
    spec = BY_NAME["partial_blocks"]
    with pytest.raises(UnsupportedByKernel, match="needs a Hopper GPU"):
        mosaic.paged_attention(**make_arguments(spec), **static_arguments(spec))
