"""SchedulerOutput -> the packed buffer of a compiled step, in numpy; and which shapes are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxinfer.forward_batch import StepSpec, field_shapes, packed_views
from jaxinfer.kv.block_pool import TRASH_BLOCK
from jaxinfer.kv.groups import ceil_div
from jaxinfer.messages import ScheduledRequest, SchedulerOutput, SeqId
from jaxinfer.request import RequestId, SamplingParams

MAX_PROMPT_LOGPROB_ROWS = 256
"""Rows of logits of the one shape that serves prompt log-probabilities; longer prompts take several steps."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that are compiled, smallest first."""

    specs: tuple[StepSpec, ...]
    max_num_logit_rows: int

    @classmethod
    def build(cls, max_num_seqs: int, max_num_batched_tokens: int, min_rows: int) -> Buckets:
        """Powers of two of tokens up to and exactly including `max_num_batched_tokens`.

        Never beyond it: padding a full chunk past the limit was seen to cost 97 % and give wrong tokens
        (tpu-inference#3466). A bucket of no more tokens than `max_num_seqs` needs no more rows than tokens; all
        larger ones take the full number of rows. `min_rows`: a float32 dot of fewer rows gives other bits on a CPU.
        """
        sizes, size = [], min_rows
        while size < max_num_batched_tokens:
            sizes.append(size)
            size *= 2
        sizes.append(max(max_num_batched_tokens, min_rows))
        specs = []
        for num_tokens in sizes:
            num_rows = min(num_tokens, max_num_seqs)
            # Two sizes of logits only: each costs the sampler's programs.
            specs.append(StepSpec(num_tokens, num_rows, min_rows if num_rows <= min_rows else max_num_seqs))
        max_rows = min(MAX_PROMPT_LOGPROB_ROWS, max_num_batched_tokens)
        if max_rows > specs[-1].num_logit_rows:
            specs.append(StepSpec(specs[-1].num_tokens, specs[-1].num_rows, max_rows))
        return cls(tuple(specs), specs[-1].num_logit_rows)

    def bucket_for(self, output: SchedulerOutput) -> StepSpec:
        """The smallest compiled shape that holds a step."""
        for spec in self.specs:
            if (
                output.num_tokens <= spec.num_tokens
                and len(output.scheduled) <= spec.num_rows
                and output.num_logit_rows <= spec.num_logit_rows
            ):
                return spec
        raise AssertionError(f"no compiled shape holds {output.num_tokens} tokens, {len(output.scheduled)} rows")


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the packed buffer needs to know beside the StepSpec."""

    num_groups: int
    max_blocks_per_row: int
    block_size: int
    num_slots: int
    """Rows of DecodeState; the last one, the trash slot, takes what padding writes."""

    @classmethod
    def build(cls, num_groups: int, max_model_len: int, block_size: int, max_num_seqs: int) -> BatchShape:
        """Tables wide enough for the longest sequence."""
        return cls(num_groups, ceil_div(max_model_len, block_size), block_size, max_num_seqs + 1)

    @property
    def trash_slot(self) -> int:
        """The slot of padding."""
        return self.num_slots - 1


class SlotTables:
    """The block tables of all slots as arrays, kept from step to step: a step converts only what is new.

    While a sequence holds its slot, its table changes at two places only: from the block on that a step writes to, as blocks
    are appended and a shared one is copied before it is written, and at the front, where a window leaves blocks behind.
    """

    def __init__(self, shape: BatchShape):
        self._block_size = shape.block_size
        self._tables = np.zeros((shape.num_groups, shape.num_slots, shape.max_blocks_per_row), np.int32)
        self._num_known = [[0] * shape.num_slots for _ in range(shape.num_groups)]
        self._num_dropped = [[0] * shape.num_slots for _ in range(shape.num_groups)]

    def update(self, request: ScheduledRequest) -> None:
        """Take over what changed since the last row of the same slot."""
        slot = request.slot
        first_written = request.num_computed_tokens // self._block_size
        for group, block_ids in enumerate(request.block_ids):
            if request.is_first_of_slot:
                self._tables[group, slot] = 0
                self._num_known[group][slot] = self._num_dropped[group][slot] = 0
            start, end = min(first_written, self._num_known[group][slot]), len(block_ids)
            if start < end:
                self._tables[group, slot, start:end] = block_ids[start:]
                self._num_known[group][slot] = end
            dropped = self._num_dropped[group][slot]
            if dropped < start and block_ids[dropped] == TRASH_BLOCK:
                while dropped < start and block_ids[dropped] == TRASH_BLOCK:
                    self._tables[group, slot, dropped] = TRASH_BLOCK
                    dropped += 1
                self._num_dropped[group][slot] = dropped

    def rows(self, slots: Int32[np.ndarray, "B"], num_blocks: int) -> Int32[np.ndarray, "G B num_blocks"]:
        """The first `num_blocks` entries of these slots' tables, a copy."""
        return self._tables[:, slots, :num_blocks]


class LogitRow(NamedTuple):
    """What one row of logits is for: scheduled request `row`, position of the token whose logits these are."""

    row: int
    position: int
    is_sampling: bool


def logit_rows(scheduled: Sequence[ScheduledRequest]) -> list[LogitRow]:
    """The rows of logits of a step: each request's prompt positions, then its sampled one."""
    rows = []
    for row, request in enumerate(scheduled):
        if request.prompt_logprob_positions:
            rows.extend(LogitRow(row, position, False) for position in request.prompt_logprob_positions)
        if request.is_sampling:
            rows.append(LogitRow(row, request.num_computed_tokens + len(request.token_ids) - 1, True))
    return rows


def bare_row(token_ids: list[int], start: int, tables: list[list[int]]) -> ScheduledRequest:
    """Tokens of no request from position `start` on, all of whose logits are wanted."""
    return ScheduledRequest(
        seq_id=SeqId(0),
        request_id=RequestId(""),
        index=0,
        generation=0,
        slot=0,
        token_ids=token_ids,
        num_computed_tokens=start,
        num_prompt_tokens=start + len(token_ids),
        num_output_tokens=0,
        block_ids=tables,
        is_sampling=False,
        is_first_of_slot=True,
        prompt_logprob_positions=range(start, start + len(token_ids)),
        params=SamplingParams(),
    )


def build_forward_batch(
    output: SchedulerOutput, rows: Sequence[LogitRow], spec: StepSpec, shape: BatchShape, tables: SlotTables | None = None
) -> Int32[np.ndarray, "Z"]:
    """The packed buffer of one step, see `forward_batch.field_shapes`. `tables` are those of the steps before, if any."""
    tables = tables or SlotTables(shape)
    scheduled, num_rows = output.scheduled, len(output.scheduled)
    for request in scheduled:
        tables.update(request)
    buffer, views = packed_views(field_shapes(spec, shape.num_groups, shape.max_blocks_per_row))
    token_ids = [token_id for request in scheduled for token_id in request.token_ids]
    num_tokens = len(token_ids)
    slots = np.array([request.slot for request in scheduled], np.int32)
    firsts = np.array([request.num_computed_tokens for request in scheduled], np.int32)
    counts = np.array([len(request.token_ids) for request in scheduled], np.int32)
    ends = views["query_start_loc"]
    np.cumsum(counts, out=ends[1 : num_rows + 1])
    ends[num_rows + 1 :] = num_tokens
    # What is added to a row's number of a token in the step to give the token's position.
    shifts = firsts - ends[:num_rows]
    row_of_token = np.repeat(np.arange(num_rows), counts)
    positions = np.arange(num_tokens, dtype=np.int32) + shifts[row_of_token]
    views["token_ids"][:num_tokens] = token_ids
    views["positions"][:num_tokens] = positions
    views["token_slots"][:num_tokens] = slots[row_of_token]
    views["token_slots"][num_tokens:] = shape.trash_slot
    views["is_fed_back"][ends[1 : num_rows + 1] - 1] = [request.is_fed_back for request in scheduled]
    num_blocks = max(len(table) for request in scheduled for table in request.block_ids)
    views["block_tables"][:, :num_rows, :num_blocks] = tables.rows(slots, num_blocks)
    block_index, offset = np.divmod(positions, shape.block_size)
    views["slot_mapping"][:, :num_tokens] = views["block_tables"][:, row_of_token, block_index] * shape.block_size + offset
    views["context_lens"][:num_rows] = firsts + counts
    row_ids = np.array([row.row for row in rows], np.int32)
    views["logits_indices"][: len(rows)] = np.array([row.position for row in rows], np.int32) - shifts[row_ids]
    return buffer
