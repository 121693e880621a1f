"""Files made to take memory or to mislead: refused by name, before any weight is read and in little memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoints import open_checkpoint, safetensors
from jaxinfer.checkpoints.convert import convert
from jaxinfer.errors import CheckpointError
from tests.checkpoints.checkpoint_files import HF_CONFIG, LAYERS, byte_level_fields, gguf_tensors, hf_tensors, write_gguf, write_hf_folder

MAX_BYTES = 300 * 2**20


@contextmanager
def little_memory() -> Generator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True)
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> np.ndarray:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(safetensors, "read_stored_bytes", refuse)


def refused(path: Path) -> CheckpointError:
    with little_memory(), pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    return caught.value


def hf_folder(tmp_path: Path, **changes: Any) -> Path:
    write_hf_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2**31 - 1),
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", 200),
        ("n_layer", 2**40),
        ("hidden_size", 2**31 - 1),
        ("head_dim", 261),
        ("vocab_size", 2**31 - 1),
        ("num_experts", 2**31 - 1),
        ("n_routed_experts", 2**20),
        ("num_nextn_predict_layers", 2**31 - 1),
    ],
)
def test_a_configuration_beyond_the_tensors_is_named(tmp_path: Path, name: str, value: int) -> None:
    error = refused(hf_folder(tmp_path, **{name: value}))
    assert (error.file, error.field) == (str(tmp_path / "config.json"), name)


def test_sizes_that_fit_are_taken(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, num_experts=LAYERS)
    assert open_checkpoint(str(folder)).config["num_experts"] == LAYERS


@pytest.mark.parametrize(
    "text",
    ["[" + "0," * 2_000_001 + "0]", '{"a":[' + "{}," * 1_500_000 + "{}]}", '{"a":' + "[" * 3_000_000],
    ids=["numbers", "objects", "depth"],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json", "jaxinfer.json"])
def test_json_with_millions_of_values(tmp_path: Path, text: str, name: str) -> None:
    write_hf_folder(tmp_path, shards=2)
    (tmp_path / name).write_text(text)
    error = refused(tmp_path)
    assert error.file == str(tmp_path / name)
    assert "values; at most 2000000 are allowed" in str(error)


def test_a_json_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**33)
    assert "8589934592 bytes; at most" in str(refused(tmp_path))


def test_a_safetensors_header_with_millions_of_values(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    header = b'{"a":[' + b"1," * 3_000_000 + b"1]}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert refused(tmp_path).field == "header"


def sparse(path: Path, start: bytes, num_bytes: int) -> Path:
    """A file that begins so and goes on with zeros, which take no disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(num_bytes)
    return path


def gguf_start(num_tensors: int, num_fields: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(rest)


def array_of(item_kind: int, count: int) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, item_kind, count)


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (gguf_start(2**26, 0), "tensor_count"),
        (gguf_start(0, 2**26), "kv_count"),
        (gguf_start(0, 1, array_of(8, 2**25)), "a"),
        (gguf_start(0, 1, array_of(0, 2**30)), "a"),
        (gguf_start(0, 1, array_of(12, 2**27)), "a"),
    ],
    ids=["tensors", "fields", "strings", "bytes", "doubles"],
)
def test_counts_that_a_large_file_could_hold(tmp_path: Path, start: bytes, field: str) -> None:
    error = refused(sparse(tmp_path / "large.gguf", start, 2**32))
    assert error.field == field
    assert "are allowed" in str(error)


def test_arrays_are_bounded_together(tmp_path: Path) -> None:
    half = array_of(0, 3 * 2**20) + bytes(3 * 2**20)
    start = gguf_start(0, 2, half, struct.pack("<Q", 1) + b"b" + half[9:])
    error = refused(sparse(tmp_path / "large.gguf", start, len(start) + 64))
    assert error.field == "b"


def write_gguf_with_tokenizer(tmp_path: Path, num_rows: int) -> Path:
    tensors = hf_tensors()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:num_rows]
    fields = {**byte_level_fields(), "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return write_gguf(tmp_path / "a.gguf", gguf_tensors(tensors), fields)


def test_a_vocabulary_larger_than_the_embedding(tmp_path: Path) -> None:
    assert len(open_checkpoint(str(write_gguf_with_tokenizer(tmp_path, 260))).tensors) > 0
    assert refused(write_gguf_with_tokenizer(tmp_path, 259)).field == "tokenizer.ggml.tokens"


def test_a_folders_tokenizer_larger_than_its_vocabulary(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", vocab_size=250)
    open_checkpoint(str(write_gguf_with_tokenizer(tmp_path, 260))).load_tokenizer().save(source)
    with pytest.raises(CheckpointError, match=r"tokenizer: has 260 tokens, more than config\.json's vocab_size 250"):
        convert(str(source), tmp_path / "new")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def other_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"), [(pickled, "only pickled weights"), (other_shard, "model-00001-of-00002.safetensors: the file is missing")]
)
def test_folders_without_their_weights(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = hf_folder(tmp_path)
    damage(folder)
    assert words in str(refused(folder))
