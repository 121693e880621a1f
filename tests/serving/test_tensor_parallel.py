"""SmolLM2 over three virtual devices, through the server, against one device."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

NUM_LAYERS = 30
NEW_TOKENS = 16
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "num_kv_blocks": 160}
SUBJECTS = ("France", "music", "the sea", "a small village", "prime numbers", "bread", "winter", "the moon")
PROMPTS = [f"{opening} {subject}" for subject in SUBJECTS for opening in ("Tell me about", "Once upon a time there was")]


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


@pytest.fixture
def port(smollm2_path: Path, compile_cache_dir: Path) -> Iterator[int]:
    """A server of its own process, ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [part for name, value in OPTIONS.items() for part in ("--" + name.replace("_", "-"), str(value))]
    command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(smollm2_path), "--port", str(port), "--dtype", "float32"]
    server = subprocess.Popen([*command, "--tensor-parallel-size", "3", "--compile-cache-dir", str(compile_cache_dir), *flags])
    try:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            assert server.poll() is None, "the server ended while starting"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                if answer.status == 200:
                    break
            time.sleep(0.5)
        yield port
    finally:
        server.terminate()
        assert server.wait(60) == 0


def test_three_devices_answer_as_one(port: int, smollm2_path: Path, compile_cache_dir: Path) -> None:
    one_device = LLM(model=str(smollm2_path), dtype="float32", compile_cache_dir=compile_cache_dir, show_progress=False, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in one_device.generate(PROMPTS, params, show_progress=False)]
    bodies = [
        {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True} for prompt in PROMPTS
    ]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        name = json.load(answer)["data"][0]["id"]
    with ThreadPoolExecutor(max_workers=len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(port, {"model": name, **body}), bodies))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected


def test_collectives_of_the_step(smollm2_path: Path, compile_cache_dir: Path) -> None:
    """Two all-reduces a layer (after attention and after the MLP), one for the embedding, one gather of the logits."""
    llm = LLM(
        model=str(smollm2_path),
        dtype="float32",
        tensor_parallel_size=3,
        compile_cache_dir=compile_cache_dir,
        show_progress=False,
        **OPTIONS,
    )
    runner: Any = llm.engine.runner
    for program in runner._forward.values():
        found = re.findall(r"= [^=]*\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", program.as_text())
        assert sorted(found) == ["all-gather"] + ["all-reduce"] * (2 * NUM_LAYERS + 1)
