"""Choose an implementation of an operation: the first that does not refuse the arguments."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

_log = logging.getLogger("pallas_kernels")


class UnsupportedByKernel(Exception):
    """An implementation cannot run with these arguments on this device; `reason` says why."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@functools.lru_cache(maxsize=256)
def _log_once(operation: str, implementation: str, refusals: tuple[str, ...]) -> None:
    _log.info("%s: %s%s", operation, implementation, f" (refused: {'; '.join(refusals)})" if refusals else "")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation and its implementations, fastest first. Calling it runs the first one that accepts the arguments.

    Attributes:
        if_named: by implementation, the keywords that it is called with beside the caller's when it was asked for by name and is
            not one of several: {"mosaic": {"interpret": True}} lets whoever asks for a GPU's kernel have it interpreted, while
            off a GPU the automatic choice passes it over.
    """

    name: str
    implementations: Mapping[str, Callable[..., Any]]
    if_named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := self.if_named.keys() - self.implementations.keys():
            raise ValueError(f"{self.name}: if_named has {', '.join(sorted(unknown))}, which is none of {', '.join(self.implementations)}")

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        """Run it; `implementation` names one and lets no other take its place.

        Raises:
            ValueError: unknown implementation.
            UnsupportedByKernel: every implementation refused; the reason lists each one's.
        """
        if implementation is not None:
            if implementation not in self.implementations:
                raise ValueError(f"{self.name}: implementation must be one of {', '.join(self.implementations)}, got {implementation!r}")
            return self.implementations[implementation](*args, **kwargs, **self.if_named.get(implementation, {}))
        name, refusals, result = self._first(*args, **kwargs)
        _log_once(self.name, name, tuple(refusals))
        return result

    def choice(self, arrays: Mapping[str, Any], static: Mapping[str, Any]) -> tuple[str, list[str]]:
        """The implementation that a call with these keywords takes here, and why those before it do not; nothing is computed.

        Raises:
            UnsupportedByKernel: every implementation refused.
        """
        chosen: list[tuple[str, list[str]]] = []

        def trace(traced: Mapping[str, Any]) -> Any:
            name, refusals, result = self._first(**traced, **static)
            chosen.append((name, refusals))
            return result

        jax.eval_shape(trace, dict(arrays))
        return chosen[-1]

    def _first(self, *args: Any, **kwargs: Any) -> tuple[str, list[str], Any]:
        refusals: list[str] = []
        for name, run in self.implementations.items():
            try:
                return name, refusals, run(*args, **kwargs)
            except UnsupportedByKernel as refusal:
                refusals.append(f"{name}: {refusal.reason}")
        raise UnsupportedByKernel(f"{self.name}: no implementation runs here: {'; '.join(refusals)}")
