"""SentencePiece vocabularies in GGUF against the merging by scores written out, and special tokens, spaces and bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from jaxinfer.checkpoints.gguf_sentencepiece import merges_by_score
from jaxinfer.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxinfer.errors import CheckpointError
from jaxinfer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<tool>", USER_DEFINED), ("<0x>", NORMAL)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", *"abcdefgh", "é", "世", "\n"]
PIECES = [
    "ab",
    "▁a",
    "▁ab",
    "bc",
    "abc",
    "▁abc",
    "cd",
    "bcd",
    "▁▁",
    "▁▁▁▁",
    "▁b",
    "é世",
    "dé",
    "ef",
    "▁ef",
    "efg",
    "gh",
    "efgh",
    "aa",
    "aaaa",
]
TOKENS = [*(text for text, _ in SPECIAL), *BYTES, *PIECES, *LETTERS]
TYPES = [*(kind for _, kind in SPECIAL), *[BYTE] * 256, *[NORMAL] * (len(PIECES) + len(LETTERS))]
RANDOM_SCORES = random.Random(3).sample(range(-1000, -10), len(TOKENS))
SCORES = [0.0] * 261 + [float(score) for score in RANDOM_SCORES[261:]]
VALID: dict[str, Any] = {
    "model": "llama",
    "tokens": TOKENS,
    "scores": SCORES,
    "token_type": TYPES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Tokenizer]:
    """A tokenizer from VALID with some `tokenizer.ggml.*` fields changed; None leaves a field out."""

    def from_fields(architecture: str = "llama", **changes: Any) -> Tokenizer:
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        adders: Mapping[type, Callable[..., None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for name, value in (VALID | changes).items():
            if value is not None:
                adders[type(value)](f"tokenizer.ggml.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tokenizer_from_gguf(path)

    return from_fields


def joined_by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's BPE: join the two neighbours whose union has the best score, the leftmost of equals, until none is a piece."""
    symbols = list(text)
    while True:
        unions = [(scores.get(left + right), -k) for k, (left, right) in enumerate(pairwise(symbols))]
        found = [(score, k) for score, k in unions if score is not None]
        if not found:
            break
        k = -max(found)[1]
        symbols[k : k + 2] = [symbols[k] + symbols[k + 1]]
    return [piece for symbol in symbols for piece in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])]


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_pieces_are_those_of_merging_by_score(load: Callable[..., Tokenizer], add_space_prefix: bool) -> None:
    tokenizer, rng = load(add_space_prefix=add_space_prefix), random.Random(1)
    scores = {token: SCORES[k] for k, token in enumerate(TOKENS) if k >= 261}
    for _ in range(400):
        text = "".join(rng.choice("aaabbcdefgh  é世\nxß👍") for _ in range(rng.randrange(1, 24)))
        expected = joined_by_score(("▁" if add_space_prefix else "") + text.replace(" ", "▁"), scores)
        assert pieces(tokenizer, text) == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_best_score_comes_first_whatever_the_order_of_tokens(load: Callable[..., Tokenizer]) -> None:
    high = {**dict(zip(TOKENS, SCORES, strict=True)), "bc": -1.0, "ab": -2.0, "abc": -3.0}
    low = high | {"bc": -3.0, "abc": -4.0}
    assert pieces(load(scores=[high[token] for token in TOKENS], add_space_prefix=False), "abcd") == ["abc", "d"]
    assert pieces(load(scores=[{**high, "abc": -2000.0, "bcd": -2.5}[token] for token in TOKENS], add_space_prefix=False), "abcd") == [
        "a",
        "bcd",
    ]
    assert pieces(load(scores=[{**low, "abc": -2000.0, "cd": -2.5}[token] for token in TOKENS], add_space_prefix=False), "abcd") == [
        "ab",
        "cd",
    ]


def test_gemma_joins_in_the_order_of_tokens(load: Callable[..., Tokenizer]) -> None:
    turned = [-score for score in SCORES]
    by_order = load("gemma3", scores=turned, token_type=TYPES)
    assert pieces(by_order, "abcd") == ["abc", "d"]  # ab comes before bc and cd
    assert pieces(by_order, " a") == ["▁a"]
    assert pieces(load("gemma3", scores=None), "abcd") == ["abc", "d"]


def test_gemmas_runs_of_spaces_are_merged(load: Callable[..., Tokenizer]) -> None:
    tokens = ["  " if token == "▁▁" else token for token in TOKENS]
    types = [USER_DEFINED if token == "  " else kind for token, kind in zip(tokens, TYPES, strict=True)]
    tokenizer = load("gemma3", tokens=tokens, token_type=types)
    ids = tokenizer.encode("  ▁▁b", add_special_tokens=False)
    assert [tokenizer.backend.id_to_token(token_id) for token_id in ids] == ["▁▁▁▁", "b"]
    assert tokenizer.decode(ids) == "    b"


def test_special_tokens_stand_for_themselves_and_text_after_them_gets_its_space(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load()
    assert pieces(tokenizer, "ab</s>ab<tool>b") == ["▁ab", "</s>", "▁ab", "<tool>", "▁b"]
    assert pieces(tokenizer, " ab") == ["▁", "▁ab"]  # not one space only
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
    assert pieces(load(add_space_prefix=False), "ab</s>ab") == ["ab", "</s>", "ab"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_tokens["unk_token"]) == (1, (2,), "<unk>")


def test_bos_is_added_unless_the_file_says_no(load: Callable[..., Tokenizer]) -> None:
    ab = TOKENS.index("▁ab")
    assert load().encode("ab") == [1, ab]
    assert load(add_bos_token=False).encode("ab") == [ab]
    assert load(add_eos_token=True).encode("ab") == [1, ab, 2]
    assert load(bos_token_id=None).encode("ab") == [ab]


def test_text_never_becomes_a_control_or_byte_token_by_merging(load: Callable[..., Tokenizer]) -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<0x0A>": 3, "<0x0": 4, "A>": 5, "abab": 6}
    kinds = [True, True, False, False, True, True, True]
    assert merges_by_score(vocabulary, [0.0] * 7, kinds) == [("ab", "ab")]
    assert pieces(load(add_space_prefix=False), "<0x41>")[0] == "<0x3C>"


def test_merges_of_the_file_are_taken_when_there_are_any(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(merges=["b c", "a bc"], add_space_prefix=False, scores=None)
    assert pieces(tokenizer, "abcd") == ["abc", "d"]
    assert pieces(tokenizer, "ef") == ["e", "f"]


def test_bytes_without_tokens_are_unknown(load: Callable[..., Tokenizer]) -> None:
    no_bytes = [f"[{token}]" if kind == BYTE else token for token, kind in zip(TOKENS, TYPES, strict=True)]
    assert pieces(load(tokens=no_bytes, add_space_prefix=False), "a👍b") == ["a", "<unk>", "b"]


def test_a_folder_saved_from_it_gives_the_same_ids_here_and_in_transformers(load: Callable[..., Tokenizer], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load()
    tokenizer.save(tmp_path / "hf")
    loaded, theirs = Tokenizer.from_folder(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("ab c", " ab", "x 世\n", "a</s> b", ""):
        assert loaded.encode(text) == theirs.encode(text) == tokenizer.encode(text), text
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text)), text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, ["tokenizer.ggml.scores", "missing"]),
        ({"scores": SCORES[:-1]}, ["tokenizer.ggml.scores", str(len(TOKENS)), f"got {len(TOKENS) - 1}"]),
        ({"scores": [float("nan")] * len(TOKENS)}, ["tokenizer.ggml.scores", "number"]),
        ({"scores": [1] * len(TOKENS)}, ["tokenizer.ggml.scores", "array of float"]),
        ({"merges": ["a nope"]}, ["tokenizer.ggml.merges", "nope"]),
        ({"merges": ["a"]}, ["tokenizer.ggml.merges", "'a'"]),
        ({"add_space_prefix": 1}, ["tokenizer.ggml.add_space_prefix", "bool"]),
        ({"unknown_token_id": 5000}, ["tokenizer.ggml.unknown_token_id", "5000"]),
        ({"token_type": TYPES[:-1]}, ["tokenizer.ggml.token_type"]),
    ],
)
def test_damaged_metadata_names_file_and_field(load: Callable[..., Tokenizer], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(**changes)
    assert [word for word in ("vocabulary.gguf", *words) if word not in str(caught.value)] == []
