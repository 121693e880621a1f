"""`jaxinfer pull` and `jaxinfer convert` as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.cli.main import main
from tests.checkpoints.checkpoint_files import write_gguf


def test_convert_prints_where_the_folder_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", vocabulary=True)
    target = tmp_path / "hf"
    assert main(["convert", str(source), str(target), "--format", "hf", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert (target / "model.safetensors").is_file()
    assert main(["convert", str(source), str(target)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "exists and is not an empty folder" in captured.err


def test_a_damaged_source_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(write_gguf(tmp_path / "whole.gguf").read_bytes()[:-1000])
    assert main(["convert", str(source), str(tmp_path / "hf")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(source) in error
    assert not (tmp_path / "hf").exists()


def test_pull_of_an_unknown_model_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nope"]) == 1
    assert "known: smollm2-135m" in capsys.readouterr().err


def test_orbax_quantized_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_gguf(tmp_path / "tiny.gguf", vocabulary=True), tmp_path / "orbax"
    words = ["--format", "orbax", "--quantization", "int4", "--quantization-group-size", "32", "--quantize-embeddings", "off", "--verify"]
    assert main(["convert", str(source), str(target), *words]) == 0
    packed = [name for name, tensor in open_checkpoint(str(target)).tensors.items() if tensor.packed is not None]
    assert len(packed) == 14
    assert main(["verify", str(target)]) == 0
    assert "files are as they were written" in capsys.readouterr().out
    (target / "config.json").write_text((target / "config.json").read_text().replace("128", "129"))
    assert main(["verify", str(target)]) == 1
    error = capsys.readouterr().err
    assert "config.json: sha256 is" in error
    assert main(["convert", str(target), str(tmp_path / "again"), "--verify"]) == 1
    assert "config.json: sha256 is" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantization", "int8"], "--quantization needs --format orbax"),
        (["--format", "orbax", "--quantization-group-size", "32"], "--quantization-group-size is for --quantization int4, got none"),
        (["--format", "orbax", "--quantization", "int8", "--quantization-zero-point", "on"], "--quantization-zero-point is for"),
        (["--format", "orbax", "--quantize-embeddings", "on"], "--quantize-embeddings is for"),
        (["--format", "orbax", "--quantization", "int4", "--quantization-group-size", "33"], "--quantization-group-size must be one of"),
        (["--max-shard-bytes", "0"], "--max-shard-bytes must be at least"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", vocabulary=True)
    assert main(["convert", str(source), str(tmp_path / "new"), *words]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
