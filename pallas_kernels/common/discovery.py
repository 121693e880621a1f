"""Which operations there are: every folder of the package that has an `api`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pallas_kernels
from pallas_kernels.common.dispatch import Operation


def operations() -> list[Operation]:
    """All operations, by name."""
    return [operation(name) for name in operation_names()]


def operation(name: str) -> Operation:
    """The operation of a folder."""
    return importlib.import_module(f"pallas_kernels.{name}.api").OPERATION


def operation_names() -> list[str]:
    """Their folders' names, sorted."""
    found = [package.name for package in pkgutil.iter_modules(pallas_kernels.__path__) if package.ispkg]
    return sorted(name for name in found if importlib.util.find_spec(f"pallas_kernels.{name}.api") is not None)


def kernel_modules(operation: str) -> Iterator[ModuleType]:
    """Modules of an operation that say how a Mosaic GPU kernel is cut up: `mosaic...`, with a class whose name ends in `Config`."""
    package = importlib.import_module(f"pallas_kernels.{operation}")
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".mosaic" in found.name:
            module = importlib.import_module(found.name)
            if any(name.endswith("Config") and value.__module__ == found.name for name, value in classes(module)):
                yield module


def classes(module: ModuleType) -> list[tuple[str, type]]:
    """Classes that a module defines or imports."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, type)]
