"""Executes a notebook in a kernel of the interpreter that runs the tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default


class ThisInterpreter(KernelSpecManager):
    """The one kernel there is: a machine may have a `python3` kernel of another environment, or none."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, language="python", display_name=kernel_name)


class ThisInterpreterKernel(AsyncKernelManager):
    """Given to nbclient as a class, not as an object: it shuts down only the kernels that it made itself."""

    @default("kernel_spec_manager")
    def _this_interpreter(self) -> KernelSpecManager:
        return ThisInterpreter(parent=self)


def with_parameters(notebook: nbformat.NotebookNode, parameters: Mapping[str, Any]) -> nbformat.NotebookNode:
    """A copy whose cell tagged `parameters` is followed by one that sets some of them anew."""
    copy = nbformat.from_dict(notebook)
    (index,) = [index for index, cell in enumerate(copy.cells) if "parameters" in cell.metadata.get("tags", ())]
    unknown = [name for name in parameters if f"{name} = " not in copy.cells[index].source]
    assert not unknown, f"the notebook has no such parameters: {unknown}"
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    copy.cells.insert(index + 1, nbformat.v4.new_code_cell(source))
    return copy


async def execute(notebook: nbformat.NotebookNode, *, folder: Path, timeout_seconds: float) -> None:
    """Run every cell and fill in its outputs; raises CellExecutionError at the first cell that fails."""
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisInterpreterKernel,
        kernel_name="this-interpreter",
        timeout=timeout_seconds,
        resources={"metadata": {"path": str(folder)}},
    )
    await client.async_execute()
