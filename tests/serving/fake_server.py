"""A server process with a fake engine: `python -m tests.serving.fake_server PORT SHUTDOWN_TIMEOUT [loading | broken]`."""

from __future__ import annotations

import sys
import time

from jaxinfer.errors import CheckpointError
from serving.config import ServerConfig
from serving.run_server import run_server
from tests.serving.fake_engine import FakeEngine


def main() -> int:
    port, shutdown_timeout, *mode = sys.argv[1:]

    def build() -> FakeEngine:
        if mode == ["loading"]:
            time.sleep(60)
        if mode == ["broken"]:
            raise CheckpointError("is cut short", file="model.gguf")
        return FakeEngine(step_seconds=0.01, max_model_len=100_000, max_num_seqs=2)

    return run_server(build, ServerConfig(port=int(port), shutdown_timeout=float(shutdown_timeout)))


if __name__ == "__main__":
    sys.exit(main())
