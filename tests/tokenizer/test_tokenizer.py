"""Folders, special tokens, single tokens and what must be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from jaxinfer.errors import CheckpointError, RequestError, UnsupportedModelError
from jaxinfer.tokenizer import Tokenizer

END = "<|end|>"
USER = [{"role": "user", "content": "ab"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(byte_level: Tokenizer, tmp_path: Path) -> Path:
    byte_level.save(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Callable[..., Tokenizer]:
    """Change files of the folder (dicts become JSON) and load it."""

    def load(**files: Any) -> Tokenizer:
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return Tokenizer.from_folder(folder)

    return load


def test_round_trip_of_a_folder(byte_level: Tokenizer, folder: Path) -> None:
    loaded = Tokenizer.from_folder(folder)
    assert loaded.encode("世a b" + END) == byte_level.encode("世a b" + END)
    assert (loaded.vocab_size, loaded.eos_token_ids, loaded.bos_token_id, loaded.chat_template) == (267, (264,), None, None)


def test_saving_keeps_all_eos_ids_and_an_existing_generation_config(byte_level: Tokenizer, tmp_path: Path) -> None:
    several = Tokenizer(byte_level.backend, special_tokens={"eos_token": END}, eos_token_ids=[7, 264, 9])
    several.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (264, 7, 9)
    byte_level.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (264, 7, 9)


def test_eos_ids_come_from_generation_config_before_config(folder: Path, write: Callable[..., Tokenizer]) -> None:
    assert write(config__json={"eos_token_id": 5}, generation_config__json={"eos_token_id": [8, 9]}).eos_token_ids == (264, 8, 9)
    (folder / "generation_config.json").unlink()
    assert write(config__json={"eos_token_id": 5}).eos_token_ids == (264, 5)
    assert write(config__json={"text_config": {"eos_token_id": 6}}).eos_token_ids == (264, 6)


def test_chat_template_file_and_named_templates(write: Callable[..., Tokenizer]) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    config = {"eos_token": {"content": END, "lstrip": False}, "chat_template": named}
    assert write(tokenizer_config__json=config).chat_template == "named"
    assert write(tokenizer_config__json=config).eos_token_ids == (264,)
    assert write(chat_template__jinja="from a file").chat_template == "from a file"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer__json": "{"}, ["tokenizer.json", "is not a tokenizer"]),
        ({"tokenizer__json": "{}"}, ["tokenizer.json", "is not a tokenizer"]),
        ({"tokenizer_config__json": "[1]"}, ["tokenizer_config.json", "object", "list"]),
        ({"tokenizer_config__json": "{"}, ["tokenizer_config.json", "JSON"]),
        ({"tokenizer_config__json": '{"a":' + "9" * 5000 + "}"}, ["tokenizer_config.json", "JSON"]),
        ({"tokenizer_config__json": {"eos_token": 5}}, ["tokenizer_config.json", "eos_token", "5"]),
        ({"tokenizer_config__json": {"bos_token": "<nope>"}}, ["tokenizer_config.json", "bos_token", "<nope>"]),
        ({"tokenizer_config__json": {"chat_template": 5}}, ["tokenizer_config.json", "chat_template", "5"]),
        ({"generation_config__json": {"eos_token_id": 267}}, ["generation_config.json", "eos_token_id", "267", "266"]),
        ({"generation_config__json": {"eos_token_id": -1}}, ["generation_config.json", "eos_token_id", "-1"]),
        ({"generation_config__json": {"eos_token_id": ["2"]}}, ["generation_config.json", "eos_token_id", "'2'"]),
        ({"generation_config__json": {"eos_token_id": True}}, ["generation_config.json", "eos_token_id", "True"]),
    ],
)
def test_damaged_folders_name_file_and_field(write: Callable[..., Tokenizer], files: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        write(**files)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])])
def test_unknown_ways_of_decoding_are_refused(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match="decoder"):
        Tokenizer(backend, special_tokens={})


def test_truncation_and_padding_of_the_file_are_off(byte_level: Tokenizer, folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("bab") == byte_level.encode("bab")


def test_bytes_and_text_of_single_tokens(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert [byte_level.token_bytes(byte_level.backend.token_to_id(piece)) for piece in ("Ġa", "Ċ", END, "日本")] == [
        b" a",
        b"\n",
        END.encode(),
        "日本".encode(),
    ]
    assert sorted(byte_level.token_bytes(k) for k in range(256)) == [bytes([k]) for k in range(256)]
    assert byte_level.token_text(byte_level.encode("世")[0]) == "\ufffd"
    assert [sentencepiece.token_bytes(sentencepiece.backend.token_to_id(piece)) for piece in ("▁Hi", "<0x0A>", "<0xE4>")] == [
        b" Hi",
        b"\n",
        b"\xe4",
    ]


def test_decoding_can_keep_special_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a" + END + "b")
    assert (byte_level.decode(ids), byte_level.decode(ids, skip_special_tokens=False)) == ("ab", "a" + END + "b")


def test_holes_in_the_numbering_say_nothing() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, special_tokens={})
    assert (tokenizer.vocab_size, tokenizer.decode([0, 1, 2, 3])) == (4, "ab")


def test_an_id_far_beyond_the_tokens_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 2**31}, []))
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: vocab: 2 tokens have ids up to 2147483648"):
        Tokenizer(backend, special_tokens={})


@pytest.mark.parametrize("token_id", [-1, 267, 2**40])
def test_ids_outside_the_vocabulary_are_refused(byte_level: Tokenizer, token_id: int) -> None:
    for call in (lambda: byte_level.decode([1, token_id]), lambda: byte_level.token_bytes(token_id)):
        with pytest.raises(RequestError, match="from 0 to 266"):
            call()


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", 5, None, b"a"])
def test_what_is_not_unicode_text_is_refused(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError) as caught:
        byte_level.encode(text)
    assert caught.value.param == "prompt"


@pytest.fixture
def with_bos(byte_level: Tokenizer, tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts <s> before and the end token after every text."""
    byte_level.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    ids = [(text, backend.token_to_id(text)) for text in ("<s>", END)]
    backend.post_processor = processors.TemplateProcessing(single=f"<s> $A {END}", special_tokens=ids)
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": END}, chat_template=TEMPLATE)


def test_a_chat_begins_with_bos_once_and_never_ends_with_eos(with_bos: Tokenizer) -> None:
    bos, end = 267, 264
    text = with_bos.encode("ab", add_special_tokens=False)
    assert with_bos.encode("ab") == [bos, *text, end]
    assert with_bos.encode_chat(USER) == [bos, *text]
    assert with_bos.encode_chat(USER, template="{{ bos_token }}" + TEMPLATE) == [bos, *text]


def test_a_chat_without_a_template_or_with_surrogates_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        byte_level.encode_chat(USER)
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte_level.encode_chat([{"role": "user", "content": "\ud83d"}], template=TEMPLATE)
    assert caught.value.param == "messages"


def test_tokenizing_needs_neither_jax_nor_torch() -> None:
    program = "import sys, jaxinfer.detokenizer; print([name for name in ('jax', 'torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
