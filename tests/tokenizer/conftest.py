"""Tokenizers that the tests share: SmolLM2's, and two small ones made here whose tokens split characters often."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxinfer.tokenizer import Tokenizer

EOS = "<|end|>"


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_path)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """All single bytes, some pieces that end within a character, a special token and two added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [spelling.pre_tokenize_str(text)[0][0] for text in ("ab", "ba", "世", "👍", " a")]
    cut = [pieces[2][:2], pieces[3][:3], pieces[3][1:]]
    backend = tokenizers.Tokenizer(models.BPE({piece: k for k, piece in enumerate([*alphabet, *pieces, *cut])}, []))
    backend.pre_tokenizer, backend.decoder = spelling, decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(EOS, special=True)])
    backend.add_tokens([tokenizers.AddedToken("日本"), tokenizers.AddedToken("a b")])
    return Tokenizer(backend, special_tokens={"eos_token": EOS})


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A vocabulary like Llama 2's: U+2581 for spaces, byte tokens, one leading space taken off when decoding."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁Hi", "a", "b", "▁b", "世", "a▁b"]
    model = models.BPE({piece: k for k, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
