"""One completion on its way: its random key, what is banned or favoured now, and its text so far. No jax."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxinfer.detokenizer import IncrementalDetokenizer
from jaxinfer.messages import ScheduledRequest, SequenceUpdate
from jaxinfer.request import CompletionOutput, FinishReason, SamplingParams
from jaxinfer.sampling_keys import derive_key
from jaxinfer.tokenizer import Tokenizer

BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """A delta for the user, and whether a stop string ended the completion before the scheduler knew."""

    output: CompletionOutput
    is_stopped_by_text: bool


class Completion:
    """The engine's side of a `scheduler.Sequence`.

    Args:
        params: the request's.
        index: which of the `n` answers this is.
        seed: of the request; index and seed make the key, so an answer is the same in any company.
        tokenizer: makes the text.
        bad_words: token ids of every spelling of a banned word.
        eos_token_ids: banned, with the request's own stop ids, until `min_tokens` are there.
    """

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        *,
        seed: int,
        tokenizer: Tokenizer,
        bad_words: Sequence[tuple[int, ...]],
        eos_token_ids: Collection[int],
    ):
        self.index = index
        self.key = derive_key(seed, index)
        self._params = params
        self._bad_words = bad_words
        self.output_ids: list[int] = []
        """What it has said so far, as far as the host knows."""
        self._early_bans = (*eos_token_ids, *params.stop_token_ids) if params.min_tokens else ()
        self._text = IncrementalDetokenizer(
            tokenizer,
            stop=params.stop,
            include_stop_str=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def biases(self, request: ScheduledRequest) -> dict[int, float]:
        """What is added to the logits of the token sampled in this step."""
        if not (self._params.logit_bias or self._early_bans or self._bad_words):
            return {}
        biases = dict(self._params.logit_bias)
        if request.num_output_tokens < self._params.min_tokens:
            biases |= dict.fromkeys(self._early_bans, BANNED)
        for word in self._bad_words:
            start = word[:-1]
            if not start or tuple(self.output_ids[-len(start) :]) == start:
                biases[word[-1]] = BANNED
        return biases

    def push(self, update: SequenceUpdate) -> TextUpdate:
        """New tokens of this completion -> text.

        The token that ended it stays among the ids, but its text is not shown unless asked for.
        """
        token_ids = list(update.token_ids)
        self.output_ids.extend(token_ids)
        is_stop_token = update.finish_reason is FinishReason.STOP
        shown = token_ids[:-1] if is_stop_token and not self._params.include_stop_str_in_output else token_ids
        text = self._text.push(shown)
        delta = CompletionOutput(self.index, token_ids, text.text, update.logprobs, update.finish_reason, update.stop_reason)
        if text.stop is not None:
            delta.token_ids = token_ids[: text.num_tokens_used]
            delta.logprobs = None if update.logprobs is None else update.logprobs[: text.num_tokens_used]
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, text.stop
        elif update.finish_reason is not None:
            delta.text += self._text.finish()
        return TextUpdate(delta, text.stop is not None and update.finish_reason is None)

    def end(self, reason: FinishReason) -> CompletionOutput:
        """The last delta of a completion that ends without a further token: the text held back."""
        return CompletionOutput(self.index, [], self._text.finish(), None, reason)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Every banned word as token ids, at the start of a text and after a space."""
    spellings = (tokenizer.encode(prefix + word, add_special_tokens=False) for word in words for prefix in ("", " "))
    return sorted({tuple(ids) for ids in spellings if ids})
