"""SmolLM2's tokenizer, read from GGUF, against what transformers makes of 2,000 lines (make_goldens.py)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from jaxinfer.tokenizer import Tokenizer

pytestmark = pytest.mark.goldens


@pytest.fixture(scope="module")
def entries() -> list[tuple[str, list[int], str]]:
    """(line, ids, text that transformers decodes the ids to)."""
    packed = (Path(__file__).parent / "goldens" / "smollm2.json.gz").read_bytes()
    return [(line, ids, line if decoded is None else decoded) for line, ids, decoded in json.loads(gzip.decompress(packed))]


def test_ids_are_those_of_transformers(smollm2_tokenizer: Tokenizer, entries: list[tuple[str, list[int], str]]) -> None:
    assert len(entries) == 2000
    different = [(line, ids, got) for line, ids, _ in entries if (got := smollm2_tokenizer.encode(line)) != ids]
    assert different == []


def test_decoding_is_that_of_transformers(smollm2_tokenizer: Tokenizer, entries: list[tuple[str, list[int], str]]) -> None:
    decoded = [(ids, text, smollm2_tokenizer.decode(ids, skip_special_tokens=False)) for _, ids, text in entries]
    assert [(ids, text, got) for ids, text, got in decoded if got != text] == []


def test_lines_come_back_but_for_bytes_without_a_token(smollm2_tokenizer: Tokenizer, entries: list[tuple[str, list[int], str]]) -> None:
    singles = {smollm2_tokenizer.token_bytes(k) for k in range(smollm2_tokenizer.vocab_size)}
    for line, ids, _ in entries:
        kept = b"".join(byte for byte in (bytes([b]) for b in line.encode()) if byte in singles)
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == kept.decode("utf-8", "replace")


def test_saved_folder_gives_the_same_ids_here_and_in_transformers(
    smollm2_tokenizer: Tokenizer, entries: list[tuple[str, list[int], str]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    smollm2_tokenizer.save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for line, ids, _ in entries[::29]:
        assert loaded.encode(line) == ids
        assert theirs.encode(line) == ids
    for name in ("vocab_size", "eos_token_ids", "bos_token_id", "chat_template", "special_tokens"):
        assert getattr(loaded, name) == getattr(smollm2_tokenizer, name), name
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_chat_is_that_of_transformers(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    smollm2_tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    short = [{"role": "user", "content": "Grüße 👍\n"}]
    for messages in (short, [{"role": "system", "content": "Be brief."}, *short, {"role": "assistant", "content": "Hi"}]):
        for prompts in (True, False):
            text = smollm2_tokenizer.apply_chat_template(messages, add_generation_prompt=prompts)
            assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts)
            ids = theirs.apply_chat_template(messages, add_generation_prompt=prompts, return_dict=False)
            assert smollm2_tokenizer.encode_chat(messages, add_generation_prompt=prompts) == ids
