"""`jaxinfer pull` and `jaxinfer convert` as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest

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
