"""Notebooks: each is a .py and an .ipynb that say the same, and runs from its first cell to its last."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import matplotlib.image
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.notebooks.executing import execute, with_parameters

FOLDER = Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
SMALL = {
    "01_quickstart": {"MAX_TOKENS": 8, "MEASURED_TOKENS": 4, "CONCURRENCIES": (1, 32)},
    "02_quantization": {"NUM_WINDOWS": 1, "WINDOW": 32, "LAYERS": (0, 29)},
    "03_kv_memory": {"NUM_REQUESTS": 600, "TURNS": 3, "LENGTHS": (16, 64, 128), "PROMPT_TOKENS": 256, "ANSWER_TOKENS": 16, "REPEATS": 1},
    "04_kernels_roofline": {"COUNTED": 1},
}
"""Parameters of each notebook that make it short."""


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[str]]]:
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_every_notebook_is_a_pair() -> None:
    assert [path.stem for path in SCRIPTS] == [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
    assert {path.stem for path in SCRIPTS} == set(SMALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_both_halves_say_the_same(script: Path) -> None:
    assert cells(jupytext.read(script)) == cells(jupytext.read(script.with_suffix(".ipynb"))), "run `jupytext --sync notebooks/*.py`"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_outputs_are_kept(script: Path) -> None:
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


async def test_a_cell_that_fails_raises(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("number = 1\nassert number == 2")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        await execute(notebook, folder=tmp_path, timeout_seconds=60)


async def test_parameters_are_replaced(tmp_path: Path) -> None:
    given = nbformat.v4.new_code_cell("size = 1", metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[given, nbformat.v4.new_code_cell("import sys\nprint(size, sys.executable)")])
    with pytest.raises(AssertionError, match="no such parameters"):
        with_parameters(notebook, {"length": 2})
    small = with_parameters(notebook, {"size": 2})
    await execute(small, folder=tmp_path, timeout_seconds=60)
    assert [output.text for output in outputs(small)] == [f"2 {sys.executable}\n"]
    assert len(notebook.cells) == 2


# Compiling its programs, which only the first run on a machine does, takes minutes on a slow one.
@pytest.mark.timeout(900)
async def test_quickstart_runs(smollm2_path: Path) -> None:
    """Its own cells assert what must hold: seeds, KV blocks, no compiles. A cell that fails fails here."""
    notebook = with_parameters(jupytext.read(FOLDER / "01_quickstart.ipynb"), SMALL["01_quickstart"])
    await execute(notebook, folder=FOLDER, timeout_seconds=600)
    complaints = [output.text for output in outputs(notebook) if output.output_type == "stream" and output.name == "stderr"]
    assert complaints == [], "a reader would see warnings"
    text = "".join(output.text for output in outputs(notebook) if output.output_type == "stream" and output.name == "stdout")
    assert "The capital of France is Paris" in text
    assert "32 answers" in text
    check_pictures(notebook, count=1)


@pytest.mark.timeout(900)
async def test_quantization_runs(smollm2_path: Path) -> None:
    """The table, the errors of every matrix, and which layer int4 hurts most."""
    notebook = with_parameters(jupytext.read(FOLDER / "02_quantization.ipynb"), SMALL["02_quantization"])
    await execute(notebook, folder=FOLDER, timeout_seconds=600)
    text = "".join(output.text for output in outputs(notebook) if output.output_type == "stream" and output.name == "stdout")
    assert "the largest is" in text
    check_pictures(notebook, count=3)


@pytest.mark.timeout(900)
async def test_kv_memory_runs(smollm2_path: Path) -> None:
    """Its own cells assert what must hold: which tier a prompt came from, that answers share blocks, that nothing is lost."""
    notebook = with_parameters(jupytext.read(FOLDER / "03_kv_memory.ipynb"), SMALL["03_kv_memory"])
    await execute(notebook, folder=FOLDER, timeout_seconds=600)
    text = "".join(output.text for output in outputs(notebook) if output.output_type == "stream" and output.name == "stdout")
    shares = {name: float(percent) for percent, name in re.findall(r"([\d.]+) % \((\w+)\)", text)}
    assert shares["max"] > shares["pow2"] > shares["oracle"] > 30
    assert shares["paged"] < 4
    check_pictures(notebook, count=7)


async def test_kernels_roofline_runs() -> None:
    """Its own cells assert what must hold: bytes moved, and what fewer bits bring. Nothing unmeasured is shown as measured."""
    notebook = with_parameters(jupytext.read(FOLDER / "04_kernels_roofline.ipynb"), SMALL["04_kernels_roofline"])
    await execute(notebook, folder=FOLDER, timeout_seconds=100)
    text = "".join(output.text for output in outputs(notebook) if output.output_type == "stream" and output.name == "stdout")
    floors = re.findall(r"^(\w+ \w+) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+  (?:memory|products)$", text, flags=re.MULTILINE)
    assert len(floors) > 40
    assert len(floors) == len(set(floors))
    assert re.search(r" (1\.0[0-4]\d|0\.999)$", text, flags=re.MULTILINE), "no kernel's bytes were counted"
    assert ("no measurement of a GPU" in text) != ("measured on" in text)
    check_pictures(notebook, count=2)


def check_pictures(notebook: nbformat.NotebookNode, *, count: int) -> None:
    images = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(images) == count
    for image in images:
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(image)))
        assert pixels.shape[0] > 100
        assert pixels.shape[1] > 100
        assert pixels[..., :3].std() > 0.01, "the plot is blank"
