"""The tokenizers of the optional models, read from GGUF, against what transformers makes of many lines (make_goldens.py)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from jaxinfer.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxinfer.errors import RequestError
from jaxinfer.tokenizer import Tokenizer
from tests.checkpoints.real_models import pulled

pytestmark = pytest.mark.nightly

PRESETS = {"gemma3": "gemma3-270m", "qwen2": "qwen2.5-coder-0.5b"}
Entries = list[tuple[str, list[int], str]]


@pytest.fixture(scope="module", params=PRESETS)
def vocabulary(request: pytest.FixtureRequest) -> tuple[str, Tokenizer, Entries]:
    """Name, tokenizer and (line, ids, text that transformers decodes the ids to)."""
    packed = (Path(__file__).parent / "goldens" / f"{request.param}.json.gz").read_bytes()
    entries = [(line, ids, line if decoded is None else decoded) for line, ids, decoded in json.loads(gzip.decompress(packed))]
    return request.param, tokenizer_from_gguf(pulled(PRESETS[request.param])), entries


def test_ids_are_those_of_transformers(vocabulary: tuple[str, Tokenizer, Entries]) -> None:
    _, tokenizer, entries = vocabulary
    assert len(entries) >= 500
    assert [(line, ids, got) for line, ids, _ in entries if (got := tokenizer.encode(line)) != ids] == []


def test_decoding_is_that_of_transformers_and_gives_the_line_back(vocabulary: tuple[str, Tokenizer, Entries]) -> None:
    name, tokenizer, entries = vocabulary
    decoded = [(ids, text, tokenizer.decode(ids, skip_special_tokens=False)) for _, ids, text in entries]
    assert [(ids, text, got) for ids, text, got in decoded if got != text] == []
    for line, ids, _ in entries:
        # U+2581 is what spaces are in a SentencePiece vocabulary, so one in a text comes back as a space
        written = line.replace("\u2581", " ") if name == "gemma3" else line
        assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<bos>" if name == "gemma3" else "") == written


def test_a_saved_folder_gives_the_same_ids_here_and_in_transformers(vocabulary: tuple[str, Tokenizer, Entries], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _, tokenizer, entries = vocabulary
    tokenizer.save(tmp_path)
    loaded, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for line, ids, _ in entries[::17]:
        assert loaded.encode(line) == ids
        assert theirs.encode(line) == ids


def test_a_base_model_has_no_chat(vocabulary: tuple[str, Tokenizer, Entries]) -> None:
    name, tokenizer, _ = vocabulary
    messages = [{"role": "user", "content": "Hi"}]
    if name == "gemma3":
        with pytest.raises(RequestError, match="no chat template"):
            tokenizer.encode_chat(messages)
    else:
        assert tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False).endswith("<|im_start|>assistant\n")
