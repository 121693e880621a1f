"""Vocabularies written as GGUF here: how each kind cuts text, special tokens, and damaged metadata."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from jaxinfer.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.tokenizer import Tokenizer, byte_alphabet

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = [("<bos>", CONTROL), ("<eos>", CONTROL), ("<eot>", CONTROL), ("<think>", USER_DEFINED), ("  ", USER_DEFINED)]
TOKENS = [*LETTERS, "ab", "abc", *(text for text, _ in SPECIAL), "[PAD263]", "[PAD264]"]
TYPES = [NORMAL] * 258 + [kind for _, kind in SPECIAL] + [UNUSED] * 2
BOS, EOS, EOT, THINK, SPACES = range(258, 263)
VALID: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": TOKENS,
    "token_type": TYPES,
    "merges": ["a b"],
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "eot_token_id": EOT,
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Tokenizer]:
    """A tokenizer from VALID with some `tokenizer.ggml.*` fields changed; None leaves a field out."""

    def from_fields(**changes: Any) -> Tokenizer:
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in (VALID | changes).items():
            key = "tokenizer." + name if name == "chat_template" else "tokenizer.ggml." + name
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
            elif value is not None:
                writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tokenizer_from_gguf(path)

    return from_fields


def cut(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces of a text before merging."""
    alphabet = byte_alphabet()
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(alphabet[character] for character in piece).decode() for piece, _ in pieces]


LINE = "I'LL pay12345 a  b\n\n c?!\n"


@pytest.mark.parametrize(
    ("kinds", "pieces"),
    [
        ("gpt-2 smollm mpt olmo", "I|'|LL| pay|12345| a| | b|\n\n| c|?!|\n"),
        ("starcoder refact command-r", "I|'|LL| pay|1|2|3|4|5| a| | b|\n\n| c|?!|\n"),
        ("llama-bpe llama3 dbrx glm4", "I|'LL| pay|123|45| a| | b|\n\n| c|?!\n"),
        ("qwen2 qwen35 stablelm2", "I|'LL| pay|1|2|3|4|5| a| | b|\n\n| c|?!\n"),
        ("gpt-4o llama4", "I'LL| pay|123|45| a| | b|\n\n| c|?!\n"),
        ("tekken", "I|'LL| pay|1|2|3|4|5| a| | b|\n\n| c|?!\n"),
        ("deepseek-v3", "I|'LL| pay|123|45| a| | b|\n\n| c|?!\n"),
        ("deepseek-coder", "I|'|LL| pay|1|2|3|4|5| a| | b|\n|\n| c|?!|\n"),
        ("falcon default", "I|'|LL| pay|123|45| a| | b|\n\n| c|?!|\n"),
        ("bloom", "I'LL| pay12345| a| | b|\n\n| c|?!\n"),
        ("viking", "I'LL| pay|1|2|3|4|5| a| | b|\n\n| c|?!\n"),
    ],
)
def test_kinds_cut_text_their_way(load: Callable[..., Tokenizer], kinds: str, pieces: str) -> None:
    for kind in kinds.split():
        assert cut(load(pre=kind), LINE) == pieces.split("|"), kind


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("qwen2", "ae\u0301b", "ae|\u0301b"),
        ("qwen35", "ae\u0301b", "ae\u0301b"),
        ("gpt-4o", "camelCase's", "camel|Case's"),
        ("tekken", "camelCase's", "camel|Case|'s"),
        ("tekken", "a//\n/b", "a|//\n/|b"),
        ("llama-bpe", "a//\n/b", "a|//\n|/b"),
        ("deepseek-v3", "A漢字かなB", "A|漢字かな|B"),
        ("deepseek-coder", "A 漢字B", "A| |漢字|B"),
        ("starcoder", "x ²", "x| |²"),
        ("smollm", "x ²", "x| ²"),
        ("falcon", "a`b=", "a|`|b|="),
        ("default", "x ٣٤٥٦", "x| |٣٤٥٦"),
        ("bloom", "好\uff0c好 (x", "好|\uff0c|好| (|x"),
    ],
)
def test_where_kinds_differ(load: Callable[..., Tokenizer], kind: str, text: str, pieces: str) -> None:
    assert cut(load(pre=kind), text) == pieces.split("|")


def test_special_tokens_and_ids(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(chat_template="t", padding_token_id=EOS)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (263, BOS, (EOS, EOT))
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    assert tokenizer.chat_template == "t"
    ids = tokenizer.encode("ab<eos><think>  ")
    assert ids == [TOKENS.index("ab"), EOS, THINK, SPACES]
    assert tokenizer.decode(ids) == "ab<think>  "


def test_bos_and_eos_are_added_where_the_file_or_the_kind_says_so(load: Callable[..., Tokenizer]) -> None:
    a = [TOKENS.index("a")]
    assert load().encode("a") == a
    assert load(add_bos_token=True).encode("a") == [BOS, *a]
    assert load(add_bos_token=True).encode("a", add_special_tokens=False) == a
    assert load(add_bos_token=True, add_eos_token=True).encode("a") == [BOS, *a, EOS]
    assert load(pre="llama-bpe").encode("a") == [BOS, *a]
    assert load(pre="llama-bpe", add_bos_token=False).encode("a") == a
    assert load(pre="llama-bpe", bos_token_id=None).encode("a") == a


def test_whole_tokens_are_taken_without_merging_where_the_kind_says_so(load: Callable[..., Tokenizer]) -> None:
    whole, parts = [TOKENS.index("abc")], [TOKENS.index("ab"), TOKENS.index("c")]
    assert load(pre="llama-bpe", add_bos_token=False).encode("abc") == whole
    assert load(pre="qwen2").encode("abc") == parts


def test_a_missing_kind_is_the_default_and_is_said(load: Callable[..., Tokenizer], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = load(pre=None)
    assert cut(tokenizer, "12345") == ["123", "45"]
    assert "tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "klingon"}, ["vocabulary.gguf", "tokenizer.ggml.pre", "'klingon'", "smollm"]),
        ({"model": "rwkv"}, ["vocabulary.gguf", "tokenizer.ggml.model", "'rwkv'", "gpt2", "llama"]),
    ],
)
def test_what_is_not_supported_is_named(load: Callable[..., Tokenizer], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(**changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, ["tokenizer.ggml.model", "missing"]),
        ({"model": 5}, ["tokenizer.ggml.model", "str", "5"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens", "got 0"]),
        ({"tokens": [1, 2]}, ["tokenizer.ggml.tokens", "array of str"]),
        ({"tokens": "a"}, ["tokenizer.ggml.tokens", "array of str"]),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, ["tokenizer.ggml.tokens", "different"]),
        ({"tokens": ["a", ""], "token_type": [1, 1]}, ["tokenizer.ggml.tokens", "not empty"]),
        ({"token_type": [1, 1]}, ["tokenizer.ggml.token_type", "265", "2"]),
        ({"merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"merges": ["a b", "ab"]}, ["tokenizer.ggml.merges", "'ab'", "at 1"]),
        ({"merges": ["a b c"]}, ["tokenizer.ggml.merges", "'a b c'"]),
        ({"merges": ["a nope"]}, ["tokenizer.ggml.merges", "nope"]),
        ({"merges": ["b a"]}, ["tokenizer.ggml.merges", "ba"]),
        ({"eos_token_id": 263}, ["tokenizer.ggml.eos_token_id", "263", "262"]),
        ({"eos_token_id": -1}, ["tokenizer.ggml.eos_token_id", "-1"]),
        ({"bos_token_id": "x"}, ["tokenizer.ggml.bos_token_id", "int", "'x'"]),
        ({"add_bos_token": 1}, ["tokenizer.ggml.add_bos_token", "bool"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id"]),
        ({"chat_template": 5}, ["tokenizer.chat_template", "str"]),
    ],
)
def test_damaged_metadata_names_file_and_field(load: Callable[..., Tokenizer], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(**changes)
    assert [word for word in ("vocabulary.gguf", *words) if word not in str(caught.value)] == []
    assert caught.value.file.endswith("vocabulary.gguf")


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        tokenizer_from_gguf(tmp_path / "x.gguf")
