"""The sampler's part of a step, built on the host: one packed buffer, and two wide arrays that are mostly absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxinfer.forward_batch import packed_views, unpack_fields
from jaxinfer.request import SamplingParams
from jaxinfer.sampling.tensors import SamplingTensors, pack_flags

MAX_BIASES = 512
"""Biased or banned ids of one row: logit_bias (300), stop ids before min_tokens (64 and the model's own), bad words (128)."""

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class SamplingRow(NamedTuple):
    """What one row of logits asks of the sampler.

    `target_id` is set for prompt log-probabilities: nothing is sampled then. `biases` are added to logits, -inf bans.
    `position` is the index of the token that is sampled.
    """

    params: SamplingParams
    slot: int
    key: tuple[int, int]
    position: int
    target_id: int | None
    biases: Mapping[int, float]

    @property
    def needs_full(self) -> bool:
        """Whether taking the largest logit is not enough."""
        return self.target_id is not None or bool(self.biases) or needs_full(self.params)


def needs_full(params: SamplingParams) -> bool:
    """Whether parameters alone ask for more than the largest logit."""
    return not params.is_greedy or params.logprobs is not None or params.allowed_token_ids is not None or params.has_penalties


def field_shapes(num_rows: int) -> dict[str, tuple[int, ...]]:
    """Fields of the packed buffer, in order; floats and keys are stored by their bits."""
    single = ("slots", *_FLOATS, "top_k", "position", "target_ids", "is_target")
    return {name: (num_rows,) for name in single} | {"key": (num_rows, 2), "flags": (5,)}


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Host arrays of one step's sampler; None: nobody asked, the runner passes its empty array."""

    packed: np.ndarray
    biases: np.ndarray | None
    allowed_mask: np.ndarray | None
    needs_full: bool


def build_sampling_batch(rows: Sequence[SamplingRow], num_rows: int, trash_slot: int, vocab_size: int) -> SamplingBatch:
    """Pack the rows; the rest up to `num_rows` are greedy rows of the trash slot."""
    packed, views = packed_views(field_shapes(num_rows))
    count = len(rows)
    views["slots"][:count] = [row.slot for row in rows]
    views["slots"][count:] = trash_slot
    if not any(row.needs_full for row in rows):
        return SamplingBatch(packed, None, None, needs_full=False)
    floats = {name: views[name].view(np.float32) for name in _FLOATS}
    floats["top_p"][count:] = 1.0
    floats["repetition_penalty"][count:] = 1.0
    params = [row.params for row in rows]
    for name in _FLOATS[1:]:
        floats[name][:count] = [getattr(one, name) for one in params]
    floats["temperature"][:count] = [0.0 if one.is_greedy else one.temperature for one in params]
    # top_k of the whole vocabulary and more is "off"; the request's integer may not even fit into 32 bits.
    views["top_k"][:count] = [one.top_k if 0 < one.top_k < vocab_size else 0 for one in params]
    views["position"][:count] = [row.position for row in rows]
    views["key"][:count] = np.array([row.key for row in rows], np.uint32).view(np.int32)
    views["is_target"][:count] = [row.target_id is not None for row in rows]
    views["target_ids"][:count] = [row.target_id or 0 for row in rows]
    biases = _biases(rows, num_rows)
    mask = _allowed_mask(rows, num_rows, vocab_size)
    views["flags"][:] = pack_flags(
        any_penalties=any(one.has_penalties for one in params),
        any_bias=biases is not None,
        any_mask=mask is not None,
        any_truncation=bool((views["top_k"] > 0).any() or (floats["top_p"] < 1.0).any()),
        any_logprobs=any(row.params.logprobs is not None or row.target_id is not None for row in rows),
    )
    return SamplingBatch(packed, biases, mask, needs_full=True)


def empty_biases(num_rows: int) -> np.ndarray:
    """No biases: int32 [M, 2, MAX_BIASES], ids then the values' bits. Padding ids lie past every vocabulary."""
    biases = np.zeros((num_rows, 2, MAX_BIASES), np.int32)
    biases[:, 0] = np.iinfo(np.int32).max
    return biases


def empty_mask(num_rows: int, vocab_size: int) -> np.ndarray:
    """Everything allowed: uint32 [M, ceil(V / 32)]."""
    return np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)


def _biases(rows: Sequence[SamplingRow], num_rows: int) -> np.ndarray | None:
    if not any(row.biases for row in rows):
        return None
    biases = empty_biases(num_rows)
    for index, row in enumerate(rows):
        count = len(row.biases)
        biases[index, 0, :count] = list(row.biases)
        biases[index, 1, :count] = np.array(list(row.biases.values()), np.float32).view(np.int32)
    return biases


def _allowed_mask(rows: Sequence[SamplingRow], num_rows: int, vocab_size: int) -> np.ndarray | None:
    if all(row.params.allowed_token_ids is None for row in rows):
        return None
    mask = empty_mask(num_rows, vocab_size)
    for index, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            bits = np.zeros(mask.shape[1] * 32, np.uint8)
            bits[list(row.params.allowed_token_ids)] = 1
            mask[index] = np.packbits(bits, bitorder="little").view(np.uint32)
    return mask


def unpack_sampling(
    packed: Int32[Array, "Z"], biases: Int32[Array, "M 2 C"], allowed_mask: Array, num_rows: int
) -> tuple[SamplingTensors, Int32[Array, "M"]]:
    """SamplingTensors and each row's slot, inside a compiled program."""
    fields = unpack_fields(packed, field_shapes(num_rows))
    floats: dict[str, Float32[Array, "M"]] = {name: lax.bitcast_convert_type(fields[name], jnp.float32) for name in _FLOATS}
    tensors = SamplingTensors(
        **floats,
        top_k=fields["top_k"],
        key=lax.bitcast_convert_type(fields["key"], jnp.uint32),
        position=fields["position"],
        bias_ids=biases[:, 0],
        bias_values=lax.bitcast_convert_type(biases[:, 1], jnp.float32),
        allowed_mask=allowed_mask,
        target_ids=fields["target_ids"],
        is_target=fields["is_target"] != 0,
        flags=fields["flags"],
    )
    return tensors, fields["slots"]
