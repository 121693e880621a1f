"""What a step tells the penalties' state: the tokens that it feeds, and those of sequences that came back without being fed."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxinfer.forward_batch import packed_views, unpack_fields
from jaxinfer.messages import ScheduledRequest
from jaxinfer.sampling.penalties import PenaltyState, update_penalty_state


def field_shapes(max_tokens: int, num_slots: int) -> dict[str, tuple[int, ...]]:
    """Fields of the packed buffer, in order. `reset`: 1 for each slot that begins anew."""
    per_token = ("token_ids", "slots", "positions", "prompt_lens", "is_fed_back")
    return {name: (max_tokens,) for name in per_token} | {"reset": (num_slots,)}


def feed_penalty_state(state: PenaltyState, last_tokens: Int32[Array, " R"], packed: Int32[Array, " Z"], max_tokens: int) -> PenaltyState:
    """Record one buffer of `fed_token_buffers`, inside a compiled program; fed-back ids are those of `last_tokens`."""
    fields = unpack_fields(packed, field_shapes(max_tokens, last_tokens.shape[0]))
    token_ids = jnp.where(fields["is_fed_back"] > 0, last_tokens[fields["slots"]], fields["token_ids"])
    return update_penalty_state(state, token_ids, fields["slots"], fields["positions"], fields["prompt_lens"], fields["reset"] != 0)


def fed_token_buffers(scheduled: Sequence[ScheduledRequest], max_tokens: int, num_slots: int) -> list[Int32[np.ndarray, " Z"]]:
    """The tokens of a step's requests with penalties, `max_tokens` to a buffer; none when nobody has penalties.

    A sequence that is new in its slot brings the tokens before its first computed one with it. All slots that begin anew
    are in the first buffer: a reset empties the slot before that buffer's tokens are recorded.
    """
    rows = [request for request in scheduled if request.params.has_penalties]
    if not rows:
        return []
    counts = [len(request.resumed_token_ids) + len(request.token_ids) for request in rows]
    firsts = [request.num_computed_tokens - len(request.resumed_token_ids) for request in rows]
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    ends = np.cumsum(counts)
    tokens = {
        "token_ids": np.array([token for request in rows for token in (*request.resumed_token_ids, *request.token_ids)], np.int32),
        "slots": np.array([request.slot for request in rows])[row_of_token],
        "positions": np.arange(ends[-1]) + (np.array(firsts) - ends + counts)[row_of_token],
        "prompt_lens": np.array([request.num_prompt_tokens for request in rows])[row_of_token],
        "is_fed_back": np.zeros(ends[-1], np.int32),
    }
    tokens["is_fed_back"][ends - 1] = [request.is_fed_back for request in rows]
    buffers = []
    for start in range(0, ends[-1], max_tokens):
        buffer, views = packed_views(field_shapes(max_tokens, num_slots))
        views["slots"][:] = num_slots - 1  # the trash slot
        for name, values in tokens.items():
            part = values[start : start + max_tokens]
            views[name][: len(part)] = part
        if start == 0:
            views["reset"][[request.slot for request in rows if request.is_first_of_slot]] = 1
        buffers.append(buffer)
    return buffers
