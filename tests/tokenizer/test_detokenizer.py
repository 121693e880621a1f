"""Streamed text against `tokenizers`' decoding of the whole, and against a plain search for stop strings in it."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.detokenizer import IncrementalDetokenizer
from jaxinfer.errors import RequestError
from jaxinfer.tokenizer import Tokenizer

MIXED = "ab世👍é a\u0301\U0001f468‍\U0001f469 "


def chunks_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


def num_incomplete(raw: bytes) -> int:
    """Bytes at the end that only lack more bytes to be a character."""
    for length in (3, 2, 1):
        try:
            raw[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data" and len(raw) >= length:
                return length
    return 0


def settled_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The text of the first tokens as far as later ones cannot change it."""
    raw = b"".join(tokenizer.token_bytes(k) for k in ids if not (skip and k in tokenizer.eos_token_ids))
    return raw[: len(raw) - num_incomplete(raw)].decode("utf-8", "replace")


def expected(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None, int]:
    """(text, stop string, number of tokens used), by searching in the whole text."""
    whole = tokenizer.backend.decode(ids)
    lengths = [len(settled_text(tokenizer, ids[: k + 1], True)) for k in range(len(ids))]
    for end in range(1, len(whole) + 1):
        # Characters that only the end of the sequence settles belong to no token any more.
        token = next((k + 1 for k, length in enumerate(lengths) if length >= end), len(ids))
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found and token > min_tokens:
            stop = max(found, key=len)
            return whole[: end if include else end - len(stop)], stop, token
    return whole, None, len(ids)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, with whole texts between them so that there are characters to find."""
    texts = st.text(MIXED, max_size=6).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    some = st.integers(0, tokenizer.vocab_size - 1)
    pieces = st.integers(max(0, tokenizer.vocab_size - 14), tokenizer.vocab_size - 1)
    return st.lists(st.one_of(texts, some.map(lambda k: [k]), pieces.map(lambda k: [k])), max_size=12).map(
        lambda parts: list(chain(*parts))
    )


def stream(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> tuple[list[str], str | None, int]:
    shown: list[str] = []
    stop, num_used = None, 0
    for chunk in chunks:
        step = detokenizer.push(chunk)
        shown.append(step.text)
        stop, num_used = step.stop, num_used + step.num_tokens_used
    return [*shown, detokenizer.finish()], stop, num_used


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_joined_parts_are_the_whole(byte_level: Tokenizer, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(ids_of(byte_level))
    chunks = chunks_of(ids, data.draw(st.lists(st.integers(0, 99), max_size=9)))
    shown, stop, num_used = stream(IncrementalDetokenizer(byte_level, skip_special_tokens=skip), chunks)
    assert "".join(shown) == byte_level.backend.decode(ids, skip_special_tokens=skip) == byte_level.decode(ids, skip_special_tokens=skip)
    assert (stop, num_used) == (None, len(ids))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_joined_parts_are_the_whole_on_smollm2(smollm2_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(smollm2_tokenizer))
    shown, _, _ = stream(IncrementalDetokenizer(smollm2_tokenizer), [[k] for k in ids])
    assert "".join(shown) == smollm2_tokenizer.backend.decode(ids) == smollm2_tokenizer.decode(ids)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_leading_space_of_sentencepiece_goes_once(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    texts = st.text("世é👍", min_size=1, max_size=2).map(lambda text: [3 + byte for byte in text.encode()])
    pieces = st.sampled_from([1, 2, *range(259, sentencepiece.vocab_size)]).map(lambda k: [k])
    ids = list(chain(*data.draw(st.lists(texts | pieces, max_size=10))))
    skip = data.draw(st.booleans())
    shown, _, _ = stream(IncrementalDetokenizer(sentencepiece, skip_special_tokens=skip), [[k] for k in ids])
    assert "".join(shown) == sentencepiece.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(shown) == sentencepiece.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stop_strings_against_a_search_in_the_whole(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(byte_level))
    whole = byte_level.backend.decode(ids)
    slices = st.integers(0, max(0, len(whole) - 1)).flatmap(lambda k: st.integers(1, 6).map(lambda n: whole[k : k + n] or "x"))
    stops = data.draw(st.lists(slices | st.text("ab世 ", min_size=1, max_size=4), min_size=1, max_size=4))
    min_tokens, include = data.draw(st.integers(0, 6)), data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(byte_level, stop=stops, min_tokens=min_tokens, include_stop_str=include)
    chunks = chunks_of(ids, data.draw(st.lists(st.integers(0, 99), max_size=9)))
    shown, stop, num_used = stream(detokenizer, chunks)
    text, expected_stop, expected_used = expected(byte_level, ids, stops, min_tokens, include)
    assert ("".join(shown), num_used) == (text, expected_used)
    # A stop string that only the end of the sequence completes (by a U+FFFD) cuts the text, but no push can tell of it.
    settled = settled_text(byte_level, ids, True)
    assert stop == expected_stop or (stop is None and len(text) + len(expected_stop or "") > len(settled))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_more_is_held_back_than_may_begin_a_stop_string(byte_level: Tokenizer, data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=3))
    ids = byte_level.encode(data.draw(st.text("ab", max_size=20)), add_special_tokens=False)
    detokenizer, seen, shown = IncrementalDetokenizer(byte_level, stop=stops), "", ""
    for token_id in ids:
        step = detokenizer.push([token_id])
        seen, shown = seen + byte_level.token_text(token_id), shown + step.text
        if step.stop is not None:
            break
        begun = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: len(seen) - begun]


def test_characters_come_whole_and_at_once(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    parts = [detokenizer.push([token_id]).text for token_id in byte_level.encode("世👍")]
    assert parts == ["", "", "世", "", "", "", "👍"]


def test_a_lone_start_of_a_character_is_shown_when_known_to_be_invalid(byte_level: Tokenizer) -> None:
    first = byte_level.encode("世")[0]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push([first]).text, detokenizer.push(byte_level.encode("a")).text] == ["", "\ufffda"]
    assert [detokenizer.push([first]).text, detokenizer.finish()] == ["", "\ufffd"]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop", "num_used"),
    [
        (["EFG"], ["AB", "CDE", "FGH", "IJ"], "ABCD", "EFG", 3),
        (["EFX"], ["AB", "CDE", "FGH"], "ABCDEFGH", None, 3),
        (["CD", "BCD"], ["A", "BCDE"], "A", "BCD", 2),
        (["BCDE", "CD"], ["A", "BCDE"], "AB", "CD", 2),
        (["aab"], ["a", "a", "a", "b"], "a", "aab", 4),
    ],
)
def test_first_complete_stop_string_cuts(
    smollm2_tokenizer: Tokenizer, stops: list[str], pieces: list[str], shown: str, stop: str | None, num_used: int
) -> None:
    chunks = [smollm2_tokenizer.encode(piece) for piece in pieces]
    used = sum(len(chunk) for chunk in chunks[:num_used])
    parts, found, num_tokens = stream(IncrementalDetokenizer(smollm2_tokenizer, stop=stops), chunks)
    assert ("".join(parts), found) == (shown, stop)
    assert num_tokens <= used and (stop is not None or num_tokens == used)


def test_a_stop_string_may_begin_within_one_that_came_too_early(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=["aba"], min_tokens=3)
    ids = [byte_level.encode(character)[0] for character in "ababa"]
    steps = [detokenizer.push([token_id]) for token_id in ids]
    assert [step.text for step in steps] == ["", "", "ab", "", ""]
    assert steps[-1].stop == "aba"


def test_after_a_stop_string_nothing_more_comes(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=["b"])
    assert detokenizer.push(byte_level.encode("abab")).text == "a"
    after = detokenizer.push(byte_level.encode("a"))
    assert (after.text, after.stop, after.num_tokens_used, detokenizer.finish()) == ("", "b", 0, "")


def test_an_empty_stop_string_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="non-empty"):
        IncrementalDetokenizer(byte_level, stop=["a", ""])
