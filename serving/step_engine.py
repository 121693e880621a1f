"""What EngineThread drives, and the states it goes through."""

from __future__ import annotations

import enum
from typing import Protocol

from jaxinfer.client import EngineDescription, EngineSnapshot
from jaxinfer.kv.kv_map import KVMap
from jaxinfer.request import GenerationRequest, RequestDelta, RequestId
from jaxinfer.tokenizer import Tokenizer


class StepEngine(Protocol):
    """What is needed of `jaxinfer.engine.Engine`; only `validate` is called from other threads than its owner's."""

    description: EngineDescription
    tokenizer: Tokenizer

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request; raises RequestError when it can never run."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget a request; unknown ids are ignored."""
        ...

    def step(self) -> list[RequestDelta]:
        """Schedule and run one step."""
        ...

    def validate(self, request: GenerationRequest) -> None:
        """Raise RequestError when the request can never run. Pure."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges of this moment."""
        ...

    def kv_map(self) -> KVMap:
        """The blocks of this moment, and who holds them."""
        ...

    def close(self) -> None:
        """End what still runs, and keep on disk what shall be found there again; nothing is called afterwards but `snapshot`."""
        ...


class EngineState(enum.Enum):
    """Where an EngineThread stands; it only moves downwards."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"
