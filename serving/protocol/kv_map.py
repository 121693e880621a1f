"""The JSON of /debug/kv.json: blocks packed into bytes, tables into runs, so that 100,000 blocks stay small."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jaxinfer.client import EngineSnapshot
from jaxinfer.kv.kv_map import KVGroupMap, KVMap, SequenceBlocks

CACHED_BIT = 0x80
MAX_HOLDERS_SHOWN = 0x7F
MAX_BARE_SEQUENCES = 200
"""Of sequences without blocks, such as those of a long queue, only the first ones are listed."""


def kv_json(kv_map: KVMap, snapshot: EngineSnapshot) -> dict[str, Any]:
    """Everything that the page draws.

    `groups[].blocks` is base64 of one byte per block, block 1 first: how many hold it (at most 127), plus 128 when its
    content can be found by its prefix. `sequences[].block_runs` is first block, count, first block, count, ...
    """
    bare = [seq for seq in kv_map.sequences if not seq.block_ids]
    shown = [seq for seq in kv_map.sequences if seq.block_ids] + bare[:MAX_BARE_SEQUENCES]
    return {
        "block_size": kv_map.block_size,
        "groups": [_group(group) for group in kv_map.groups],
        "sequences": [_sequence(seq) for seq in shown],
        "num_sequences": dict(Counter(seq.state for seq in kv_map.sequences)),
        "host_slots": {"total": kv_map.host_slots_total, "cached": kv_map.host_slots_cached, "held": kv_map.host_slots_held},
        "snapshot": asdict(snapshot),
    }


def _group(group: KVGroupMap) -> dict[str, Any]:
    states = bytes(
        min(holders, MAX_HOLDERS_SHOWN) | (CACHED_BIT if is_cached else 0)
        for holders, is_cached in zip(group.holders, group.is_cached, strict=True)
    )
    return {"kind": group.kind, "num_blocks": group.num_blocks, "blocks": base64.b64encode(states).decode()}


def _sequence(seq: SequenceBlocks) -> dict[str, Any]:
    held = [block_id for block_id in seq.block_ids if block_id]  # 0 stands for a block that a window has left behind
    return {
        "request_id": seq.request_id,
        "index": seq.index,
        "state": seq.state,
        "num_tokens": seq.num_tokens,
        "num_computed_tokens": seq.num_computed_tokens,
        "num_cached_tokens": seq.num_cached_tokens,
        "num_blocks": len(held),
        "block_runs": block_runs(held),
    }


def block_runs(block_ids: Sequence[int]) -> list[int]:
    """Ids in their order as runs of neighbours: [7, 8, 9, 3] is [7, 3, 3, 1]."""
    runs: list[int] = []
    for block_id in block_ids:
        if runs and runs[-2] + runs[-1] == block_id:
            runs[-1] += 1
        else:
            runs += [block_id, 1]
    return runs
