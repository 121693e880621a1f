"""Finding the assembler; the folders are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pallas_kernels.deviceless.toolchain import PLUGINS, ToolchainMissing, assembler_first, environment, find_toolchain


def install(folder: Path, plugin: str, *, with_assembler: bool = True) -> None:
    (folder / f"jax_{plugin}_plugin").mkdir(parents=True)
    if with_assembler:
        ptxas = folder / PLUGINS[plugin][0]
        ptxas.parent.mkdir(parents=True)
        ptxas.touch()


@pytest.mark.parametrize(("plugin", "version"), [("cuda13", "13.0.0"), ("cuda12", "12.9.0")])
def test_both_plugins_are_found(plugin: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, plugin)
    monkeypatch.syspath_prepend(tmp_path)
    found = find_toolchain()
    assert (found.plugin, found.cuda_version, found.ptxas) == (plugin, version, tmp_path / PLUGINS[plugin][0])


def test_a_plugin_without_its_assembler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "cuda13", with_assembler=False)
    # One on PATH does not count: XLA would take it or not, depending on the machine.
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ToolchainMissing, match="jax-cuda13-plugin is installed, but not"):
        find_toolchain()


def test_without_a_plugin_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ToolchainMissing, match=r"scripts/gpu_toolchain\.sh"):
        find_toolchain()


def test_a_subprocess_gets_the_folder_first_and_no_gpu(tmp_path: Path) -> None:
    install(tmp_path, "cuda12")
    made = environment(tmp_path, {"PATH": "/bin", "PYTHONPATH": "/elsewhere", "LANG": "C"})
    assert made["PATH"].split(os.pathsep) == [str(tmp_path / "nvidia/cuda_nvcc/bin"), "/bin"]
    assert made["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/elsewhere"]
    assert (made["JAX_PLATFORMS"], made["LANG"]) == ("cpu", "C")


def test_path_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "cuda13")
    monkeypatch.syspath_prepend(tmp_path)
    before = os.environ["PATH"]
    with assembler_first(find_toolchain()):
        assert os.environ["PATH"].startswith(str(tmp_path / "nvidia/cu13/bin") + os.pathsep)
    assert os.environ["PATH"] == before
