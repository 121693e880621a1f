"""SchedulerOutput -> the packed buffer of a compiled step, in numpy; and which shapes are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.forward_batch import StepSpec, field_shapes, packed_views
from jaxinfer.kv.groups import ceil_div
from jaxinfer.messages import ScheduledRequest, SchedulerOutput

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


@dataclass(frozen=True, slots=True)
class LogitRow:
    """What one row of logits is for: scheduled request `row`, position of the token whose logits these are."""

    row: int
    position: int
    is_sampling: bool


def logit_rows(scheduled: Sequence[ScheduledRequest]) -> list[LogitRow]:
    """The rows of logits of a step: each request's prompt positions, then its sampled one."""
    rows = []
    for row, request in enumerate(scheduled):
        rows.extend(LogitRow(row, position, False) for position in request.prompt_logprob_positions)
        if request.is_sampling:
            rows.append(LogitRow(row, request.num_computed_tokens + len(request.token_ids) - 1, True))
    return rows


def build_forward_batch(output: SchedulerOutput, rows: Sequence[LogitRow], spec: StepSpec, shape: BatchShape) -> np.ndarray:
    """The packed buffer of one step, see `forward_batch.field_shapes`."""
    buffer, views = packed_views(field_shapes(spec, shape.num_groups, shape.max_blocks_per_row))
    views["token_slots"][:] = shape.trash_slot
    starts, start = [], 0
    for row, request in enumerate(output.scheduled):
        end = start + len(request.token_ids)
        positions = np.arange(request.num_computed_tokens, request.num_computed_tokens + len(request.token_ids), dtype=np.int32)
        views["token_ids"][start:end] = request.token_ids
        views["positions"][start:end] = positions
        views["token_slots"][start:end] = request.slot
        for group, block_ids in enumerate(request.block_ids):
            table = views["block_tables"][group, row]
            table[: len(block_ids)] = block_ids
            views["slot_mapping"][group, start:end] = table[positions // shape.block_size] * shape.block_size + positions % shape.block_size
        views["query_start_loc"][row + 1] = end
        views["context_lens"][row] = request.num_computed_tokens + len(request.token_ids)
        starts.append(start)
        start = end
    views["query_start_loc"][len(output.scheduled) + 1 :] = start
    for index, logit_row in enumerate(rows):
        request = output.scheduled[logit_row.row]
        views["logits_indices"][index] = starts[logit_row.row] + logit_row.position - request.num_computed_tokens
    return buffer
