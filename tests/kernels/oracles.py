"""The operations in numpy float64, written apart from the references they judge."""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.packed_matmul import PackedMatrix


def paged_attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray | None,
    block_tables: np.ndarray,
    query_start_loc: np.ndarray,
    context_lens: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scales: np.ndarray | None = None,
    v_scales: np.ndarray | None = None,
    value_dim: int | None = None,
) -> np.ndarray:
    """One query at a time; rows of the result that belong to no query are zero."""
    k_pool = _dequantized(k_blocks, k_scales)
    v_pool = k_pool[..., :value_dim] if v_blocks is None else _dequantized(v_blocks, v_scales)
    output = np.zeros((*q.shape[:2], v_pool.shape[3]), np.float64)
    block_size = k_blocks.shape[2]
    group = q.shape[1] // k_blocks.shape[0]
    for row in range(len(context_lens)):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for token in range(first, last):
            end = context_lens[row] - (last - token) + 1
            keys = range(max(0, end - window) if window else 0, end)
            places = [(block_tables[row, key // block_size], key % block_size) for key in keys]
            for head in range(q.shape[1]):
                k = np.array([k_pool[head // group, block, slot] for block, slot in places])
                v = np.array([v_pool[head // group, block, slot] for block, slot in places])
                scores = k @ q[token, head].astype(np.float64) * scale
                if soft_cap is not None:
                    scores = np.tanh(scores / soft_cap) * soft_cap
                if sinks is not None:  # one more key, whose value is zero
                    scores, v = np.append(scores, np.float64(sinks[head])), np.vstack([v, np.zeros(v.shape[1])])
                weights = np.exp(scores - scores.max())
                output[token, head] = weights @ v / weights.sum()
    return output


def _dequantized(blocks: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    return blocks.astype(np.float64) * (1.0 if scales is None else scales.astype(np.float64)[..., None])


def int8_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    weight_scale: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    num_terms: int,
    activation: str | None = None,
    out_dtype: str = "float32",
) -> np.ndarray:
    """Rounding in float32 as specified, products in integers, all else in float64; the result is not rounded to `out_dtype`."""
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
    return activated(output if bias is None else output + bias.astype(np.float64), activation)


def activated(x: np.ndarray, activation: str | None) -> np.ndarray:
    """The textbook formulas, number by number where numpy has none."""
    match activation:
        case None:
            return x
        case "silu":
            return x / (1 + np.exp(-np.maximum(x, -700)))
        case "gelu":
            return x * np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in x.flat]).reshape(x.shape)
        case "gelu_tanh":
            return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    raise ValueError(f"no oracle for {activation!r}")


def write_kv(
    k_blocks: np.ndarray,
    v_blocks: np.ndarray | None,
    k: np.ndarray,
    v: np.ndarray | None,
    slot_mapping: np.ndarray,
    k_scales: np.ndarray | None = None,
    v_scales: np.ndarray | None = None,
) -> tuple[np.ndarray | None, ...]:
    """Keys, values and their scales, one vector at a time."""
    keys, key_scales = _written(k_blocks, k, slot_mapping, k_scales)
    values, value_scales = (None, None) if v_blocks is None or v is None else _written(v_blocks, v, slot_mapping, v_scales)
    return keys, values, key_scales, value_scales


def _written(
    blocks: np.ndarray, new: np.ndarray, slot_mapping: np.ndarray, scales: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Numbers of one byte are rounded from float32 products, as specified."""
    written, written_scales = blocks.copy(), None if scales is None else scales.copy()
    block_size = blocks.shape[2]
    is_int8 = blocks.dtype == np.int8
    for vectors, slot in zip(new, slot_mapping, strict=True):
        if slot >= blocks.shape[1] * block_size:
            continue
        for head, vector in enumerate(vectors.astype(np.float32)):
            place = head, slot // block_size, slot % block_size
            if written_scales is None:
                written[place] = vector
                continue
            largest = np.abs(vector).max()
            scale = largest * (np.float32(1) / np.float32(127 if is_int8 else 448)) if largest > 2.0**-100 else np.float32(1)
            numbers = vector * (np.float32(1) / scale)
            written_scales[place] = scale
            written[place] = np.clip(np.rint(numbers), -127, 127) if is_int8 else nearest_float8(numbers).view(blocks.dtype)
    return written, written_scales


def nearest_float8(numbers: np.ndarray) -> np.ndarray:
    """The codes (uint8) of the nearest float8_e4m3fn, of two the one with an even mantissa; the largest beyond 448."""
    codes = np.concatenate([np.arange(0, 127, 2), np.arange(1, 127, 2)]).astype(np.uint8)  # of two equally near the first is taken
    nearest = codes[np.argmin(np.abs(np.abs(numbers.astype(np.float64))[..., None] - float8_e4m3fn(codes)), axis=-1)]
    return (nearest + np.where(np.signbit(numbers), 128, 0)).astype(np.uint8)


def packed_matrix(matrix: PackedMatrix) -> np.ndarray:
    """Every weight by itself, float64, from the place that the layout gives to its bits."""
    num_inputs = matrix.shape[-1]
    k = np.arange(num_inputs)
    if matrix.bits < 8:
        run, place = k // 32, k % 32
        codes = (matrix.codes[:, run, place % 16] >> np.where(place < 16, 0, 4).astype(np.uint8)) & 15
        for plane in range(matrix.bits - 4):
            codes = codes + (((matrix.high[:, run, plane, place // 8] >> (place % 8).astype(np.uint8)) & 1) << (4 + plane))
        values = np.array(matrix.codebook)[codes] if matrix.codebook is not None else codes.astype(np.float64)
    elif matrix.codes.dtype.itemsize == 1 and matrix.codes.dtype.kind not in "iu":
        values = float8_e4m3fn(matrix.codes.view(np.uint8))
    else:
        values = matrix.codes.astype(np.float64)
    group = k // matrix.group_size if matrix.group_size else np.zeros(num_inputs, int)

    def per_weight(small: np.ndarray, large: np.ndarray | None) -> np.ndarray:
        numbers = small.astype(np.float64)[:, group]
        return numbers if large is None else numbers * large.astype(np.float64)[:, group // (small.shape[1] // large.shape[1])]

    zeros = matrix.zero + (matrix.zeros[:, group].astype(np.float64) if matrix.zeros is not None else 0)
    weights = (values - zeros) * per_weight(matrix.scales, matrix.super_scales)
    return weights + per_weight(matrix.offsets, matrix.super_offsets) if matrix.offsets is not None else weights


def float8_e4m3fn(codes: np.ndarray) -> np.ndarray:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; exponent 0 is a denormal."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.float64), (codes & 7).astype(np.float64)
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(codes & 128, -size, size)


def packed_matmul(x: np.ndarray, matrix: PackedMatrix) -> np.ndarray:
    """The product with the dequantized matrix."""
    return x.astype(np.float64) @ packed_matrix(matrix).T
