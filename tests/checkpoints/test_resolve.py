"""What `--model` may be, and what it says when it is something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.errors import CheckpointError, ConfigError
from tests.checkpoints.checkpoint_files import write_gguf, write_hf_folder


def test_a_hub_id_is_downloaded_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf_folder(tmp_path / "snapshot")
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").name == "org/name"
    assert asked["repo_id"] == "org/name"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert "model*.safetensors" in patterns
    assert not [pattern for pattern in patterns if pattern.endswith((".bin", ".py", ".pt", "*"))]


def test_offline_a_hub_id_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise LocalEntryNotFoundError("Name or service not known\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Name or service not known") as caught:
        open_checkpoint("org/name")
    assert "\n" not in str(caught.value)
    assert caught.value.option == "--model"


@pytest.mark.parametrize(
    "model", ["", "nope", "./nope.gguf", "folder/nope.gguf", "a\0b", "x" * 5000, "~nobody/x/y", "/no/such/folder", "a/b/c"]
)
def test_what_is_not_there_lists_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"allowed: a preset \(smollm2-135m, qwen2\.5-coder-0\.5b, gemma3-270m\), a GGUF file") as caught:
        open_checkpoint(model)
    assert len(str(caught.value)) < 600


def test_folders_and_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    write_hf_folder(tmp_path)
    with pytest.raises(CheckpointError, match="give the folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(str(tmp_path / "config.json"))
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        open_checkpoint(str(tmp_path / "empty.gguf"))


def test_a_path_comes_before_a_preset_and_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf_folder(tmp_path / "smollm2-135m")
    write_hf_folder(tmp_path / "org" / "name")
    assert open_checkpoint("smollm2-135m").path == Path("smollm2-135m")
    assert open_checkpoint("org/name").name == "name"
    write_gguf(tmp_path / "model without suffix")
    assert open_checkpoint("model without suffix").config["hidden_size"] == 32


def test_jax_is_not_imported() -> None:
    code = "import sys, jaxinfer.checkpoints.convert, jaxinfer.checkpoints.hub; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
