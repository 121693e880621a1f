"""The server as a process: signals, exit codes, the port."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from jaxinfer.errors import ConfigError
from serving.config import ServerConfig
from serving.run_server import bind, run_server
from tests.serving.fake_engine import MODEL_NAME, FakeEngine

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Process:
    """A server process and what it has said."""

    process: asyncio.subprocess.Process
    url: str
    session: aiohttp.ClientSession

    async def line(self, pattern: str) -> str:
        """The next line that it says that matches."""
        async with asyncio.timeout(30):
            while line := (await self.process.stderr.readline()).decode():
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"the process ended without saying {pattern!r}")

    async def read_stream(self, num_tokens: int) -> str:
        """The raw events of a stream."""
        body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": num_tokens, "stream": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            return await response.text()

    async def status(self, path: str) -> int:
        async with self.session.get(self.url + path) as response:
            return response.status

    async def start_streams(self, count: int, num_tokens: int) -> list[asyncio.Task[str]]:
        """Streams that the engine has taken in, half of which wait in its queue."""
        tasks = [asyncio.create_task(self.read_stream(num_tokens)) for _ in range(count)]
        async with asyncio.timeout(20):
            while True:
                async with self.session.get(f"{self.url}/metrics") as response:
                    counts = re.findall(r"^jaxinfer_requests_(?:running|waiting) (.+)$", await response.text(), re.MULTILINE)
                if sum(map(float, counts)) == count:
                    return tasks


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Process]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.serving.fake_server", str(port), *arguments, cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with aiohttp.ClientSession() as session:
            yield Process(started, f"http://127.0.0.1:{port}", session)
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def test_sigterm_lets_all_streams_end():
    async with process("30") as server:
        assert server.url in await server.line("serving fake-model at")
        streams = await server.start_streams(4, 60)
        server.process.send_signal(signal.SIGTERM)
        await server.line("draining")
        assert await server.status("/ready") == 503
        assert await server.status("/health") == 200
        texts = await asyncio.gather(*streams)
        assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in texts)
        assert await asyncio.wait_for(server.process.wait(), 10) == 0


@pytest.mark.parametrize("is_second_signal", [False, True])
async def test_streams_that_may_not_end_get_an_error(is_second_signal: bool):
    async with process("60" if is_second_signal else "0") as server:
        await server.line("serving fake-model at")
        streams = await server.start_streams(4, 50_000)
        server.process.send_signal(signal.SIGTERM)
        if is_second_signal:
            await server.line("draining")
            server.process.send_signal(signal.SIGTERM)
        texts = await asyncio.gather(*streams)
        assert all("shutting down" in text.strip().splitlines()[-1] and "[DONE]" not in text for text in texts)
        assert await asyncio.wait_for(server.process.wait(), 10) == 0


async def test_sigterm_while_loading_ends_soon():
    async with process("30", "loading") as server:
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await server.status("/health") == 200
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
        assert await server.status("/ready") == 503
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.process.wait(), 10) == 0


def test_an_error_of_loading_comes_out():
    def build() -> FakeEngine:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        run_server(build, ServerConfig(port=0))


def test_a_port_in_use_is_named_before_anything_is_loaded():
    is_loading = False

    def build() -> FakeEngine:
        nonlocal is_loading
        is_loading = True
        return FakeEngine()

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            run_server(build, ServerConfig(port=port))
    assert not is_loading


def test_two_servers_never_share_a_port():
    with bind(ServerConfig(port=0)) as first, pytest.raises(ConfigError, match="already in use"):
        bind(ServerConfig(port=first.getsockname()[1]))


def test_a_host_that_is_none():
    with pytest.raises(ConfigError, match="--host 'no such host'"):
        bind(ServerConfig(host="no such host", port=0))
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind(ServerConfig(host="203.0.113.1", port=0))


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1}, {"port": 65536}, {"port": True}, {"host": ""}, {"api_key": ("",)}, {"api_key": (" x",)}, {"max_body_bytes": 10},
        {"header_timeout": 0.0}, {"body_timeout": float("nan")}, {"shutdown_timeout": -1.0}, {"step_timeout": float("inf")},
        {"served_model_name": " "},
    ],
)  # fmt: skip
def test_settings_out_of_range_name_their_option(options: dict):
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.option == "--" + next(iter(options)).replace("_", "-")
    assert caught.value.option in str(caught.value)
