"""Safetensors folders against the safetensors library, and folders with damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxinfer.checkpoints import LazyTensor, open_checkpoint
from jaxinfer.checkpoints.safetensors import open_safetensors, write_safetensors
from jaxinfer.errors import CheckpointError
from tests.checkpoints.checkpoint_files import HF_CONFIG, write_hf_folder

INDEX = "model.safetensors.index.json"


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


@pytest.mark.parametrize(("shards", "tied"), [(1, True), (3, True), (3, False)])
def test_a_folder_is_read_as_it_was_written(tmp_path: Path, shards: int, tied: bool) -> None:
    tensors = write_hf_folder(tmp_path / "tiny", shards, tied)
    checkpoint = open_checkpoint(str(tmp_path / "tiny"))
    assert checkpoint.name == "tiny"
    assert checkpoint.config == {**HF_CONFIG, "tie_word_embeddings": tied}
    assert checkpoint.generation_config == {}
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in checkpoint.tensors.items():
        assert (tensor.shape, tensor.dtype) == (tensors[name].shape, "float32")
        np.testing.assert_array_equal(tensor.read(), tensors[name], err_msg=name)


def test_generation_config_is_read(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(str(tmp_path)).generation_config == {"eos_token_id": [1, 2]}


def lazy(values: np.ndarray) -> LazyTensor:
    return LazyTensor(values.shape, values.dtype.name, partial(np.asarray, values))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int8, np.uint8, np.bool_])
def test_written_files_are_what_the_library_reads(tmp_path: Path, dtype: Any) -> None:
    values = {"a": np.arange(6).reshape(2, 3).astype(dtype), "scalar": np.array(1).astype(dtype), "odd": np.ones(7).astype(dtype)}
    path = tmp_path / "a.safetensors"
    size = write_safetensors(path, {name: lazy(value) for name, value in values.items()})
    assert size == path.stat().st_size
    theirs, ours = load_file(path), open_safetensors(path)
    assert set(theirs) == set(ours) == set(values)
    for name, value in values.items():
        for got in (theirs[name], ours[name].read()):
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(got, value)
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_writing_converts_real_numbers_only(tmp_path: Path) -> None:
    third = np.full(5, 1 / 3, np.float32)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"real": lazy(third), "whole": lazy(np.arange(3))}, np.dtype(ml_dtypes.bfloat16))
    got = {name: tensor.read() for name, tensor in open_safetensors(path).items()}
    assert got["whole"].dtype == np.int64
    np.testing.assert_array_equal(got["real"], third.astype(ml_dtypes.bfloat16))


def raw_file(path: Path, header: str | bytes, data_bytes: int = 8) -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), data_offsets: Any = (0, 8)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": data_offsets})


def test_the_whole_file_that_is_damaged_below(tmp_path: Path) -> None:
    assert open_safetensors(raw_file(tmp_path / "a.safetensors", f'{{"x":{entry()}}}'))["x"].read().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("header", "field", "message"),
    [
        (f'{{"x":{entry()},"x":{entry()}}}', "header", "'x' appears twice"),
        ('{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "header", "'dtype' appears twice"),
        ("not json", "header", "not valid JSON"),
        ("[]", "header", "must be a JSON object"),
        ("[" * 100_000, "header", "nested too deeply"),
        (b'{"\xff":1}', "header", "not valid JSON"),
        (f'{{"x":{"9" * 5000}}}', "header", "not valid JSON"),
        ("{}", "header", "no tensors"),
        ('{"__metadata__":{"format":"pt"}}', "header", "no tensors"),
        ('{"x":3}', "x", "must have dtype, shape and data_offsets"),
        ('{"x":{"dtype":"F32","shape":[2]}}', "x", "must have dtype, shape and data_offsets"),
        (f'{{"x":{entry("F99")}}}', "x", "'F99' is not supported"),
        (f'{{"x":{entry(["F32"])}}}', "x", "not supported"),
        (f'{{"x":{entry(shape=[0])}}}', "x", "positive integers"),
        (f'{{"x":{entry(shape=[-2])}}}', "x", "positive integers"),
        (f'{{"x":{entry(shape=[2.0])}}}', "x", "positive integers"),
        (f'{{"x":{entry(shape=[True, 2])}}}', "x", "positive integers"),
        (f'{{"x":{entry(shape="2")}}}', "x", "positive integers"),
        (f'{{"x":{entry(shape=[1] * 9)}}}', "x", "at most 8"),
        (f'{{"x":{entry(shape=[2**40, 2**40])}}}', "x", "do not fit"),
        (f'{{"x":{entry(shape=[3])}}}', "x", "do not fit"),
        (f'{{"x":{entry(data_offsets=[8, 0])}}}', "x", "do not fit"),
        (f'{{"x":{entry(data_offsets=[-8, 0])}}}', "x", "two integers"),
        (f'{{"x":{entry(data_offsets=[0, 8, 8])}}}', "x", "two integers"),
        (f'{{"x":{entry(data_offsets=[8, 16])}}}', "x", "starts at byte 8"),
        (f'{{"x":{entry(shape=[1], data_offsets=[0, 4])}}}', "x", "after the last tensor"),
        (f'{{"x":{entry(shape=[4], data_offsets=[0, 16])}}}', "x", "truncated"),
        (f'{{"x":{entry(shape=[1], data_offsets=[0, 4])},"y":{entry(shape=[1], data_offsets=[2, 6])}}}', "y", "starts at byte 2"),
        (f'{{"x":{entry()},"y":{entry()}}}', "y", "starts at byte 0"),
    ],
    ids=count(),
)
def test_a_header_that_makes_no_sense_is_named(tmp_path: Path, header: str | bytes, field: str, message: str) -> None:
    path = raw_file(tmp_path / "a.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(path)
    assert (caught.value.file, caught.value.field) == (str(path), field)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", bytes(8), b"\xff" * 16, (2**40).to_bytes(8, "little") + b"{}", b"PK\x03\x04" * 8], ids=count()
)
def test_other_contents_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: header"):
        open_safetensors(tmp_path / "a.safetensors")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(str(tmp_path))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def swap(folder: Path) -> None:
    (folder / shard(1)).rename(folder / "other")
    (folder / shard(2)).rename(folder / shard(1))
    (folder / "other").rename(folder / shard(2))


def cut(folder: Path) -> None:
    path = folder / shard(3)
    path.write_bytes(path.read_bytes()[:-1])


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda folder: (folder / shard(2)).unlink(), shard(2)),
    "shard cut by a byte": (cut, shard(3)),
    "shard empty": (lambda folder: (folder / shard(3)).write_bytes(b""), shard(3)),
    "shard is a folder": (lambda folder: ((folder / shard(1)).unlink(), (folder / shard(1)).mkdir()), shard(1)),
    "shards swapped": (swap, "model-0000"),
    "tensor in the wrong shard": (
        lambda folder: edit_index(folder, lambda w: w.update({UP: shard(1) if w[UP] != shard(1) else shard(2)})),
        UP,
    ),
    "index lacks a tensor": (lambda folder: edit_index(folder, lambda w: w.pop(UP)), UP),
    "index has a tensor too many": (lambda folder: edit_index(folder, lambda w: w.update({"more": shard(1)})), "more"),
    "index names another folder": (lambda folder: edit_index(folder, lambda w: w.update({UP: "../" + shard(1)})), UP),
    "index names a number": (lambda folder: edit_index(folder, lambda w: w.update({UP: 3})), UP),
    "index without weight_map": (lambda folder: (folder / INDEX).write_text("{}"), "weight_map"),
    "index with an empty weight_map": (lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'), "weight_map"),
    "index is half": (lambda folder: (folder / INDEX).write_text('{"weight_map": {'), INDEX),
    "index missing": (lambda folder: (folder / INDEX).unlink(), "safetensors"),
    "config missing": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is half": (lambda folder: (folder / "config.json").write_text('{"a": 1'), "config.json"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "config with a key twice": (lambda folder: (folder / "config.json").write_text('{"a": 1, "a": 2}'), "config.json"),
    "generation config is half": (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.replace(" ", "-"))
def test_a_damaged_folder_is_refused_before_weights_are_read(tmp_path: Path, damage: str) -> None:
    do_damage, named = DAMAGES[damage]
    write_hf_folder(tmp_path, shards=3)
    do_damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write_hf_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}.*pickle runs code"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="pickle runs code"):
        open_checkpoint(str(tmp_path / name))


def test_weights_that_vanish_after_opening_are_an_error(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "a")
    tensor = open_checkpoint(str(tmp_path / "a")).tensors["model.norm.weight"]
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        tensor.read()
    assert caught.value.field == "model.norm.weight"
