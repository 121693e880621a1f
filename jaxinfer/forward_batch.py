"""The arrays that one compiled step reads.

Shape letters: T tokens in the step, B rows, M rows of logits, P blocks per row, G KV groups, R slots of DecodeState.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32


@dataclass(frozen=True, order=True, slots=True)
class StepSpec:
    """The shape of a compiled step: tokens, rows, rows of logits."""

    num_tokens: int
    num_rows: int
    num_logit_rows: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch: row b owns tokens query_start_loc[b]:query_start_loc[b + 1].

    Padding tokens lie after the last row, write to the trash block and belong to the trash slot; padding rows have
    no tokens and context 0.
    """

    token_ids: Int32[Array, "T"]
    positions: Int32[Array, "T"]
    token_slots: Int32[Array, "T"]
    """Slot of DecodeState that each token's sequence holds."""
    is_fed_back: Int32[Array, "T"]
    """1: the token was sampled by an earlier step and is read from DecodeState.last_tokens; token_ids is ignored."""
    slot_mapping: Int32[Array, "G T"]
    """Where each token's K and V go: block * block_size + offset."""
    block_tables: Int32[Array, "G B P"]
    query_start_loc: Int32[Array, "B1"]
    context_lens: Int32[Array, "B"]
    logits_indices: Int32[Array, "M"]
    """Tokens whose logits are wanted."""
    attention_implementation: str | None = field(default=None, metadata={"static": True})
    """Which implementation of attention this step takes, and no other; None: the fastest that runs. Part of the program, not an
    array: it is a choice for the step and no layer's own."""


def field_shapes(spec: StepSpec, num_groups: int, max_blocks_per_row: int) -> dict[str, tuple[int, ...]]:
    """The shape of each field of a ForwardBatch, in the order in which they lie in the packed buffer."""
    t, b, m = spec.num_tokens, spec.num_rows, spec.num_logit_rows
    return {
        "token_ids": (t,),
        "positions": (t,),
        "token_slots": (t,),
        "is_fed_back": (t,),
        "slot_mapping": (num_groups, t),
        "block_tables": (num_groups, b, max_blocks_per_row),
        "query_start_loc": (b + 1,),
        "context_lens": (b,),
        "logits_indices": (m,),
    }


def unpack(
    packed: Int32[Array, "Z"], spec: StepSpec, num_groups: int, max_blocks_per_row: int, attention_implementation: str | None = None
) -> ForwardBatch:
    """The ForwardBatch in a packed buffer, inside a compiled step."""
    fields = unpack_fields(packed, field_shapes(spec, num_groups, max_blocks_per_row))
    return ForwardBatch(**fields, attention_implementation=attention_implementation)


def packed_views(shapes: dict[str, tuple[int, ...]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A zeroed int32 buffer, one transfer to the device, and views of it by field name."""
    buffer = np.zeros(sum(math.prod(shape) for shape in shapes.values()), np.int32)
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = buffer[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return buffer, views


def unpack_fields(packed: Int32[Array, "Z"], shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """The fields of a packed buffer, inside a compiled program."""
    fields, start = {}, 0
    for name, shape in shapes.items():
        fields[name] = packed[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return fields


def fed_tokens(batch: ForwardBatch, last_tokens: Int32[Array, "R"]) -> Int32[Array, "T"]:
    """The token ids that enter the model: those of the batch, or of the device where the host does not know them yet."""
    is_fed_back: Bool[Array, "T"] = batch.is_fed_back > 0
    return jnp.where(is_fed_back, last_tokens[batch.token_slots], batch.token_ids)
