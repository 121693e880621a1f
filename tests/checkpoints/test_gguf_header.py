"""The header walk against gguf's own reader, and on files with damage."""

from __future__ import annotations

import random
import struct
from itertools import count
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.gguf_header import read_gguf_header
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints.checkpoint_files import write_gguf

TENSOR_COUNT_AT, FIELD_COUNT_AT, FIRST_KEY_AT = 8, 16, 24


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "whole.gguf").read_bytes()


def header_bytes(whole: bytes, tmp_path: Path) -> int:
    """Where the tensors' data starts, by gguf's own reader."""
    (tmp_path / "measured.gguf").write_bytes(whole)
    return gguf.GGUFReader(tmp_path / "measured.gguf").data_offset


def opened(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    open_checkpoint(str(path))
    return path


def test_metadata_and_positions_are_those_of_the_gguf_reader(tmp_path: Path) -> None:
    extra = {"test.list": [1, -2, 3], "test.words": ["a", "", "ö"], "test.flag": True, "test.real": 0.5}
    path = write_gguf(tmp_path / "a.gguf", metadata=extra, vocabulary=True)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert header.metadata == {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    theirs = {t.name: (tuple(t.shape.tolist())[::-1], t.tensor_type, t.data_offset, t.n_bytes) for t in reader.tensors}
    assert {name: (t.shape, t.kind, t.offset, t.num_bytes) for name, t in header.tensors.items()} == theirs


def test_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {t.name: t.data_offset for t in gguf.GGUFReader(path).tensors}
    assert {name: t.offset for name, t in read_gguf_header(path).tensors.items()} == theirs


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    data_start = header_bytes(whole, tmp_path)
    for length in [*range(0, data_start, 7), data_start, data_start + 1, (data_start + len(whole)) // 2, len(whole) - 1]:
        with pytest.raises(CheckpointError, match=r"damaged\.gguf"):
            opened(tmp_path, whole[:length])


def test_a_cut_tensor_is_named(tmp_path: Path, whole: bytes) -> None:
    last = max(read_gguf_header(write_gguf(tmp_path / "b.gguf")).tensors.items(), key=lambda item: item[1].offset)
    kept = whole[: last[1].offset + last[1].num_bytes - 1]
    with pytest.raises(CheckpointError, match="truncated") as caught:
        opened(tmp_path, kept)
    assert caught.value.field == last[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_header_byte_is_refused_or_harmless(tmp_path: Path, whole: bytes, seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for position in range(seed, header_bytes(whole, tmp_path), 8):
        damaged = bytearray(whole)
        damaged[position] = rng.choice([0, 0xFF, damaged[position] ^ 1, damaged[position] ^ 0x80])
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(str(path))
        except (CheckpointError, UnsupportedModelError):
            refused += 1
            continue
        for tensor in checkpoint.tensors.values():
            assert tensor.shape == tensor.read().shape
    assert refused > 20


@pytest.mark.parametrize(
    ("position", "form", "value", "field"),
    [
        (0, "4s", b"GGML", "magic"),
        (4, "I", 1, "version"),
        (4, "I", 0x03000000, "version"),
        (TENSOR_COUNT_AT, "Q", 2**31, "tensor_count"),
        (TENSOR_COUNT_AT, "Q", 2**64 - 1, "tensor_count"),
        (FIELD_COUNT_AT, "Q", 2**33, "kv_count"),
        (FIRST_KEY_AT, "Q", 2**63, "metadata field 0"),
        (FIRST_KEY_AT, "Q", 2**20, "metadata field 0"),
        (FIRST_KEY_AT + 8, "2s", b"\xff\xfe", "metadata field 0"),
    ],
    ids=count(),
)
def test_a_header_field_that_makes_no_sense_is_named(
    tmp_path: Path, whole: bytes, position: int, form: str, value: object, field: str
) -> None:
    damaged = bytearray(whole)
    struct.pack_into("<" + form, damaged, position, value)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, bytes(damaged))
    assert caught.value.field == field


def hand_made(fields: list[bytes], tensors: list[bytes], data_bytes: int = 64) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields + tensors)
    return header + bytes(-len(header) % 32 + data_bytes)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


F32, Q4_0 = 0, 2
GOOD = tensor_info("good", [4], F32, 0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([GOOD, tensor_info("bad", [], F32, 32)], "0 dimensions"),
        ([GOOD, tensor_info("bad", [1] * 5, F32, 32)], "5 dimensions"),
        ([GOOD, tensor_info("bad", [2**32, 2**32], F32, 32)], "truncated"),
        ([GOOD, tensor_info("bad", [0], F32, 32)], "do not fit"),
        ([GOOD, tensor_info("bad", [31], Q4_0, 32)], "blocks of 32"),
        ([GOOD, tensor_info("bad", [4], 4, 32)], "unknown tensor type 4"),
        ([GOOD, tensor_info("bad", [4], F32, 33)], "alignment"),
        ([GOOD, tensor_info("bad", [4], F32, 64)], "truncated"),
        ([GOOD, tensor_info("bad", [4], F32, 2**63)], "truncated"),
        ([tensor_info("good", [16], F32, 0), tensor_info("bad", [4], F32, 32)], "overlaps tensor 'good'"),
        ([tensor_info("bad", [4], F32, 0), tensor_info("bad", [4], F32, 32)], "twice"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path: Path, tensors: list[bytes], message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(hand_made([], [GOOD, tensor_info("bad", [4], F32, 32)]))
    assert set(read_gguf_header(path).tensors) == {"good", "bad"}
    path.write_bytes(hand_made([], tensors))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_header(path)
    assert caught.value.field == "bad"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (text("key") + struct.pack("<I", 13), "unknown value type 13"),
        (text("key") + struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (text("key") + struct.pack("<IIQ", 9, 4, 2**40), "array's length is"),
        (text("key") + struct.pack("<IIQ", 9, 8, 2**40), "array's length is"),
        (text("key") + struct.pack("<IQ", 8, 2**40), "truncated"),
        (text("general.alignment") + struct.pack("<II", 4, 24), "power of two"),
        (text("general.alignment") + struct.pack("<II", 4, 0), "power of two"),
    ],
    ids=count(),
)
def test_metadata_that_cannot_be_is_named(tmp_path: Path, field: bytes, message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(hand_made([field], [GOOD]))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_header(path)
    assert caught.value.field in ("key", "general.alignment")


def test_a_metadata_field_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(hand_made([text("key") + struct.pack("<II", 4, 1)] * 2, [GOOD]))
    with pytest.raises(CheckpointError, match="twice"):
        read_gguf_header(path)


def test_version_2_is_read_too(tmp_path: Path, whole: bytes) -> None:
    damaged = bytearray(whole)
    struct.pack_into("<I", damaged, 4, 2)
    assert read_gguf_header(opened(tmp_path, bytes(damaged))).metadata["general.architecture"] == "llama"
