"""What the tests of the scheduler ask for, and what each sequence should be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.messages import SequenceUpdate
from jaxinfer.request import FinishReason, GenerationRequest, SamplingParams
from jaxinfer.sequence import Sequence
from tests.scheduler.dictionary_device import Truth

EOS, STOP = 1, 2
TENSORS = (KVTensorSpec(name="key", num_heads=1, head_dim=8, dtype="float32"),)
FULL = KVGroupSpec(kind="full", layers=(0, 2), tensors=TENSORS)
LATENT = KVGroupSpec(kind="latent", layers=(3,), tensors=TENSORS)


def window_group(window: int) -> KVGroupSpec:
    return KVGroupSpec(kind="window", window=window, layers=(1,), tensors=TENSORS)


def constant_hash(content: bytes) -> bytes:
    return b"\7" * 32


def own_prompt(request_id: str, num_prompt_tokens: int) -> tuple[int, ...]:
    """A prompt that differs from every other id's."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return tuple(digest[i % 32] + 3 for i in range(num_prompt_tokens))


REQUEST_FIELDS = ("priority", "user", "cache_salt", "fork_of", "fork_index")


def make_request(request_id: str, prompt: int | tuple[int, ...], **options: Any) -> GenerationRequest:
    """A request of these prompt tokens, or so many of its own."""
    prompt = own_prompt(request_id, prompt) if isinstance(prompt, int) else prompt
    own = {name: options.pop(name) for name in REQUEST_FIELDS if name in options}
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**options), **own)


@dataclass
class Record:
    """One sequence as its user and the device see it."""

    request: GenerationRequest
    sequence: Sequence
    tokens: list[int]
    truth: Truth
    num_sampled: int = 0
    """On the device, whether or not anybody was told."""
    updates: list[SequenceUpdate] = field(default_factory=list)
    prompt_logprob_positions: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    num_overtaken: int = 0

    @property
    def ends(self) -> list[FinishReason]:
        return [update.finish_reason for update in self.updates if update.finish_reason is not None]

    @property
    def output(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    def alone(self, max_seq_tokens: int) -> tuple[list[int], FinishReason, int | None]:
        """Output tokens, finish reason and stop reason of this sequence when nobody disturbs it."""
        params, num_prompt_tokens = self.request.params, len(self.request.prompt_token_ids)
        num_output = 0
        while True:
            num_output += 1
            self.truth.extend(num_prompt_tokens + num_output)
            token = self.truth.tokens[num_prompt_tokens + num_output - 1]
            output = self.truth.tokens[num_prompt_tokens : num_prompt_tokens + num_output]
            may_stop = num_output > params.min_tokens
            if may_stop and token == EOS and not params.ignore_eos:
                return output, FinishReason.STOP, None
            if may_stop and token in params.stop_token_ids:
                return output, FinishReason.STOP, token
            if num_prompt_tokens + num_output == max_seq_tokens or num_output == params.max_tokens:
                return output, FinishReason.LENGTH, None
