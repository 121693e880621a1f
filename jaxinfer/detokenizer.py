"""Text of a sequence that is still being generated: exact, whole characters only, stop strings never shown.

Every token stands for fixed bytes (`jaxinfer.tokenizer`), so the text is the bytes read by an incremental UTF-8 decoder:
each token costs its own bytes once, and the parts joined are `Tokenizer.decode` of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.errors import RequestError
from jaxinfer.tokenizer import Tokenizer


class StopMatcher:
    """One stop string followed through a text, a character at a time (Knuth, Morris, Pratt 1977).

    `num_matched` is the length of the longest end of the text so far that the stop string begins with. The failure table
    grows with the longest match seen, so a stop string that hardly matches costs nothing, however long it is.
    """

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0
        self._failure = [0, 0]

    def _longest_border(self, num_matched: int) -> int:
        """Length of the longest proper end of `stop[:num_matched]` that is also its beginning."""
        while len(self._failure) <= num_matched:
            last = self.stop[len(self._failure) - 1]
            border = self._failure[-1]
            while border and self.stop[border] != last:
                border = self._failure[border]
            self._failure.append(border + (self.stop[border] == last))
        return self._failure[num_matched]

    @property
    def num_begun(self) -> int:
        """Characters at the end of the text that may still grow into the stop string: never all of it."""
        return self._longest_border(self.num_matched) if self.num_matched == len(self.stop) else self.num_matched

    def push(self, character: str) -> bool:
        """Take one more character; True when the stop string ends with it."""
        self.num_matched = self.num_begun
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._longest_border(self.num_matched)
        self.num_matched += self.stop[self.num_matched] == character
        return self.num_matched == len(self.stop)


@dataclass(frozen=True, slots=True)
class DetokenizedText:
    """What a push made of its tokens.

    `text` is new and safe to show. `stop` is the stop string that ended the text, None while it goes on.
    `num_tokens_used` counts the tokens of this push up to and including the one that completed the stop string.
    """

    text: str
    stop: str | None
    num_tokens_used: int


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text as they come.

    The joined texts of all pushes and of `finish` are `tokenizer.decode` of all tokens, cut at the stop string that is
    complete first (of two complete at the same character, the one that begins first). Held back are bytes that do not make
    a character yet and, unless stop strings are to be shown, the longest end that may turn out to begin one.

    A stop string that is complete within the first `min_tokens` tokens is text like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        """
        Raises:
            RequestError: for an empty stop string.
        """
        if "" in stop:
            raise RequestError("stop must hold non-empty strings, got ''", param="stop")
        self._tokenizer = tokenizer
        self._matchers = [StopMatcher(text) for text in dict.fromkeys(stop)]
        self._include_stop_str = include_stop_str
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_front_spaces = tokenizer.num_leading_spaces
        self._num_tokens = 0
        self._held = ""
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> DetokenizedText:
        """Take the sequence's next tokens. After a stop string nothing more is used or shown.

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        shown: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self._stop is not None:
                break
            piece = self._tokenizer.piece_bytes(token_id, skip_special_tokens=self._skip_special_tokens)
            self._num_tokens += 1
            num_used += 1
            shown.append(self._release(self._decoder.decode(piece)))
        return DetokenizedText("".join(shown), self._stop, num_used)

    def finish(self) -> str:
        """The sequence has ended: all that was held back. Bytes that never made a character become U+FFFD."""
        if self._stop is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self._stop is not None else text + held

    def _release(self, text: str) -> str:
        """Add new characters to those held back, and give out what is safe to show."""
        text = self._strip_front(text)
        if not self._matchers:
            return text
        text_before = self._held
        for k, character in enumerate(text):
            complete = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if complete and self._num_tokens > self._min_tokens:
                self._stop = max(complete, key=len)
                whole = text_before + text[: k + 1]
                self._held = ""
                return whole if self._include_stop_str else whole[: len(whole) - len(self._stop)]
        whole = text_before + text
        num_held = 0 if self._include_stop_str else max(matcher.num_begun for matcher in self._matchers)
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held]

    def _strip_front(self, text: str) -> str:
        """Take off the dummy prefix, which only the first characters of the whole text can be."""
        while self._num_front_spaces and text:
            if text[0] != " ":
                self._num_front_spaces = 0
                break
            self._num_front_spaces -= 1
            text = text[1:]
        return text
