"""GGUF -> Hugging Face folder, judged by the libraries that read such folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
import transformers
from safetensors.numpy import load_file

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.convert import ConvertOptions, convert
from jaxinfer.errors import CheckpointError, ConfigError
from tests.checkpoints.checkpoint_files import HF_CONFIG, gguf_tensors, hf_tensors, write_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", vocabulary=True)


def test_weights_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "new" / "hf")
    weights, expected = load_file(folder / "model.safetensors"), hf_tensors()
    assert set(weights) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(weights[name], values, err_msg=name)
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]


def test_a_separate_output_matrix_is_written(tmp_path: Path) -> None:
    tensors = hf_tensors(tied=False)
    source = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(tensors), vocabulary=True)
    folder = convert(str(source), tmp_path / "hf")
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])
    assert open_checkpoint(str(folder)).config["tie_word_embeddings"] is False


def test_transformers_reads_configuration_tokenizer_and_template(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "hf")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert isinstance(config, transformers.LlamaConfig)
    for name in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "vocab_size"):
        assert getattr(config, name) == HF_CONFIG[name], name
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 257
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("hey ö")["input_ids"]) == "hey ö"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == 260


def test_converting_again_changes_nothing(source: Path, tmp_path: Path) -> None:
    first = convert(str(source), tmp_path / "first")
    second = convert(str(first), tmp_path / "second")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert dict(open_checkpoint(str(first)).config) == dict(open_checkpoint(str(source)).config)


def test_bfloat16_rounds(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "hf", ConvertOptions(dtype="bfloat16"))
    assert open_checkpoint(str(folder)).config["torch_dtype"] == "bfloat16"
    expected = hf_tensors()["model.norm.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["model.norm.weight"], expected)


def test_shards_are_no_larger_than_asked_and_load_in_the_library(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "hf", ConvertOptions(max_shard_bytes=20_000))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    weights = {name: values for file in files for name, values in load_file(folder / file).items()}
    expected = hf_tensors()
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in expected.values())
    for name, values in expected.items():
        np.testing.assert_array_equal(weights[name], values, err_msg=name)
        np.testing.assert_array_equal(open_checkpoint(str(folder)).tensors[name].read(), values)
    for file in files:
        held = load_file(folder / file)
        assert sum(values.nbytes for values in held.values()) <= 20_000 or len(held) == 1


def test_an_existing_folder_with_files_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    convert(str(source), tmp_path / "hf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for taken in (tmp_path / "mine", tmp_path / "mine" / "notes.txt", source):
        with pytest.raises(ConfigError, match="exists and is not an empty folder"):
            convert(str(source), taken)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_conversion_that_fails_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxinfer.checkpoints.convert.write_safetensors_folder", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "hf")
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_a_folder_that_cannot_be_made_is_named(source: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(str(source), source / "hf")


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"format": "gguf"}, "--format must be one of hf, orbax"),
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"max_shard_bytes": 10}, "--max-shard-bytes must be at least"),
    ],
)
def test_unknown_options_list_what_is_allowed(option: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        ConvertOptions(**option)
