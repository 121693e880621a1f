"""The operations in numpy float64, written apart from the references they judge."""

from __future__ import annotations

import numpy as np


def paged_attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    block_tables: np.ndarray,
    query_start_loc: np.ndarray,
    context_lens: np.ndarray,
    *,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """One query at a time; rows of the result that belong to no query are zero."""
    output = np.zeros(q.shape, np.float64)
    block_size = k_blocks.shape[2]
    group = q.shape[1] // k_blocks.shape[0]
    for row in range(len(context_lens)):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for token in range(first, last):
            end = context_lens[row] - (last - token) + 1
            keys = range(max(0, end - window) if window else 0, end)
            places = [(block_tables[row, key // block_size], key % block_size) for key in keys]
            for head in range(q.shape[1]):
                k = np.array([k_blocks[head // group, block, slot] for block, slot in places], np.float64)
                v = np.array([v_blocks[head // group, block, slot] for block, slot in places], np.float64)
                scores = k @ q[token, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                output[token, head] = weights @ v / weights.sum()
    return output


def int8_matmul(x: np.ndarray, weight: np.ndarray, weight_scale: np.ndarray, *, num_terms: int) -> np.ndarray:
    """Rounding in float32 as specified, products in integers, scales in float64."""
    output = np.zeros((x.shape[0], weight.shape[0]))
    for row, values in enumerate(x.astype(np.float32)):
        largest = np.abs(values).max()
        scale = np.float32(largest / np.float32(127)) if largest else np.float32(1)
        steps = (values / scale).astype(np.float32)
        first = np.clip(np.rint(steps), -127, 127)
        total = (weight.astype(np.int64) @ first.astype(np.int64)).astype(np.float64)
        if num_terms == 2:
            second = np.clip(np.rint((steps - first) * np.float32(254)), -127, 127)
            total += (weight.astype(np.int64) @ second.astype(np.int64)) / 254
        output[row] = total * float(scale) * weight_scale.astype(np.float64)
    return output


def write_kv(blocks: np.ndarray, new: np.ndarray, slot_mapping: np.ndarray) -> np.ndarray:
    """One token at a time."""
    written = blocks.copy()
    block_size = blocks.shape[2]
    for vectors, slot in zip(new, slot_mapping, strict=True):
        if slot < blocks.shape[1] * block_size:
            written[:, slot // block_size, slot % block_size] = vectors
    return written
