"""What the scheduler and the device side say to each other: plain values, made anew for every step. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NewType

from jaxinfer.request import FinishReason, RequestId, SamplingParams

SeqId = NewType("SeqId", int)
"""Arrival number of one completion: unique in a scheduler's life, and the order of first come, first served."""

NO_POSITIONS = range(0)


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a step: the tokens of one sequence to compute, and where.

    `token_ids` stand at positions `num_computed_tokens` onward; those at `num_prompt_tokens` and later are output.
    `block_ids[g]` is group g's table so far, covering all of them. Logits are wanted of `prompt_logprob_positions`
    (absolute) and, with `is_sampling`, of the last token. `is_first_of_slot`: whatever the slot holds belongs to another
    sequence or to an older generation of this one.
    """

    seq_id: SeqId
    request_id: RequestId
    index: int
    generation: int
    slot: int
    token_ids: list[int]
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: list[list[int]]
    is_sampling: bool
    is_first_of_slot: bool
    prompt_logprob_positions: range
    params: SamplingParams

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt positions are wanted from this step."""
        return len(self.prompt_logprob_positions) > 0


@dataclass(slots=True)
class SchedulerOutput:
    """The only message down: one step. `preempted` names who lost slot and blocks since the last one."""

    scheduled: list[ScheduledRequest]
    num_tokens: int
    num_logit_rows: int
    preempted: list[SeqId]


@dataclass(slots=True)
class StepOutput:
    """What a step produced, one entry per scheduled request in their order; host values only.

    `token_ids[i]` holds 0..k sampled tokens: none where the row was not sampling. `logprobs[i]`, when given, has one
    entry per token; the scheduler passes entries on without looking into them.
    """

    token_ids: list[list[int]]
    logprobs: list[list[Any] | None] | None = None
    prompt_logprobs: list[list[Any]] | None = None
    """One entry per position of `prompt_logprob_positions`, for each scheduled request."""


@dataclass(slots=True)
class SequenceUpdate:
    """What a step, an abort or a fault changed for one sequence; `row` is its place in the step, None without one."""

    seq_id: SeqId
    request_id: RequestId
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    row: int | None = None
