"""What the scheduler and the device side say to each other: plain values, made anew for every step. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

from jaxinfer.request import FinishReason, RequestId, SamplingParams

SeqId = NewType("SeqId", int)
"""Arrival number of one completion: unique in a scheduler's life, and the order of first come, first served."""

NO_POSITIONS = range(0)


@dataclass(slots=True)
class CopyBlock:
    """Copy a block within the device, before somebody writes to `target` (copy on write)."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class StoreBlock:
    """Copy a block of the device into a slot of the host tier, before the block is overwritten."""

    group: int
    block_id: int
    host_slot: int


@dataclass(slots=True)
class SpillBlock:
    """Write a slot of the host tier to disk, before the slot is overwritten."""

    group: int
    host_slot: int
    entry: DiskEntry


@dataclass(slots=True)
class LoadBlock:
    """Write source number `index` of a finished fetch into a block of the device."""

    ticket: int
    index: int
    group: int
    block_id: int


@dataclass(slots=True)
class DeleteFromDisk:
    """Forget a block on disk, to make room."""

    entry: DiskEntry


BlockMove = CopyBlock | StoreBlock | SpillBlock | LoadBlock | DeleteFromDisk
"""What happens to KV blocks before a step's rows are computed, in exactly the order in which the moves are listed."""


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """One KV block on disk: its prefix key, its group, and all tokens up to its end, which are compared when it is read."""

    key: bytes
    group: int
    token_ids: tuple[int, ...]
    namespace: bytes
    """What else the key stands for: cache salt, adapter, KV dtype, rope identity. Compared too."""


@dataclass(frozen=True, slots=True)
class HostSource:
    """A slot of the host tier, held from look-up until the fetch is used."""

    group: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring blocks from host memory or disk near the device, beside the steps; `LoadBlock` puts them in place.

    A fetch that is in `SchedulerOutput.cancelled_fetches` later, or whose last source was loaded, is forgotten.
    """

    ticket: int
    sources: tuple[HostSource | DiskEntry, ...]


@dataclass(frozen=True, slots=True)
class FetchResult:
    """A fetch has ended: everything is staged, or the entries of `failed` could not be read and nothing is kept."""

    ticket: int
    failed: tuple[DiskEntry, ...] = ()


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a step: the tokens of one sequence to compute, and where.

    `token_ids` stand at positions `num_computed_tokens` onward; those at `num_prompt_tokens` and later are output. With
    `is_fed_back` the last of them is not known to the host yet: it was sampled by a step in flight and is read from
    DecodeState.last_tokens at `slot`; `token_ids` holds 0 in its place. `num_output_tokens` counts it.
    `block_ids[g]` is group g's table, covering all of them and maybe more; it is the scheduler's own list and only valid until
    `schedule` is called again. Logits are wanted of `prompt_logprob_positions` (absolute) and, with `is_sampling`, of the last
    token. `is_first_of_slot`: whatever the slot holds belongs to another sequence or to an older generation of this one; then
    `resumed_token_ids` are the tokens before `num_computed_tokens`, whose KV was found or came back and which no step feeds
    to the penalties' state. `num_cached_tokens` of them were found when the sequence first started.
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
    is_fed_back: bool = False
    resumed_token_ids: Sequence[int] = ()
    num_cached_tokens: int = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt positions are wanted from this step."""
        return len(self.prompt_logprob_positions) > 0


@dataclass(slots=True)
class SchedulerOutput:
    """The only message down: one step.

    First `moves` happen, in order, then `fetches` begin, then the rows of `scheduled` are computed; there may be none of
    those, when everybody waits for a fetch. `preempted` names who lost slot and blocks since the last one.
    """

    scheduled: list[ScheduledRequest]
    num_tokens: int
    num_logit_rows: int
    preempted: list[SeqId]
    moves: list[BlockMove] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    cancelled_fetches: list[int] = field(default_factory=list)


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
