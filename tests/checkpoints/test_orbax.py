"""Orbax folders: every array bit for bit, by Orbax's own reader and ours, quantized or not, on any number of devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import save_file

from jaxinfer import sharding
from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.convert import ConvertOptions, convert
from jaxinfer.checkpoints.load import Storage, declare_parameters, load_parameters
from jaxinfer.checkpoints.manifest import verify_folder
from jaxinfer.checkpoints.packed_json import KINDS, describe, parts_of, rebuild
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxinfer.models.config import find
from jaxinfer.quant.int8 import Int8Weight
from jaxinfer.quant.weight import method
from tests.checkpoints.checkpoint_files import EMBED, HEAD_DIM, HEADS, HF_CONFIG, gguf_tensors, hf_tensors, write_gguf

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose matrices are stored in several types."""
    tensors, kinds = gguf_tensors(hf_tensors()), {}
    for name, kind in (("blk.0.ffn_down.weight", "Q4_1"), ("blk.0.attn_q.weight", "Q8_0"), ("blk.1.ffn_up.weight", "Q5_0")):
        kinds[name] = GGMLQuantizationType[kind]
        tensors[name] = quantize(tensors[name], kinds[name])
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf", tensors, kinds=kinds, vocabulary=True)


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed where the source is, in several shards."""
    options = ConvertOptions(format="orbax", storage=Storage(keeps_packed=True), max_shard_bytes=60_000)
    return convert(str(source), tmp_path_factory.mktemp("orbax") / "tiny", options)


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "tiny"))


def edit_manifest(folder: Path, edit: Edit) -> None:
    manifest = json.loads((folder / "jaxinfer.json").read_text())
    edit(manifest)
    (folder / "jaxinfer.json").write_text(json.dumps(manifest))


def assert_equal_trees(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_floats_come_back_bit_for_bit_and_orbax_reads_them(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "a", ConvertOptions(format="orbax"))
    before, after = open_checkpoint(str(source)), open_checkpoint(str(folder))
    theirs = ocp.PyTreeCheckpointer().restore(folder / "weights-00001")
    assert set(after.tensors) == set(before.tensors) == set(theirs)
    for name, tensor in after.tensors.items():
        assert (tensor.shape, tensor.dtype, tensor.packed) == (before.tensors[name].shape, "float32", None)
        np.testing.assert_array_equal(tensor.read(), before.tensors[name].read())
        np.testing.assert_array_equal(theirs[name], before.tensors[name].read())
    assert (dict(after.config), after.generation_config, after.name) == (dict(before.config), before.generation_config, "a")
    assert after.load_tokenizer().encode("hey ö") == before.load_tokenizer().encode("hey ö")


def test_there_and_back_is_the_folder_that_is_written_directly(source: Path, tmp_path: Path) -> None:
    orbax = convert(str(source), tmp_path / "orbax", ConvertOptions(format="orbax"))
    back, direct = convert(str(orbax), tmp_path / "back"), convert(str(source), tmp_path / "direct")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (direct / name).read_bytes(), name
    ours, theirs = open_checkpoint(str(back)).tensors, open_checkpoint(str(direct)).tensors
    assert set(ours) == set(theirs)
    assert all(np.array_equal(ours[name].read(), theirs[name].read()) for name in ours)


def test_what_is_packed_stays_packed(source: Path, written: Path) -> None:
    before, after = open_checkpoint(str(source)).tensors, open_checkpoint(str(written)).tensors
    assert len(list(written.glob("weights-*"))) >= 2
    packed = [name for name, tensor in after.items() if tensor.packed is not None]
    assert sorted(packed) == [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]
    for name, tensor in after.items():
        np.testing.assert_array_equal(
            tensor.read(), before[name].read() if tensor.packed is None else before[name].packed.read().dequantize()
        )
        if tensor.packed is not None:
            assert_equal_trees(tensor.packed.read(), before[name].packed.read())
            declared = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tensor.packed.abstract)]
            assert declared == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tensor.packed.read())]


@pytest.mark.parametrize("quantization", ["int8", "int8_weight_only", "int4"])
@pytest.mark.parametrize("has_embeddings", [True, False])
def test_quantizing_is_what_loading_would_do(source: Path, tmp_path: Path, quantization: str, has_embeddings: bool) -> None:
    chosen = method(quantization, 32, True)
    assert chosen is not None
    options = ConvertOptions(
        format="orbax", dtype="bfloat16", storage=Storage(method=chosen, vocabulary=None if has_embeddings else Storage())
    )
    before, after = open_checkpoint(str(source)).tensors, open_checkpoint(str(convert(str(source), tmp_path / "a", options))).tensors
    for name, tensor in after.items():
        is_matrix = len(tensor.shape) == 2 and (has_embeddings or "embed_tokens" not in name)
        assert (tensor.packed is not None) == is_matrix, name
        if tensor.packed is not None:
            assert_equal_trees(tensor.packed.read(), chosen.from_float(before[name].read()))
        else:
            assert tensor.dtype == "bfloat16"
            np.testing.assert_array_equal(tensor.read(), before[name].read().astype(tensor.dtype))


def parameters(folder: Path, num_devices: int, storage: Storage) -> dict[str, Any]:
    """The model's parameters on that many devices, loaded as the engine loads them."""
    from flax import nnx

    checkpoint = open_checkpoint(str(folder))
    architecture = find(checkpoint.config, str(folder))
    config = architecture.Config.from_hf(checkpoint.config, str(folder))
    mesh = sharding.make_mesh(num_devices)
    model = architecture.Model(config, mesh, jnp.dtype("float32"), 64)
    load_parameters(declare_parameters(model, mesh, checkpoint, storage), checkpoint, mesh)
    return {str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))}


@pytest.fixture(scope="module")
def four_heads(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder whose heads can be split over four devices, and what is converted from it."""
    tensors, rng = hf_tensors(tied=False), np.random.default_rng(5)
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = rng.standard_normal((HEADS * HEAD_DIM, EMBED)).astype(np.float32)
    hf = convert(str(source), tmp_path_factory.mktemp("heads") / "hf")
    save_file(tensors, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps({**HF_CONFIG, "num_key_value_heads": HEADS, "tie_word_embeddings": False}))
    return hf, convert(str(hf), hf.parent / "orbax", ConvertOptions(format="orbax", max_shard_bytes=50_000))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_any_number_of_devices_gets_the_parameters_of_the_hf_folder(four_heads: tuple[Path, Path], num_devices: int) -> None:
    expected, got = (parameters(folder, num_devices, Storage()) for folder in four_heads)
    assert set(got) == set(expected)
    for name, leaf in got.items():
        assert leaf.sharding == expected[name].sharding
        assert len(leaf.sharding.device_set) == num_devices
        for mine, theirs in zip(leaf.addressable_shards, expected[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(theirs.data), err_msg=name)


def test_a_hf_folder_is_written_in_floats_only() -> None:
    with pytest.raises(ConfigError, match="--quantization needs --format orbax"):
        ConvertOptions(storage=Storage(keeps_packed=True))


def test_a_weight_is_made_again_from_its_description() -> None:
    weight = Int8Weight.from_float(np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32))
    described = json.loads(json.dumps(describe(weight)))
    assert described == {
        "kind": "Int8Weight",
        "values": {"shape": [4, 32], "dtype": "int8"},
        "scales": {"shape": [4], "dtype": "float32"},
    }
    assert_equal_trees(rebuild(described, parts_of(weight)), weight)
    assert set(KINDS) == {"Int8Weight", "PackedWeight", "PackedMatrix"}


def test_verify_takes_a_whole_folder_and_refuses_a_flipped_bit(written: Path, damaged: Path) -> None:
    files = [path for path in written.rglob("*") if path.is_file()]
    assert verify_folder(written) == len(files) - 1
    for path in sorted(damaged.rglob("*")):
        if path.is_file() and path.name != "jaxinfer.json" and path.stat().st_size:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            with pytest.raises(CheckpointError, match="sha256 is") as caught:
                verify_folder(damaged)
            assert caught.value.file == str(path)
            path.write_bytes(whole)
    assert verify_folder(damaged) == len(files) - 1


def test_verify_names_files_that_are_missing_too_many_or_of_another_size(damaged: Path) -> None:
    (damaged / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt: .*does not list"):
        verify_folder(damaged)
    (damaged / "notes.txt").unlink()
    (damaged / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: has 2 bytes"):
        verify_folder(damaged)
    (damaged / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        verify_folder(damaged)
    (damaged / "jaxinfer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no jaxinfer\.json"):
        verify_folder(damaged)


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


def tensor_edit(name: str, **changes: Any) -> Edit:
    return lambda manifest: manifest["tensors"][name].update(changes)


def packed_edit(change: Callable[[dict[str, Any]], Any]) -> Edit:
    return lambda manifest: change(manifest["tensors"][DOWN]["packed"])


@pytest.mark.parametrize(
    ("edit", "field", "words"),
    [
        (lambda m: m.update(format_version="1"), "format_version", "integer"),
        (lambda m: m.update(format="zip"), "format", "'zip'"),
        (lambda m: m.update(tensors=[]), "tensors", "dict"),
        (lambda m: m.update(tensors={}), "tensors", "no tensors"),
        (lambda m: m["tensors"].update({NORM: 5}), NORM, "shard"),
        (tensor_edit(NORM, shard="../../etc"), NORM, "not the name of a shard"),
        (tensor_edit(NORM, shard="weights-00099"), None, "weights-00099: the folder is missing"),
        (tensor_edit(NORM, shape=[31]), NORM, "is float32 of shape [32]"),
        (tensor_edit(NORM, shape=[2**40, 2**40]), NORM, "more than any memory"),
        (tensor_edit(NORM, shape=[2**40]), None, "truncated"),
        (tensor_edit(NORM, shape=[]), NORM, "positive integers"),
        (tensor_edit(NORM, shape=[-1]), NORM, "positive integers"),
        (tensor_edit(NORM, dtype="int8"), NORM, "says int8"),
        (tensor_edit(NORM, dtype="object"), NORM, "'object' is not supported"),
        (lambda m: m["tensors"].pop(NORM), NORM, "does not list it"),
        (lambda m: m["tensors"].update(nope=m["tensors"][NORM]), "nope", "cannot be read"),
        (packed_edit(lambda p: p.update(kind="os.system")), DOWN, "'os.system' is not supported"),
        (packed_edit(lambda p: p["matrix"].update(group_size=7)), DOWN, "parts do not fit"),
        (packed_edit(lambda p: p["matrix"].update(bits=-1)), DOWN, "matrix.bits"),
        (packed_edit(lambda p: p["matrix"].update(bits="4")), DOWN, "matrix.bits"),
        (packed_edit(lambda p: p["matrix"].update(nope=1)), DOWN, "matrix.nope is no part"),
        (packed_edit(lambda p: p["matrix"].pop("codes")), DOWN, "matrix.codes is missing"),
        (packed_edit(lambda p: p["matrix"]["codes"].update(shape=[9, 2, 16])), DOWN, "no part of a tensor of shape [32, 64]"),
        (packed_edit(lambda p: p.pop("matrix")), DOWN, "matrix is missing"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(damaged: Path, edit: Edit, field: str | None, words: str) -> None:
    edit_manifest(damaged, edit)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(damaged))
    assert caught.value.field == field
    assert words in str(caught.value)
    assert str(damaged) in caught.value.file


def test_a_later_format_is_not_supported(damaged: Path) -> None:
    edit_manifest(damaged, lambda manifest: manifest.update(format_version=2))
    with pytest.raises(UnsupportedModelError, match="format_version 2"):
        open_checkpoint(str(damaged))


@pytest.mark.parametrize("damage", ["shard", "manifest.ocdbt", "data", "config.json"])
def test_a_folder_without_one_of_its_parts_is_refused(damaged: Path, damage: str) -> None:
    if damage == "shard":
        shutil.rmtree(damaged / "weights-00001")
    elif damage == "data":
        shutil.rmtree(damaged / "weights-00001" / "d")
    else:
        (damaged / ("weights-00001/manifest.ocdbt" if damage == "manifest.ocdbt" else damage)).unlink()
    with pytest.raises(CheckpointError):
        open_checkpoint(str(damaged))


def test_a_shard_cut_short_is_refused(damaged: Path) -> None:
    largest = max((path for path in damaged.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointError) as caught:
        for tensor in open_checkpoint(str(damaged)).tensors.values():
            tensor.read()
    assert "weights-" in caught.value.file


def test_an_unfinished_folder_is_never_opened(written: Path, tmp_path: Path) -> None:
    left = Path(shutil.copytree(written, tmp_path / ".tiny.abc.unfinished"))
    with pytest.raises(CheckpointError, match="interrupted"):
        open_checkpoint(str(left))
    with pytest.raises(ConfigError, match="must not end"):
        convert(str(written), tmp_path / "x.unfinished")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_logits_are_those_of_the_hf_folder_on_any_number_of_devices(four_heads: tuple[Path, Path]) -> None:
    from jaxinfer import LLM

    def logits(folder: Path, num_devices: int) -> np.ndarray:
        llm = LLM(
            model=str(folder),
            dtype="float32",
            quantization="none",
            tensor_parallel_size=num_devices,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            num_kv_blocks=16,
            show_progress=False,
        )
        return llm.engine.logits_for([1, 7, 200, 31, 100, 65, 3])

    hf, orbax = four_heads
    expected = logits(hf, 1)
    np.testing.assert_array_equal(logits(orbax, 1), expected)
    for num_devices in (2, 4):
        np.testing.assert_allclose(logits(orbax, num_devices), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
