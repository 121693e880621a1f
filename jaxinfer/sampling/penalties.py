"""Which tokens a sequence has seen, kept on the device, and the penalties on them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.sampling.tensors import SamplingTensors


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PenaltyState:
    """Token counts per slot, `R` = max_num_seqs + 1 of them; the last slot takes the padding's updates.

    A pure function of the tokens fed to the model since the slot's reset, in any order and chunking, so it survives
    chunked prefill and preemption (reset and feed again). The engine's thread owns it and donates it to each step.
    """

    output_counts: Int32[Array, "R V"]
    prompt_seen: Bool[Array, "R V"]


def new_penalty_state(num_slots: int, vocab_size: int) -> PenaltyState:
    """Empty counts; `num_slots` includes the trash slot. 5 bytes per slot and token."""
    shape = (num_slots, vocab_size)
    return PenaltyState(output_counts=jnp.zeros(shape, jnp.int32), prompt_seen=jnp.zeros(shape, jnp.bool_))


def update_penalty_state(
    state: PenaltyState,
    token_ids: Int32[Array, " T"],
    slots: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    prompt_lens: Int32[Array, " T"],
    reset: Bool[Array, " R"],
) -> PenaltyState:
    """Empty the slots in `reset`, then record the tokens that this step feeds.

    A token at a position below its sequence's prompt length counts as prompt, else as output. Call it before sampling in
    the same step, so that the penalties at position p see every token before p. Padding has the trash slot; a token id
    >= V is dropped; negative ids or slots are not allowed (they wrap).
    """
    num_slots = state.output_counts.shape[0]

    def emptied(state: PenaltyState) -> PenaltyState:
        return PenaltyState(
            output_counts=jnp.where(reset[:, None], 0, state.output_counts),
            prompt_seen=state.prompt_seen & ~reset[:, None],
        )

    state = lax.cond(jnp.any(reset), emptied, lambda state: state, state)
    is_prompt = positions < prompt_lens
    prompt_slots = jnp.where(is_prompt, slots, num_slots)
    output_slots = jnp.where(is_prompt, num_slots, slots)
    return PenaltyState(
        output_counts=state.output_counts.at[output_slots, token_ids].add(1, mode="drop"),
        prompt_seen=state.prompt_seen.at[prompt_slots, token_ids].set(True, mode="drop"),
    )


def penalised(
    logits: Float32[Array, "M P"], tensors: SamplingTensors, state: PenaltyState, slots: Int32[Array, " M"]
) -> Float32[Array, "M P"]:
    """Logits after repetition (prompt and output), frequency and presence (output) penalties, as in vLLM."""
    extra = logits.shape[1] - state.output_counts.shape[1]
    counts = jnp.pad(state.output_counts[slots], ((0, 0), (0, extra)))
    seen = jnp.pad(state.prompt_seen[slots], ((0, 0), (0, extra))) | (counts > 0)
    factor = jnp.where(seen, tensors.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - tensors.frequency_penalty[:, None] * counts.astype(jnp.float32)
    logits = logits - jnp.where(counts > 0, tensors.presence_penalty[:, None], 0.0)
    return jnp.minimum(logits, jnp.finfo(jnp.float32).max)
